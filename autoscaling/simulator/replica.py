"""One engine replica on the virtual clock: the real scheduler, steps that take the predicted time. Knows no router.

As in the engine, the next step is planned while one runs: a request that comes now is in the step after the next.
Stretches of steps in which nothing is decided (every running sequence gets one token more) are one event; whoever
disturbs one finds the scheduler as it would be, had each step been taken by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manta.engine.plan import StepPlan, StepResult
from manta.engine.prefix_cache import CacheEvents, PrefixCache
from manta.engine.request import EngineRequest, Refusal, RequestDelta
from manta.engine.scheduler import Scheduler, SchedulerLimits
from manta.engine.set_aside import Reserved
from manta.engine.stats import Snapshot
from manta.engine.step_budget import StepBudget
from manta.engine.step_time import StepShape

from .events import AFTERWARDS, STEP_ENDS, EventQueue
from .workload import KnownHashes, SimRequest, Zeros

LONGEST_STRETCH = 64
"""Steps of a stretch at most: what is computed in advance and thrown away when somebody disturbs it stays little."""
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """What a replica tells the edges after a step that decided or brought something."""

    replica_id: str
    deltas: list[RequestDelta]
    """Of first and last tokens; those between are left out."""
    refusals: Sequence[Refusal]
    snapshot: Snapshot
    cache_events: CacheEvents | None


@dataclass(slots=True)
class StepLog:
    """Where a replica's time went. Seconds."""

    busy_s: float = 0.0
    num_steps: int = 0
    num_events: int = 0
    last_step_s: float = 0.0
    longest_gap_s: float = 0.0
    """Of steps with decodes: how long a stream waited at most."""
    gaps: Counter[int] = field(default_factory=Counter)
    """Waits for the next token, by tenths of a millisecond: a step's time, once for each stream that waited for it."""


@dataclass(frozen=True)
class ReplicaSpec:
    """What one replica is. Sizes in tokens unless named otherwise."""

    predict: Callable[[StepShape], float]
    """A step's seconds."""
    num_blocks: int
    block_size: int = 512
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_waiting: int = 4096
    """Requests."""
    max_model_len: int | None = None
    """None: what its blocks hold."""
    tpot_target_s: float | None = None
    """Bounds the prompt tokens of a step that also decodes; None: whatever the step has room for."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request it can take."""
        room = self.num_blocks * self.block_size
        return room if self.max_model_len is None else min(room, self.max_model_len)

    def scheduler(self, hasher: KnownHashes) -> Scheduler:
        """A new one with an empty cache."""
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            max_model_len=self.longest,
            vocab_size=None,
        )
        budget = None
        if self.tpot_target_s is not None:
            budget = StepBudget(self.predict, target_s=self.tpot_target_s, max_tokens=self.max_num_batched_tokens)
        return Scheduler(limits, PrefixCache(self.num_blocks), hasher, budget)


class Replica:
    """Submit requests; `on_frame` is told what comes of them."""

    def __init__(
        self,
        replica_id: str,
        spec: ReplicaSpec,
        events: EventQueue,
        on_frame: Callable[[Frame], None],
        *,
        takes_stretches: bool = True,
    ) -> None:
        """Empty, and idle. Without `takes_stretches` every step is an event of its own."""
        self.replica_id = replica_id
        self.spec = spec
        self._hasher = KnownHashes(spec.block_size)
        self.scheduler = spec.scheduler(self._hasher)
        self.log = StepLog()
        self.on_begin: Callable[[str], None] | None = None
        """Told the id of each request whose first tokens are planned."""
        self._predict = spec.predict
        self._events = events
        self._on_frame = on_frame
        self._takes_stretches = takes_stretches
        self._inbox: list[EngineRequest] = []
        self._in_flight: deque[_Step] = deque()
        self._stretch: _Stretch | None = None
        self._version = 0
        """Of what is planned: events of an older one mean nothing any more."""
        self._is_waking = False

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self._inbox and not self.scheduler.has_unfinished

    @property
    def num_unread(self) -> int:
        """Requests that came since the engine last looked."""
        return len(self._inbox)

    def submit(self, request: EngineRequest) -> None:
        """Send a request: the engine looks for it when it is idle, or when the step that runs has ended. A frame says
        whether it is not taken."""
        self.disturb()
        self._inbox.append(request)
        self._wake()

    def expect(self, request: EngineRequest) -> Refusal | None:
        """Queue a request whose KV is on its way: it waits for `start`."""
        self.disturb()
        return self.scheduler.add(request, is_ready=False)

    def reserve(self, request: SimRequest) -> Reserved | None:
        """Blocks for a prompt that is computed elsewhere; None when there is no room."""
        self.disturb()
        self._hasher.known[request.request_id] = request.block_hashes
        reserved = self.scheduler.reserve(Zeros(request.num_prompt_tokens), salt=request.request_id)
        del self._hasher.known[request.request_id]
        return reserved

    def start(self, request_id: str, reserved: Reserved | None) -> bool:
        """The KV of an expected request is there, or (None) will not come. Whether it is used."""
        self.disturb()
        is_used = self.scheduler.make_ready(request_id, reserved)
        self._wake()
        return is_used

    def give_back(self, reserved: Reserved) -> None:
        """Nobody needs the reserved blocks."""
        self.disturb()
        self.scheduler.set_aside.give_back(reserved)
        self._wake()

    def cancel(self, request_id: str) -> bool:
        """Forget a request at once. False when it is not here."""
        self.disturb()
        unread = [request for request in self._inbox if request.request_id != request_id]
        was_unread = len(unread) < len(self._inbox)
        self._inbox = unread
        return was_unread or self.scheduler.cancel(request_id)

    def disturb(self) -> None:
        """Bring the scheduler up to now, before somebody looks at it or changes it."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return
        num_steps = bisect_right(stretch.ends_s, self._events.now_s)
        self._repeat(stretch, num_steps)
        self._launch()  # as the engine did when the last of these steps ended
        self._await_step()

    def snapshot(self) -> Snapshot:
        """Load and progress as of the last step that decided something."""
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        return Snapshot(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_steps=self.log.num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_finished=scheduler.num_finished,
            num_cancelled=scheduler.num_cancelled,
            num_refused=scheduler.num_refused,
            last_step_s=self.log.last_step_s,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_context_tokens=scheduler.num_context_tokens,
        )

    def _wake(self) -> None:
        """An idle engine begins a step, once everything that came at this moment is there."""
        if not self._in_flight and not self._is_waking:
            self._is_waking = True
            self._events.at(self._events.now_s, self._begin, order=AFTERWARDS)

    def _begin(self) -> None:
        self._is_waking = False
        if not self._in_flight:
            self._go_on()

    def _go_on(self) -> None:
        """Read what came, plan as many steps as may be in flight, and wait for the first."""
        inbox, self._inbox = self._inbox, []
        refusals = [refusal for refusal in map(self.scheduler.add, inbox) if refusal is not None]
        if refusals:
            self._send_frame([], refusals)
        self._launch()
        self._launch()
        self._await_step()

    def _launch(self) -> None:
        """Plan a step, unless enough are in flight or there is nothing to compute now."""
        if len(self._in_flight) == STEPS_IN_FLIGHT:
            return
        plan = self.scheduler.schedule()
        if plan is None:
            return
        if plan.new and self.on_begin is not None:
            for sequence in self.scheduler.sequences_of(plan)[-len(plan.new) :]:
                self.on_begin(sequence.request.request_id)
        shape = StepShape.of(plan)
        begins_s = self._in_flight[-1].ends_s if self._in_flight else self._events.now_s
        step_s = self._predict(shape)
        self._in_flight.append(_Step(plan, begins_s + step_s, step_s, shape))

    def _await_step(self) -> None:
        if self._in_flight:
            self._expect(self._in_flight[0].ends_s, self._end_step)

    def _expect(self, time_s: float, action: Callable[[], None]) -> None:
        self._version += 1
        version = self._version

        def unless_outdated() -> None:
            if version == self._version:
                action()

        self._events.at(time_s, unless_outdated, order=STEP_ENDS)

    def _end_step(self) -> None:
        step = self._in_flight.popleft()
        self._account(step.step_s, step.shape.num_decode_seqs)
        num_tokens = sum(row.samples for row in step.plan.rows)
        deltas = self.scheduler.update(step.plan, StepResult([0] * num_tokens))
        news = [d for d in deltas if d.finish_reason is not None or d.num_cached_tokens is not None]
        num_quiet = self.scheduler.num_quiet_steps() if len(self._in_flight) == 1 else 0
        self.log.num_events += 1
        if news or self._inbox or not num_quiet:
            self._send_frame(news)
        if num_quiet and self._takes_stretches and not self._inbox:
            self._begin_stretch(num_quiet)
        else:
            self._go_on()

    def _begin_stretch(self, num_quiet: int) -> None:
        """The step in flight is repeated; the stretch is over when the last repetition has been planned."""
        last = self._in_flight[0]
        num_seqs, context = last.shape.num_decode_seqs, last.shape.num_decode_context_tokens
        ends_s, steps_s = [last.ends_s], [last.step_s]
        for _ in range(min(num_quiet, LONGEST_STRETCH)):
            context += num_seqs
            step_s = self._predict(StepShape(0, num_seqs, context, 0))
            steps_s.append(step_s)
            ends_s.append(ends_s[-1] + step_s)
        self._stretch = _Stretch(ends_s, steps_s)
        self._expect(ends_s[-2], self._end_stretch)

    def _end_stretch(self) -> None:
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        self._repeat(stretch, len(stretch.ends_s) - 1)
        self.log.num_events += 1
        num_quiet = self.scheduler.num_quiet_steps()
        if num_quiet:
            self._begin_stretch(num_quiet)
            return
        self._send_frame([])
        self._go_on()

    def _repeat(self, stretch: _Stretch, num_steps: int) -> None:
        """`num_steps` steps of the stretch have ended, and as many were planned."""
        if not num_steps:
            return
        [step] = self._in_flight
        num_seqs = step.shape.num_decode_seqs
        self.scheduler.repeat(num_steps, token_id=0)
        for step_s in stretch.steps_s[:num_steps]:
            self._account(step_s, num_seqs)
        context = step.shape.num_decode_context_tokens + num_steps * num_seqs
        shape = StepShape(0, num_seqs, context, 0)
        self._in_flight[0] = _Step(step.plan, stretch.ends_s[num_steps], stretch.steps_s[num_steps], shape)

    def _send_frame(self, news: list[RequestDelta], refusals: Sequence[Refusal] = ()) -> None:
        """As the engine does: after a step's results, before it looks for requests and plans the next step."""
        events = self.scheduler.cache.take_events()
        self._on_frame(Frame(self.replica_id, news, refusals, self.snapshot(), events))

    def _account(self, step_s: float, num_decode_seqs: int) -> None:
        self.log.busy_s += step_s
        self.log.num_steps += 1
        self.log.last_step_s = step_s
        if num_decode_seqs:
            self.log.gaps[round(step_s * 1e4)] += num_decode_seqs
            self.log.longest_gap_s = max(self.log.longest_gap_s, step_s)


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    ends_s: float
    step_s: float
    shape: StepShape


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps that follow one another, the one in flight at its beginning first."""

    ends_s: list[float]
    steps_s: list[float]
