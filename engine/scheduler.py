"""Decides what each step computes: one token budget for decodes, chunked prefills and new requests. Pure.

Knows tokens, blocks and slots as numbers; no torch, no clock, no model. It may run one step ahead of the device:
`schedule` is called while the previous step is in flight, and a token that is sampled but not yet known counts as
present (`num_in_flight`). `update` brings the results in, one step later. With micro-batches, several steps are in
flight in the stages of a pipeline; then a sequence waits for its sampled token before it enters another step, and every
step takes its share of the budget and of the decodes, so that no stage runs empty.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from .plan import NewSequence, Row, StepPlan, StepResult
from .prefix_cache import BlockHasher, PrefixCache
from .request import (
    EngineRequest,
    FinishReason,
    Refusal,
    RefusalReason,
    RequestDelta,
    RequestStatus,
    TokenLogprobs,
)
from .set_aside import Reserved, SetAside
from .step_budget import StepBudget


@dataclass(frozen=True)
class SchedulerLimits:
    """What was settled at start-up. Sizes in tokens unless named otherwise."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    max_model_len: int
    vocab_size: int | None
    """None: token ids are not looked at, where only lengths count (a simulation)."""
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    num_micro_batches: int = 1
    """Steps in flight that share `max_num_batched_tokens` and no sampled token; 1: one step ahead of the device."""
    max_mixed_prefill_tokens: int | None = None
    """Prompt tokens of a step that also decodes; None: as many as fit."""


@dataclass(eq=False)
class Sequence:
    """A request inside the scheduler. `token_ids` are the known tokens: prompt and outputs."""

    request: EngineRequest
    arrival: int
    token_ids: list[int]
    max_output_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    """Full blocks already offered to the prefix cache."""
    num_computed: int = 0
    """Tokens whose KV is in the cache once the steps in flight are done."""
    num_in_flight: int = 0
    """Tokens sampled by steps whose results are not in yet: 0 or 1."""
    num_tokens: int = field(init=False)
    """Tokens that exist, known or in flight."""
    num_cached_tokens: int | None = None
    reserved: Reserved | None = None
    """Blocks that hold its first tokens' KV though it has not run yet."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        params = self.request.params
        self.num_tokens = self.num_first_known = len(self.token_ids)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.wants_prompt_logprobs = params.prompt_logprobs is not None

    @property
    def order(self) -> tuple[int, int]:
        return (self.request.priority, self.arrival)

    @property
    def num_to_compute(self) -> int:
        """Tokens the device still has to compute; 0 while only results are awaited."""
        if self.num_tokens - self.num_prompt_tokens >= self.max_output_tokens > 0:
            return 0
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens - self.num_computed == 1 and self.num_tokens > self.num_prompt_tokens


class Scheduler:
    """Continuous batching over one paged cache. One thread owns it."""

    def __init__(
        self, limits: SchedulerLimits, cache: PrefixCache, hasher: BlockHasher, budget: StepBudget | None = None
    ) -> None:
        """`budget` bounds the prompt tokens of a step that also decodes; None: whatever the limits leave room for."""
        self.limits = limits
        self.cache = cache
        self._hasher = hasher
        self._budget = budget
        self._sequences: dict[str, Sequence] = {}
        self.set_aside = SetAside(cache, hasher if limits.enable_prefix_caching else None)
        self.on_lost: Callable[[Sequence], None] = lambda sequence: None
        """Told, before it happens, that a sequence loses its blocks or ends unfinished."""
        self.on_start: Callable[[str], None] = lambda request_id: None
        """Told of a request when something of it is computed for the first time."""
        self.on_end: Callable[[str, int], None] = lambda request_id, num_output_tokens: None
        """Told of a request that has all its output tokens, and how many those are."""
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._provided: list[tuple[tuple[int, int], Sequence]] = []
        """Those that wait and have their blocks: nothing that the others wait for but a slot."""
        self._lacks_blocks = False
        """Whether a request that waits has found too few blocks."""
        self._running: list[Sequence] = []  # by order: the last is the first to be preempted
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._scheduled: dict[int, list[Sequence]] = {}
        self._arrivals = itertools.count()
        self._step_ids = itertools.count()
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._num_left_tokens = 0
        self._quiet_room: int | None = None
        """Free blocks after a step that decided nothing; None when it did, or when something has changed since."""
        self.num_context_tokens = 0
        """KV-cache tokens that the decodes of the last step read."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished = 0
        self.num_cancelled = 0
        self.num_refused = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be computed beside decodes: all of requests that wait, the rest of those that were begun."""
        return self._num_waiting_tokens + self._num_left_tokens

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def add(self, request: EngineRequest, *, is_ready: bool = True) -> Refusal | None:
        """Queue a request, or say why it is not taken. One that is not ready waits for `make_ready`."""
        refusal = self._refusal(request)
        if refusal is not None:
            self.num_refused += 1
            return refusal
        token_ids = request.prompt_token_ids + request.output_token_ids
        sequence = Sequence(request, next(self._arrivals), token_ids, self._max_output_tokens(request))
        if request.block_hashes and self._hasher.begins_as(
            request.block_hashes, request.prompt_token_ids, salt=request.cache_salt
        ):
            sequence.block_hashes = list(request.block_hashes)
        self._sequences[request.request_id] = sequence
        self._quiet_room = None
        if is_ready:
            heapq.heappush(self._waiting, (sequence.order, sequence))
        else:
            sequence.num_computed = sequence.num_tokens - 1  # the others are expected to be there by then
        self._count_waiting(sequence)
        return None

    def make_ready(self, request_id: str, reserved: Reserved | None) -> bool:
        """Let a request run that was added as not ready: in blocks that hold its first tokens' KV, or (None) as any.

        `reserved.token_ids` are the first of its tokens, but not all. Returns whether it will start from them.
        """
        sequence = self._sequences[request_id]
        self._quiet_room = None
        self._left_queue(sequence)
        if reserved is not None and not self._can_start_from(sequence, reserved):
            self.set_aside.give_back(reserved)
            reserved = None
        sequence.reserved, sequence.num_computed = reserved, 0 if reserved is None else len(reserved.token_ids)
        self._count_waiting(sequence)
        heapq.heappush(self._waiting if reserved is None else self._provided, (sequence.order, sequence))
        return reserved is not None

    @property
    def provided(self) -> list[Reserved]:
        """The blocks of requests that wait in them for a slot (for tests)."""
        return [sequence.reserved for _, sequence in self._provided if sequence.reserved is not None]

    def reserve(self, token_ids: list[int], *, salt: str | None) -> Reserved | None:
        """Blocks for tokens whose KV comes from elsewhere, and for the token after them; None when there is no room.

        They go to a request that is made ready with them, or back to `set_aside`.
        """
        if self._lacks_blocks or len(token_ids) >= self.limits.max_model_len:
            return None
        size = self._hasher.block_size
        return self.set_aside.reserve(token_ids, block_size=size, salt=salt, num_spare=self._num_growing)

    def sequences_of(self, plan: StepPlan) -> list[Sequence]:
        """Those of a plan's rows, in their order, until its results are in."""
        return self._scheduled[plan.step_id]

    def cancel(self, request_id: str) -> bool:
        """Forget a request at once, whatever it is doing. False when it is not here."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self.on_lost(sequence)
        self._finish(sequence)
        self.num_cancelled += 1
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute now."""
        step = _Step(-(-self.limits.max_num_batched_tokens // self.limits.num_micro_batches))
        most_decodes = self._most_decodes()
        num_preemptions = self.num_preemptions
        prefills = []
        for sequence in list(self._running):  # decodes first: running streams never wait for prefills
            if not sequence.is_decoding:
                prefills.append(sequence)
            elif most_decodes is not None and (sequence.num_in_flight or len(step.rows) == most_decodes):
                continue  # in another micro-batch, or left to the next one
            elif sequence.num_to_compute and sequence.status is RequestStatus.RUNNING:
                self._schedule_decode(step, sequence)
        if step.rows:
            self._bound_prefills(step, prefills)
        for sequence in prefills:
            if sequence.num_to_compute and sequence.status is RequestStatus.RUNNING:
                if step.budget:
                    self._schedule_tokens(step, sequence)
                else:
                    step.num_left_tokens += sequence.num_to_compute
        self._admit(step)
        self.num_context_tokens, self._num_left_tokens = step.num_context_tokens, step.num_left_tokens
        is_quiet = len(step.rows) == len(self._running) and not prefills and not step.new
        self._quiet_room = self.cache.pool.num_free if is_quiet and num_preemptions == self.num_preemptions else None
        if not step.rows:
            return None
        plan = StepPlan(next(self._step_ids), self._freed_slots, step.new, step.rows, step.decode_token_ids)
        self._freed_slots = []
        self._scheduled[plan.step_id] = step.sequences
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Bring in a step's results, in the order of the plans. Returns what is new for each request."""
        deltas = []
        tokens = iter(result.token_ids)
        for index, (sequence, row) in enumerate(zip(self._scheduled.pop(plan.step_id), plan.rows, strict=True)):
            token_id = None
            if row.samples:
                token_id = next(tokens)
                sequence.num_in_flight -= 1
            if sequence.status is RequestStatus.FINISHED:
                continue  # ended meanwhile: the surplus token is dropped
            if result.prompt_logprobs and index in result.prompt_logprobs:
                found = result.prompt_logprobs[index]  # of positions start + 1 on; again the same after a preemption
                sequence.prompt_logprobs[row.start : row.start + len(found)] = found
            if token_id is not None:
                deltas.append(self._accept(sequence, token_id, result.logprobs.get(index) if result.logprobs else None))
            elif sequence.max_output_tokens == 0 and row.start + row.num_tokens >= sequence.num_prompt_tokens:
                deltas.append(self._end(sequence, RequestDelta(request_id=sequence.request.request_id)))
        assert next(tokens, None) is None, "more tokens than rows that sample"
        return deltas

    def num_quiet_steps(self) -> int:
        """How many steps could follow the last one in which nothing is decided: each running sequence gets one more
        token, none ends by its length, needs a block or fills one, and nobody enters. 0 when that is not known."""
        if self._quiet_room != self.cache.pool.num_free or self.limits.num_micro_batches > 1:
            return 0
        size, fills = self._hasher.block_size, self.limits.enable_prefix_caching
        most = self.limits.max_model_len
        for sequence in self._running:
            computed = sequence.num_computed
            filled = (sequence.num_published + 1) * size - 1 if fills else len(sequence.block_ids) * size
            left = sequence.max_output_tokens - 1 - len(sequence.token_ids) + sequence.num_prompt_tokens
            most = min(most, filled - computed, left)
        return max(0, most) if self._running else 0

    def repeat(self, num_steps: int, token_id: int) -> None:
        """The last step again and again: as if `num_steps` steps were scheduled and as many results brought in, each of
        them `token_id`, which ends no sequence. At most `num_quiet_steps`; for simulations, whose results are known."""
        assert num_steps <= self.num_quiet_steps()
        for sequence in self._running:
            sequence.token_ids.extend([token_id] * num_steps)
            sequence.num_computed += num_steps
            sequence.num_tokens += num_steps
        self.num_context_tokens += num_steps * len(self._running)
        self.num_generated_tokens += num_steps * len(self._running)

    def check(self) -> None:
        """Assert that blocks, slots and queues add up (for tests: after any step)."""
        self.cache.check()
        references = [0] * self.cache.pool.num_blocks
        for sequence in self._running:
            assert sequence.status is RequestStatus.RUNNING
            assert sequence.slot is not None
            assert sequence.reserved is None
            for block_id in sequence.block_ids:
                references[block_id] += 1
        for block_id, count in enumerate(references):
            assert self.cache.pool.num_references(block_id) == count + self.set_aside.references(block_id)
        for _, sequence in self._provided:
            assert (sequence.reserved is None) == (sequence.status is RequestStatus.FINISHED)
        slots = [sequence.slot for sequence in self._running]
        assert len(set(slots)) == len(slots)
        assert len(slots) + len(self._free_slots) == self.limits.max_num_seqs
        waiting = [s for s in self._sequences.values() if s.status is not RequestStatus.RUNNING]
        assert len(waiting) == self._num_waiting
        assert len(self._running) + len(waiting) == len(self._sequences)

    def _refusal(self, request: EngineRequest) -> Refusal | None:
        def refuse(reason: RefusalReason, message: str) -> Refusal:
            return Refusal(request_id=request.request_id, reason=reason, message=message)

        num_prompt_tokens, limit = len(request.prompt_token_ids), self.limits.max_model_len
        max_tokens = request.params.max_tokens
        if request.request_id in self._sequences:
            return refuse(RefusalReason.INVALID, f"Request id {request.request_id!r} is already in use.")
        if not num_prompt_tokens:
            return refuse(RefusalReason.INVALID, "The prompt must hold at least one token.")
        token_ids, vocab_size = request.prompt_token_ids, self.limits.vocab_size
        if vocab_size is not None and (max(token_ids) >= vocab_size or min(token_ids) < 0):
            message = f"The prompt holds token ids outside the vocabulary (0 to {vocab_size - 1})."
            return refuse(RefusalReason.INVALID, message)
        needed = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
        if needed > limit:
            message = (
                f"This model's maximum context length is {limit} tokens, but {num_prompt_tokens} prompt tokens and "
                f"{needed - num_prompt_tokens} output tokens were requested. Shorten the prompt or lower max_tokens."
            )
            return refuse(RefusalReason.TOO_LONG, message)
        if len(request.output_token_ids) >= self._max_output_tokens(request) > 0:
            return refuse(RefusalReason.INVALID, "The request already has all the output that it may have.")
        if self._num_waiting >= self.limits.max_num_waiting + len(self._free_slots):
            message = f"The queue is full ({self._num_waiting} requests wait). Try again later."
            return refuse(RefusalReason.OVERLOADED, message)
        return None

    def _max_output_tokens(self, request: EngineRequest) -> int:
        room = self.limits.max_model_len - len(request.prompt_token_ids)
        return room if request.params.max_tokens is None else min(request.params.max_tokens, room)

    def _count_waiting(self, sequence: Sequence) -> None:
        self._num_waiting += 1
        self._num_waiting_tokens += sequence.num_tokens - sequence.num_computed

    def _left_queue(self, sequence: Sequence) -> None:
        self._num_waiting -= 1
        self._num_waiting_tokens -= sequence.num_tokens - sequence.num_computed

    def _can_start_from(self, sequence: Sequence, reserved: Reserved) -> bool:
        """Whether blocks that are there already save the sequence work, and are enough for its known tokens."""
        has_room = len(sequence.token_ids) <= len(reserved.block_ids) * self._hasher.block_size
        return has_room and not sequence.wants_prompt_logprobs  # which have to be computed

    @property
    def _num_growing(self) -> int:
        """Sequences that take more blocks by and by, those that will run in reserved ones among them."""
        return len(self._running) + self.set_aside.num_reserved

    def _most_decodes(self) -> int | None:
        """A micro-batch's share of the decodes; None where steps are no micro-batches."""
        if self.limits.num_micro_batches == 1:
            return None
        return -(-sum(sequence.is_decoding for sequence in self._running) // self.limits.num_micro_batches)

    def _schedule_decode(self, step: _Step, sequence: Sequence) -> None:
        if not step.budget:
            return
        new_block_ids: list[int] = []
        if sequence.num_computed == len(sequence.block_ids) * self._hasher.block_size:
            while not self.cache.pool.can_allocate(1):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return
            new_block_ids = self.cache.pool.allocate(1)
            sequence.block_ids.extend(new_block_ids)
        assert sequence.slot is not None
        if self.limits.num_micro_batches > 1:  # the device that samples is not the one that reads
            step.decode_token_ids.append(sequence.token_ids[sequence.num_computed])
        step.add(Row(sequence.slot, sequence.num_computed, 1, new_block_ids, samples=True, is_decode=True), sequence)
        sequence.num_computed += 1
        sequence.num_tokens += 1
        sequence.num_in_flight += 1
        step.num_context_tokens += sequence.num_computed
        if sequence.num_computed >= (sequence.num_published + 1) * self._hasher.block_size:
            self._publish(sequence)

    def _bound_prefills(self, step: _Step, prefills: list[Sequence]) -> None:
        """Leave the step, which holds its decodes, the budget that keeps it short enough for them."""
        if self.limits.max_mixed_prefill_tokens is not None:
            step.budget = min(step.budget, self.limits.max_mixed_prefill_tokens)
        if self._budget is None:
            return
        num_context_tokens = sum(row.start for row in step.rows) + len(step.rows)
        start = prefills[0].num_computed if prefills else 0
        most = self._budget.prefill_tokens(len(step.rows), num_context_tokens, prefill_start=start)
        step.budget = min(step.budget, most)

    def _admit(self, step: _Step) -> None:
        self._lacks_blocks = False
        while self._provided and step.budget and self._free_slots:
            sequence = heapq.heappop(self._provided)[1]
            if sequence.status is not RequestStatus.FINISHED:
                self._left_queue(sequence)
                self._start_provided(step, sequence)
        while self._waiting and step.budget and self._free_slots:
            sequence = self._waiting[0][1]
            if sequence.status is RequestStatus.FINISHED:
                heapq.heappop(self._waiting)
                continue
            if sequence.num_in_flight:
                return  # preempted a moment ago: its last token is not known yet
            cached = self._cached_blocks(sequence)
            pool, size = self.cache.pool, self._hasher.block_size
            num_missing = -(-len(sequence.token_ids) // size) - len(cached)
            num_revived = sum(1 for block_id in cached if not pool.num_references(block_id))
            # Running sequences grow: one spare block for each keeps an admission from preempting them at once.
            if not pool.can_allocate(num_missing + num_revived + self._num_growing):
                self._lacks_blocks = True
                return
            heapq.heappop(self._waiting)
            self._left_queue(sequence)
            for block_id in cached:
                pool.acquire(block_id)
            sequence.block_ids = cached + pool.allocate(num_missing)
            sequence.num_computed = len(cached) * size
            self._start(step, sequence, num_cached_blocks=len(cached))

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        if not self.limits.enable_prefix_caching:
            return []
        self._hasher.extend(sequence.block_hashes, sequence.token_ids, salt=sequence.request.cache_salt)
        if sequence.wants_prompt_logprobs and not self._has_prompt_logprobs(sequence):
            return []  # every prompt position has to be computed
        # At least one token is computed, so that there are logits to sample from.
        return self.cache.lookup(sequence.block_hashes[: (len(sequence.token_ids) - 1) // self._hasher.block_size])

    def _start_provided(self, step: _Step, sequence: Sequence) -> None:
        reserved = sequence.reserved
        assert reserved is not None
        self.set_aside.hand_over(reserved)
        sequence.reserved, sequence.block_ids = None, list(reserved.block_ids)
        sequence.block_hashes = reserved.block_hashes
        self._start(step, sequence, num_cached_blocks=reserved.num_cached_tokens // self._hasher.block_size)

    def _start(self, step: _Step, sequence: Sequence, *, num_cached_blocks: int) -> None:
        """Let a sequence run whose blocks and computed tokens are set; so many of the blocks were cached here."""
        sequence.num_published = num_cached_blocks
        sequence.slot = self._free_slots.pop()
        sequence.status = RequestStatus.RUNNING
        if sequence.num_cached_tokens is None:
            num_cached_tokens = num_cached_blocks * self._hasher.block_size
            sequence.num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            self.num_cached_tokens += sequence.num_cached_tokens
            self.on_start(sequence.request.request_id)
        bisect.insort(self._running, sequence, key=lambda s: s.order)
        request = sequence.request
        step.new.append(
            NewSequence(
                sequence.slot,
                sequence.token_ids[:],
                sequence.num_prompt_tokens,
                list(sequence.block_ids),
                request.params,
                list(self.limits.eos_token_ids),
            )
        )
        self._schedule_tokens(step, sequence)

    def _schedule_tokens(self, step: _Step, sequence: Sequence) -> None:
        """As many of the sequence's tokens as the budget has room for; their blocks are there already."""
        assert sequence.slot is not None
        num_tokens = min(sequence.num_to_compute, step.budget)
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        samples = end == sequence.num_tokens and sequence.max_output_tokens > 0
        asks = sequence.wants_prompt_logprobs and not self._has_prompt_logprobs(sequence)
        step.add(Row(sequence.slot, start, num_tokens, [], samples, False, start if asks else None), sequence)
        sequence.num_computed = end
        step.num_left_tokens += sequence.num_tokens - end
        sequence.num_tokens += samples
        sequence.num_in_flight += samples
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Offer full blocks of known tokens to the cache. Their KV is written by the steps launched so far, before
        any later reader's attention; requests of the same step may share them, since a step writes before it reads."""
        if not self.limits.enable_prefix_caching:
            return
        size = self._hasher.block_size
        if sequence.num_computed < (sequence.num_published + 1) * size:
            return
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // size
        self._hasher.extend(sequence.block_hashes, sequence.token_ids, salt=sequence.request.cache_salt)
        for index in range(sequence.num_published, num_full):
            self.cache.publish(sequence.block_ids[index], sequence.block_hashes[index])
        sequence.num_published = num_full

    def _has_prompt_logprobs(self, sequence: Sequence) -> bool:
        return len(sequence.prompt_logprobs) >= sequence.num_prompt_tokens - 1

    def _preempt(self, sequence: Sequence) -> None:
        """Take blocks and slot away; all tokens are recomputed when it runs again."""
        self.on_lost(sequence)
        self._leave(sequence)
        sequence.status = RequestStatus.PREEMPTED
        sequence.num_computed = sequence.num_published = 0
        self.num_preemptions += 1
        self._count_waiting(sequence)
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self.cache.release(sequence.block_ids)
        sequence.block_ids = []
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        sequence.slot = None

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is RequestStatus.RUNNING:
            self._leave(sequence)
        else:
            self._left_queue(sequence)
            if sequence.reserved is not None:
                self.set_aside.give_back(sequence.reserved)
                sequence.reserved = None
        sequence.status = RequestStatus.FINISHED
        self._quiet_room = None
        del self._sequences[sequence.request.request_id]

    def _accept(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> RequestDelta:
        request, params = sequence.request, sequence.request.params
        delta = RequestDelta(request_id=request.request_id, token_ids=[token_id])
        if logprobs is not None:
            delta.logprobs = [logprobs]
        if len(sequence.token_ids) == sequence.num_first_known:
            self._add_first_facts(sequence, delta)
        sequence.token_ids.append(token_id)
        self.num_generated_tokens += 1
        num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        is_eos = not params.ignore_eos and token_id in self.limits.eos_token_ids
        if (is_eos or token_id in params.stop_token_ids) and num_output_tokens >= params.min_tokens:
            delta.stop_token_id = token_id
            return self._end(sequence, delta, FinishReason.STOP)
        if num_output_tokens >= sequence.max_output_tokens:
            return self._end(sequence, delta, FinishReason.LENGTH)
        return delta

    def _add_first_facts(self, sequence: Sequence, delta: RequestDelta) -> None:
        delta.num_cached_tokens = sequence.num_cached_tokens
        if sequence.wants_prompt_logprobs:
            delta.prompt_logprobs = [None, *sequence.prompt_logprobs[: sequence.num_prompt_tokens - 1]]

    def _end(self, sequence: Sequence, delta: RequestDelta, reason: FinishReason = FinishReason.LENGTH) -> RequestDelta:
        if not delta.token_ids:
            self._add_first_facts(sequence, delta)
        delta.finish_reason = reason
        self.on_end(sequence.request.request_id, len(sequence.token_ids) - sequence.num_prompt_tokens)
        self._finish(sequence)
        self.num_finished += 1
        return delta


class _Step:
    """The step that is being put together, and what is left of its budget (tokens)."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new: list[NewSequence] = []
        self.rows: list[Row] = []
        self.decode_token_ids: list[int] = []
        self.sequences: list[Sequence] = []
        """Those of the rows, kept until the results arrive."""
        self.num_context_tokens = 0
        """KV-cache tokens that the decodes read."""
        self.num_left_tokens = 0
        """Of sequences that were begun, what this step leaves to be computed."""

    def add(self, row: Row, sequence: Sequence) -> None:
        self.rows.append(row)
        self.sequences.append(sequence)
        self.budget -= row.num_tokens
