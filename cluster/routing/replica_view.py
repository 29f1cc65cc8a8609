"""What one router believes about one replica: its load by its last snapshot, and what was sent since. Pure bookkeeping.

Knows tokens, blocks and seconds; no prompts, no hashes and no other replica. The clock is an argument.
"""

from __future__ import annotations

import hashlib
import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from manta.engine.stats import EngineInfo, Snapshot
from manta.engine.step_budget import MIN_PREFILL_TOKENS
from manta.engine.step_costs import StepCosts

from .pace import Pace, pack_columns
from .roles import Role
from .sent import Sent, SentRequests
from .slot_times import EndRate, SlotTimes

LEAST_RATIO, MOST_RATIO = 0.25, 4.0
"""Bounds of what observation corrects estimates by."""
RATIO_WEIGHT = 0.1
"""Of each new observation."""
RATIO_FLOOR_S = 0.01
"""Added to both sides of a ratio: what is shorter says nothing about the replica's speed."""
TRANSFER_WEIGHT, SHARE_WEIGHT = 0.3, 0.1
"""Of each new observation: of the bytes of KV a second, of the share of prompt tokens that were cached."""
USUAL_OUTPUT_TOKENS = 256
"""Tokens of an answer, while nothing is known of how fast a replica ends requests."""
STEPS_TO_BEGIN = 1.5
"""A request comes in the middle of a step, on average, when the next one is planned already."""
PHASE_STEPS = 1.0 / math.sqrt(12.0)
"""Standard deviation of that: any part of the step may be over, each as likely."""
LEAST_STEP_S = 1e-6
"""Of a device whose costs say that a step takes nothing."""
SNAPSHOTS_UNTIL_COUNTED = 2
"""The first snapshot after a request was sent may have been on its way; the second counts it."""


class ReplicaView:
    """Belongs to one thread. Fed with snapshots and with the life of each request that this router sends there."""

    def __init__(
        self,
        replica_id: str,
        *,
        role: Role = Role.MIXED,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        tokens_a_step: int,
        max_requests: int | None = None,
        costs: StepCosts | None = None,
        max_mixed_prefill_tokens: int | None = None,
        tpot_target_s: float | None = None,
        kv_bytes_per_token: float = 0.0,
        model_name: str = "",
        ready_at_s: float = -math.inf,
    ) -> None:
        """`max_requests` may run and wait there (default: `max_num_seqs`). A step with decodes takes at most
        `max_mixed_prefill_tokens` prompt tokens and no longer than `tpot_target_s`, if they are given.
        `ready_at_s` is when it could take its first request; long ago unless given."""
        self.replica_id = replica_id
        self._role = role
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self._max_requests = max_num_seqs if max_requests is None else max_requests
        self.tokens_a_step = tokens_a_step
        self.max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self.tpot_target_s = tpot_target_s
        self.kv_bytes_per_token = kv_bytes_per_token
        self.model_name = model_name
        self.ready_at_s = ready_at_s
        self.number = int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=8).digest(), "little")
        """Follows from the id, the same for every router."""
        self.snapshot = Snapshot(num_blocks=num_blocks)
        self.learned_at_s: float | None = None
        """When the last snapshot came; None before the first."""
        self.num_begun = 0
        """Requests of this router that began there."""
        self.late_s = 0.0
        """How much later than estimated first tokens came, smoothed."""
        self.correction = 1.0
        """Observed seconds to the first token over estimated ones, smoothed and bounded."""
        self.transfer_bytes_s: float | None = None
        """Bytes of KV a second that arrive there, smoothed; None before any did."""
        self._costs = costs
        self._unseen, self._seen = SentRequests(), SentRequests()
        self._begun: set[str] = set()
        self._num_snapshots = 0
        self._cached_share = 0.0
        self._end_rate, self._slot_times = EndRate(), SlotTimes()
        self.num_routers, self.turn = 1, 0
        """Routers that send requests there, and how many of them come before this one when slots become free."""
        self.packed: bytes | None = None
        """Load and more in numbers, for load_table.py; None: to be packed anew."""
        self._place: NDArray[np.float64] | None = None
        self._stale: set[ReplicaView] = set()

    @classmethod
    def of(
        cls,
        replica_id: str,
        info: EngineInfo,
        *,
        role: Role = Role.MIXED,
        max_waiting: int | None = None,
        ready_at_s: float = -math.inf,
    ) -> Self:
        """From what the engine says of itself. At most `max_waiting` requests wait there, if that is less than it
        takes."""
        waiting = info.max_num_waiting if max_waiting is None else min(max_waiting, info.max_num_waiting)
        kv_bytes = info.memory_ledger_bytes.get("kv_cache", 0)
        return cls(
            replica_id,
            role=role,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            tokens_a_step=info.max_num_batched_tokens,
            max_requests=info.max_num_seqs + waiting,
            costs=info.step_costs,
            max_mixed_prefill_tokens=info.max_mixed_prefill_tokens,
            tpot_target_s=info.tpot_target_s,
            kv_bytes_per_token=kv_bytes / (info.num_blocks * info.block_size),
            model_name=info.model_name,
            ready_at_s=ready_at_s,
        )

    @property
    def costs(self) -> StepCosts | None:
        """None while nobody knows how long its steps take."""
        return self._costs

    @costs.setter
    def costs(self, costs: StepCosts | None) -> None:
        self._costs = costs
        self._changed()

    @property
    def role(self) -> Role:
        return self._role

    @role.setter
    def role(self, role: Role) -> None:
        if role is not self._role:
            self._role = role
            self._changed()

    @property
    def max_requests(self) -> int:
        """How many requests may run and wait there."""
        return self._max_requests

    @max_requests.setter
    def max_requests(self, max_requests: int) -> None:
        if max_requests != self._max_requests:
            self._max_requests = max_requests
            self._changed()

    @property
    def num_requests(self) -> int:
        """Requests that run or wait there, those included that no snapshot counts yet."""
        snapshot = self.snapshot
        reported = snapshot.num_running + snapshot.num_waiting + len(self._unseen.requests)
        return max(reported, self.num_own)

    @property
    def num_own(self) -> int:
        """Requests of this router that were sent there and have not ended."""
        return len(self._unseen.requests) + len(self._seen.requests) + len(self._begun)

    def learn(self, snapshot: Snapshot, now_s: float) -> None:
        """The newest snapshot, which came at `now_s`."""
        before = self.snapshot
        self.snapshot, self.learned_at_s = snapshot, now_s
        self._changed()
        self._num_snapshots += 1
        unseen = self._unseen.requests
        while unseen:
            request_id, sent = next(iter(unseen.items()))
            if self._num_snapshots - sent.at_snapshot < SNAPSHOTS_UNTIL_COUNTED:
                break
            self._unseen.pop(request_id)
            self._seen.add(request_id, sent)
        num_prompt_tokens = snapshot.num_prompt_tokens - before.num_prompt_tokens
        if num_prompt_tokens > 0:
            share = (snapshot.num_cached_tokens - before.num_cached_tokens) / num_prompt_tokens
            self._cached_share += SHARE_WEIGHT * (min(max(share, 0.0), 1.0) - self._cached_share)
        num_ended = snapshot.num_finished + snapshot.num_cancelled
        self._end_rate.learn(snapshot.num_waiting, num_ended, now_s)
        self._slot_times.learn(snapshot.num_running, num_ended, now_s)
        if self._costs is not None:
            self.pack(self._costs)  # now, when nobody waits for a decision

    def sent(
        self,
        request_id: str,
        num_new_tokens: int,
        num_context_tokens: int,
        now_s: float,
        *,
        estimate_s: float = 0.0,
    ) -> None:
        """A request was sent there: tokens it must compute, all tokens it begins with, and the estimated seconds to its
        first token (0: nothing is to be learned from it)."""
        start = num_context_tokens - num_new_tokens
        num_pairs = num_new_tokens * start + num_new_tokens * (num_new_tokens + 1) // 2
        self._unseen.add(
            request_id,
            Sent(
                *(num_new_tokens, num_context_tokens, num_pairs, now_s, estimate_s / self.correction, estimate_s),
                at_snapshot=self._num_snapshots,
            ),
        )
        self._changed()

    def began(self, request_id: str, now_s: float | None = None) -> None:
        """Its first token came. With the time, estimates are corrected by how long that took. Unknown ids are
        ignored, and so is a second call."""
        sent = self._unseen.pop(request_id) or self._seen.pop(request_id)
        if sent is None:
            return
        self._begun.add(request_id)
        self.num_begun += 1
        self._changed()
        if now_s is not None and sent.estimate_s > 0:
            late_s = now_s - sent.sent_at_s - sent.expected_s
            self.late_s += RATIO_WEIGHT * (late_s - self.late_s)
            ratio = (now_s - sent.sent_at_s + RATIO_FLOOR_S) / (sent.estimate_s + RATIO_FLOOR_S)
            ratio = min(max(ratio, LEAST_RATIO), MOST_RATIO)
            self.correction *= (ratio / self.correction) ** RATIO_WEIGHT

    def ended(self, request_id: str) -> None:
        """It ended there, or was refused, cancelled or lost. Unknown ids are ignored."""
        if self._unseen.pop(request_id) is None and self._seen.pop(request_id) is None:
            self._begun.discard(request_id)
        self._changed()

    def learn_transfer(self, num_bytes: float, seconds: float) -> None:
        """So many bytes of KV arrived there in so long."""
        if num_bytes > 0 and seconds > 0:
            rate = num_bytes / seconds
            before = self.transfer_bytes_s
            self.transfer_bytes_s = rate if before is None else before + TRANSFER_WEIGHT * (rate - before)
            self._changed()

    def pace(self, stand_in: StepCosts | None) -> Pace | None:
        """The load in seconds, by its own costs or for want of them by others; None without either."""
        costs = self._costs or stand_in
        return None if costs is None else self._derive(costs)

    def pack(self, stand_in: StepCosts) -> bytes:
        """`COLUMNS` as float64; kept as `packed` unless the costs are not its own."""
        costs = self._costs
        pace = self._derive(costs or stand_in)
        block_size, fixed_s, num_decodes, token_s = self.block_size, pace.fixed_s, pace.num_decodes, pace.token_s
        num_requests = self.num_requests
        packed = pack_columns(
            self._role is Role.PREFILL,
            pace.has_prompts_waiting,
            num_requests + 1 - self._max_requests,
            self.ready_at_s,
            -math.inf if self.learned_at_s is None else -self.learned_at_s,
            -pace.chunk,
            pace.slot_s,
            pace.doubt_s,
            pace.chunk,
            pace.chunk_s,
            pace.step_s,
            token_s,
            max(pace.queue_s, pace.slot_s),
            (pace.free_blocks - 1) * block_size,
            pace.block_s / block_size,
            fixed_s + pace.weights_s,
            fixed_s + num_decodes * token_s,
            0.5 * pace.pair_s,
            self.kv_bytes_per_token,
            self.transfer_bytes_s or 0.0,
            pace.decode_step_s,
            pace.context_token_s,
            num_decodes * pace.context_token_s,
            num_decodes * pace.step_s,
            num_decodes,
            num_requests,
            pace.noise_s,
        )
        if costs is not None:
            self.packed = packed
            if self._place is not None:
                self._place[:] = np.frombuffer(packed)
                self._stale.discard(self)
        return packed

    def move_to(self, place: NDArray[np.float64], stale: set[ReplicaView]) -> None:
        """From now on what is packed is written to `place`, [columns], too; until then the view is in `stale`."""
        self._place, self._stale = place, stale
        self._changed()

    def leave(self) -> None:
        """Undo `move_to`."""
        self._stale.discard(self)
        self._place, self._stale = None, set()

    def _changed(self) -> None:
        self.packed = None
        if self._place is not None:
            self._stale.add(self)

    def _derive(self, costs: StepCosts) -> Pace:
        snapshot, unseen, seen = self.snapshot, self._unseen, self._seen
        num_context, num_running = snapshot.num_context_tokens, snapshot.num_running
        num_waiting, reported = snapshot.num_waiting, snapshot.num_prefill_tokens
        token_s, weights_s = costs.token_s, costs.weights_s
        num_requests = self.num_requests
        decodes = num_running if num_context else 0
        fixed_s = costs.overhead_s + num_context * costs.context_token_s
        step_s = max(fixed_s + max(weights_s, (decodes or 1) * token_s), LEAST_STEP_S)
        chunk = max(self.tokens_a_step - decodes, 1)
        if decodes:
            chunk = min(chunk, self._mixed_chunk(decodes, fixed_s, token_s))
        chunk_s = fixed_s + max(weights_s, (chunk + decodes) * token_s)
        # Waiting requests are reported with all their tokens. What is cached of this router's own is known, of those of
        # others only on average.
        ahead = unseen.num_new_tokens + min(reported, seen.num_new_tokens)
        ahead += max(0, reported - seen.num_context_tokens) * (1.0 - self._cached_share)
        queue_s = ahead / chunk * chunk_s
        num_new = unseen.num_new_tokens + seen.num_new_tokens
        if num_new:
            queue_s += ahead * (unseen.num_pairs + seen.num_pairs) / num_new * costs.pair_s
        noise_s = 0.0
        if num_running or num_waiting:
            noise_s = PHASE_STEPS * step_s
            # The steps that are planned already take the decodes, and prompts that were sent and are in no queue.
            queue_s += STEPS_TO_BEGIN * step_s + max(0, seen.num_new_tokens - reported) * token_s
        # A request decodes beside those that run and those that wait before it.
        waiting_tokens = (reported if num_waiting else 0) + unseen.num_context_tokens
        beside = min(num_requests, self.max_num_seqs - 1)
        decode_step_s = costs.overhead_s + max(weights_s, (beside + 1) * token_s)
        decode_step_s += (num_context + waiting_tokens) * costs.context_token_s
        ends_per_s = self._end_rate.per_s or (num_running or 1) / (USUAL_OUTPUT_TOKENS * step_s)
        # Others have sent as much as this router that no snapshot counts; slots are taken in turn.
        num_missing = num_requests + 1 - self.max_num_seqs
        num_missing += (self.num_routers - 1) * len(unseen.requests) + self.turn
        slot_s = doubt_s = 0.0
        if num_missing > 0:
            slot_s = num_missing / ends_per_s
            heard_s, has_others = self.learned_at_s or 0.0, self.num_routers > 1  # who may have sent one more
            wait = self._slot_times.wait(num_missing - 1, heard_s, num_unsure=int(has_others))
            if wait is not None:  # when a slot is free, the next step is planned already
                slot_s = wait.usual_s + step_s
                doubt_s = max(min(wait.sure_s - wait.usual_s, wait.sure_s + step_s - queue_s), 0.0)
        num_blocks = snapshot.num_used_blocks + int(ahead) // self.block_size
        blocks_a_request = max(num_blocks / (num_requests or 1), 1.0)
        correction = self.correction
        return Pace(  # in the order of its fields: this runs for each snapshot
            queue_s * correction,
            noise_s * correction,
            slot_s,
            doubt_s + max(self.late_s, 0.0),
            ahead > chunk,
            chunk,
            chunk_s * correction,
            step_s * correction,
            fixed_s * correction,
            decode_step_s,
            decodes,
            self.num_blocks - num_blocks,
            1.0 / (ends_per_s * blocks_a_request),
            weights_s * correction,
            token_s * correction,
            costs.pair_s * correction,
            costs.context_token_s,
        )

    def _mixed_chunk(self, num_decodes: int, fixed_s: float, token_s: float) -> int:
        """Prompt tokens that a step takes beside decodes, but for the budget of all steps."""
        chunk = self.tokens_a_step if self.max_mixed_prefill_tokens is None else self.max_mixed_prefill_tokens
        if self.tpot_target_s is None or token_s <= 0.0:
            return chunk
        return min(chunk, max(int((self.tpot_target_s - fixed_s) / token_s) - num_decodes, MIN_PREFILL_TOKENS))
