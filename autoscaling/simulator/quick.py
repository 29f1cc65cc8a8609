"""One engine replica for large fleets: the scheduler's rules in sums instead of single sequences. Knows no router.

What it keeps of the engine: one step is planned while another runs, decodes go first, prompts are chunked and admitted
in order while slots and KV blocks are free, a step with decodes is bounded by the budget, the last that came is
preempted when blocks run out. Blocks are counted on average (half of a sequence's last one is empty). Steps in which
only decodes run and nobody ends are one event. `replica.py` is exact, and what this is checked against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from manta.engine.step_time import StepShape

from .events import AFTERWARDS, STEP_ENDS, EventQueue
from .quick_cache import QuickCache
from .quick_kind import QuickKind, QuickStep, num_steps_in, seconds_of_steps

NEVER = 1 << 62


class Job:
    """A request's stay at one replica. Lengths in tokens."""

    __slots__ = (
        "hashes",
        "is_ready",
        "last_step",
        "left",
        "num_cached",
        "num_known",
        "num_output",
        "num_prompt",
        "order",
        "owner",
        "start_step",
    )

    def __init__(
        self, owner: object, num_prompt: int, num_output: int, *, num_cached: int = 0, hashes: tuple[bytes, ...] = ()
    ) -> None:
        """`num_prompt` includes what was generated elsewhere before; `num_cached` of it came with its KV. At least one
        token is computed and one generated."""
        self.owner = owner
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.num_cached = min(num_cached, num_prompt - 1)
        self.num_known = 0
        """Generated before a preemption: they are computed again."""
        self.hashes = hashes
        self.is_ready = False
        """Its first token is there."""
        self.left = 0
        """Prompt tokens still to be computed."""
        self.order = 0
        self.start_step = self.last_step = 0
        """The step that computed its last prompt token, the one that computes its last token."""


class QuickReplica:
    """Submit jobs; `on_first` and `on_end` are told when a job's first and last token are there."""

    def __init__(
        self,
        kind: QuickKind,
        events: EventQueue,
        *,
        on_first: Callable[[Job], None],
        on_end: Callable[[Job], None],
        cache: QuickCache | None = None,
    ) -> None:
        """Empty, and idle. With a `cache` prompts are computed from where it knows them."""
        self.kind = kind
        self.cache = cache
        self.num_waiting_tokens = 0
        """Prompt tokens that are still to be computed, those of jobs that were begun included."""
        self.num_jobs = 0
        """That run or wait."""
        self.num_preemptions = 0
        self.busy_s = 0.0
        self.prefill_s = 0.0
        """Of that, steps with prompts."""
        self.num_steps = 0
        self.cost_s = 0.0
        """What a router pays for sending a request here: seconds of waiting, and a share of its decoding's."""
        self._events, self._on_first, self._on_end = events, on_first, on_end
        self._size = kind.spec.block_size
        self._half = self._size / 2
        self._costs, self._room, self._pieces = kind.costs, kind.room, kind.decode_times
        self._most_tokens, self._most_seqs = kind.spec.max_num_batched_tokens, kind.spec.max_num_seqs
        self._inbox: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._running: dict[Job, None] = {}
        """Admitted and not ended."""
        self._leaving: dict[int, list[Job]] = {}
        """Jobs by their last step."""
        self._next_leave = NEVER
        self._num_decodes = self._context = 0
        """Of the last step that was planned."""
        self._joining: list[Job] = []
        """They decode from the next step on."""
        self._held = 0
        """KV tokens."""
        self._step = 0
        """Number of the last step that was planned."""
        self._current: QuickStep | None = None
        self._planned: QuickStep | None = None
        self._version = 0
        self._is_waking = False
        self._orders = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self.num_jobs - len(self._running)

    @property
    def num_context_tokens(self) -> int:
        """That its decodes read in a step."""
        return self._context

    @property
    def kv_usage(self) -> float:
        """Share of the room that running jobs hold."""
        return min(1.0, (self._held + len(self._running) * self._half) / self.kind.room)

    @property
    def is_idle(self) -> bool:
        return not self.num_jobs

    def submit(self, job: Job) -> None:
        """The engine looks for it when it is idle, or when the step that runs has ended."""
        self._cut()
        job.order = self._orders = self._orders + 1
        self._inbox.append(job)
        self.num_jobs += 1
        self.num_waiting_tokens += job.num_prompt - job.num_cached
        if self._current is None and not self._is_waking:
            self._is_waking = True
            self._events.at(self._events.now_s, self._begin, order=AFTERWARDS)
        self._set_cost()

    def stop(self) -> list[tuple[Job, int]]:
        """It is gone: its jobs in order of arrival, each with how many of its tokens were generated."""
        self._cut()
        step = self._current
        done = self._step if step is None else step.last - 1
        lost = [(job, job.num_known) for job in (*self._waiting, *self._inbox)]
        for job in self._running:
            generated = job.num_known
            if not job.left and job.start_step <= done:
                generated += max(min(done, job.last_step), job.start_step) - job.start_step + 1
            lost.append((job, min(generated, job.num_output - 1)))
        self._version += 1
        self._current = self._planned = None
        self._inbox, self._prefilling, self._joining = [], [], []
        self._waiting.clear()
        self._running.clear()
        self._leaving.clear()
        self._next_leave = NEVER
        self.num_jobs = self.num_waiting_tokens = self._held = self._num_decodes = self._context = 0
        return sorted(lost, key=lambda pair: pair[0].order)

    def _begin(self) -> None:
        self._is_waking = False
        if self._current is None:
            self._go_on()

    def _expect(self, time_s: float) -> None:
        self._version = version = self._version + 1

        def unless_outdated() -> None:
            if version == self._version:
                self._end_step()

        self._events.at(time_s, unless_outdated, order=STEP_ENDS)

    def _end_step(self) -> None:
        step = self._current
        assert step is not None
        seconds = step.ends_s - step.begins_s
        self.busy_s += seconds
        self.num_steps += step.last - step.first + 1
        if step.prefill:
            self.prefill_s += seconds
        follows, self._planned = self._planned, None
        if follows is None and step.last > step.first:
            follows = self._plan_decodes()  # as was done while the stretch's last step ran
            if follows is None:
                self._step -= 1
        if step.computed is not None:
            for job in step.computed:
                if job in self._running:
                    self._first_token(job)
        if self._next_leave <= step.last:
            self._let_go(step.last)
        self._current = follows
        if follows is not None:
            self._start(follows, step.ends_s)
        self._go_on()

    def _first_token(self, job: Job) -> None:
        if not job.is_ready:
            job.is_ready = True
            self._on_first(job)
        if job.num_output - job.num_known <= 1:
            self._end(job)

    def _let_go(self, last_step: int) -> None:
        """Jobs whose last token is there."""
        for job in self._leaving.pop(last_step, ()):
            if job in self._running and job.last_step == last_step:
                self._end(job)
        self._next_leave = min(self._leaving, default=NEVER)

    def _end(self, job: Job) -> None:
        del self._running[job]
        self._held -= job.num_prompt + job.num_output - 1
        self.num_jobs -= 1
        if self.cache is not None:
            self.cache.ended(job.hashes, job.num_prompt)
        self._on_end(job)

    def _go_on(self) -> None:
        if self._inbox:
            self._waiting.extend(self._inbox)
            self._inbox = []
        if self._current is None:
            self._current = self._plan()
            if self._current is not None:
                self._start(self._current, self._events.now_s)
        if self._current is not None:
            self._planned = self._plan()
            self._stretch()
            self._expect(self._current.ends_s)
        self._set_cost()

    def _start(self, step: QuickStep, now_s: float) -> None:
        step.begins_s = now_s
        step.ends_s = now_s + step.base

    def _plan_decodes(self) -> QuickStep | None:
        """The next step as far as decodes are concerned; those join whose prompts the last one completed."""
        last = self._step
        self._step = number = last + 1
        num, context = self._num_decodes, self._context
        for job in self._leaving.get(last, ()):
            if job in self._running:
                num -= 1
                context -= job.num_prompt + job.num_output - 1
        context += num
        if self._joining:
            for job in self._joining:
                if job not in self._running:
                    continue
                num += 1
                context += job.num_prompt + job.num_known + 1
                job.last_step = end = last + job.num_output - job.num_known - 1
                self._leaving.setdefault(end, []).append(job)
                self._next_leave = min(self._next_leave, end)
            self._joining = []
        self._num_decodes, self._context = num, context
        self._held += num
        if self._held + len(self._running) * self._half > self._room:
            self._make_room()
            num, context = self._num_decodes, self._context
        if not num:
            return None
        step = QuickStep(number, num, context)
        base, step.slope = self._pieces.piece(num, context)
        step.base = base + step.slope * context
        return step

    def _plan(self) -> QuickStep | None:
        """The next step: its decodes, then prompts."""
        step = self._plan_decodes()
        if not self._prefilling and not self._waiting:
            if step is None:
                self._step -= 1
            return step
        num, context = self._num_decodes, self._context
        budget = self._most_tokens - num
        if num and self.kind.budget is not None:
            start = self._prefilling[0].num_prompt - self._prefilling[0].left if self._prefilling else 0
            budget = min(budget, self.kind.budget.prefill_tokens(num, context, prefill_start=start))
        pairs = tokens = 0
        computed: list[Job] = []
        for job in self._prefilling[:] if self._prefilling else ():
            if budget <= 0:
                break
            chunk = min(job.left, budget)
            start = job.num_prompt + job.num_known - job.left
            pairs += chunk * start + chunk * (chunk + 1) // 2
            tokens, budget = tokens + chunk, budget - chunk
            self._computes(job, chunk, computed)
        while self._waiting and budget > 0:
            job = self._waiting[0]
            if not self._admit(job):
                break
            self._waiting.popleft()
            chunk = min(job.left, budget)
            start = job.num_prompt + job.num_known - job.left
            pairs += chunk * start + chunk * (chunk + 1) // 2
            tokens, budget = tokens + chunk, budget - chunk
            self._prefilling.append(job)
            self._computes(job, chunk, computed)
        if not tokens:
            if step is None:
                self._step -= 1
            return step
        self.num_waiting_tokens -= tokens
        if step is None:
            step = QuickStep(self._step, 0, 0)
        step.prefill, step.computed = tokens, computed
        step.base = self.kind.spec.predict(StepShape(tokens, num, context, pairs))
        return step

    def _computes(self, job: Job, chunk: int, computed: list[Job]) -> None:
        job.left -= chunk
        if not job.left:
            self._prefilling.remove(job)
            computed.append(job)
            job.start_step = self._step
            if job.num_output - job.num_known > 1:
                self._joining.append(job)

    def _admit(self, job: Job) -> bool:
        """Give it a slot and blocks; False when there are too few. One spare block for each that runs."""
        running = self._running
        if len(running) >= self._most_seqs:
            return False
        known = job.num_prompt + job.num_known
        if self._held + known + len(running) * (self._half + self._size) + self._half > self._room and running:
            return False
        num_cached = job.num_cached
        if self.cache is not None and job.hashes and not num_cached:
            num_cached = min(self.cache.lookup(job.hashes) * self._size, job.num_prompt - 1)
            self.num_waiting_tokens -= num_cached
            job.num_cached = num_cached
            self.cache.began(job.hashes, self._held + known)
        job.left = known - num_cached
        self._held += known
        running[job] = None
        return True

    def _make_room(self) -> None:
        """Preempt those that came last until the others' next tokens have blocks."""
        while self._held + len(self._running) * self._half > self._room and len(self._running) > 1:
            job = next((job for job in reversed(self._running) if job.left or job.last_step > self._step), None)
            if job is None:
                return
            del self._running[job]
            self._held -= job.num_prompt + job.num_known
            if job.left:
                self._prefilling.remove(job)
                self.num_waiting_tokens -= job.left
            else:
                generated = self._step - job.start_step
                self._num_decodes -= 1
                self._context -= job.num_prompt + job.num_known + generated
                self._held -= generated
                job.num_known += generated + 1
                self._leaving[job.last_step].remove(job)
            job.last_step = job.left = 0
            job.num_cached = 0
            self.num_waiting_tokens += job.num_prompt + job.num_known
            self.num_preemptions += 1
            self._waiting.appendleft(job)

    def _stretch(self) -> None:
        """Let the current step be repeated while nothing is decided: the planned one is like it."""
        current, planned = self._current, self._planned
        assert current is not None
        if planned is None or current.prefill or planned.prefill or self._joining:
            return
        if current.num_seqs != planned.num_seqs or self._next_leave <= planned.last:
            return
        num = current.num_seqs
        room = (self.kind.room - self._held - len(self._running) * self._half) / num
        last = planned.last + min(self._next_leave - planned.last, int(max(room, 0)))
        if last <= planned.last:
            return
        count = last - planned.last
        self._held += count * num
        self._context += count * num
        self._step = current.last = last
        current.ends_s = current.begins_s + seconds_of_steps(current, last - current.first + 1)
        self._planned = None

    def _cut(self) -> None:
        """End a stretch with the step that runs now: the one after it is planned, and no more."""
        step = self._current
        if step is None or step.last == step.first:
            return
        running = step.first + num_steps_in(step, self._events.now_s - step.begins_s)
        if running >= step.last:
            return
        num = step.num_seqs
        planned = running + 1
        count = step.last - planned
        self._held -= count * num
        self._context -= count * num
        self._step = planned
        step.last = running
        step.ends_s = step.begins_s + seconds_of_steps(step, running - step.first + 1)
        self._planned = follower = QuickStep(planned, num, self._context)
        base, follower.slope = self._pieces.piece(num, self._context)
        follower.base = base + follower.slope * self._context
        self._expect(step.ends_s)

    def _set_cost(self) -> None:
        """Seconds until a prompt that comes now is begun, as an edge estimates them, and a tenth of a step a token."""
        num, ahead, costs = self._num_decodes, self.num_waiting_tokens, self._costs
        matrices_s = num * costs.token_s
        if matrices_s < costs.weights_s:
            matrices_s = costs.weights_s
        step_s = costs.overhead_s + matrices_s + self._context * costs.context_token_s
        cost_s = 25.0 * step_s  # a tenth of an answer of 256 tokens
        if ahead:
            queue_s = ahead * costs.token_s
            cost_s += queue_s * (1.0 + 0.005 * num) + (1.5 + ahead / self._most_tokens) * step_s
        elif num:
            cost_s += 1.5 * step_s
        missing = self.num_jobs + 1 - self._most_seqs
        if missing > 0:
            cost_s += missing * step_s
        self.cost_s = cost_s
