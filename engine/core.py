"""The step loop: schedule, launch, collect, update, one step ahead of the device. Knows no model and no transport.

While the device runs step n, the host plans step n + 1; results are looked at one step later. A pipeline of several
devices holds as many steps at once as it has stages. One thread owns a core.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .errors import EngineFailed
from .parallel.vitals import StepClock
from .plan import Runner, StepHandle, StepPlan, StepResult
from .prefix_cache import CacheEvents
from .request import EngineRequest, Refusal, RequestDelta
from .scheduler import Scheduler
from .stats import EngineInfo, Snapshot, StepStats
from .step_costs import ObservedCosts, StepCosts
from .step_time import StepShape

if TYPE_CHECKING:
    import zmq

    from .kv_transfer.handovers import HandOvers

LEARN_INTERVAL = 32
"""Steps after which what they cost is worked out anew, where nobody knew it before."""


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle
    launched_at_s: float
    schedule_s: float
    launch_s: float


class EngineCore:
    """Requests in, deltas out. `on_step`, when set, is told about every finished step."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, info: EngineInfo, handovers: HandOvers | None = None
    ) -> None:
        """`handovers`: where KV comes from other engines or goes to them."""
        self.info = info
        self.scheduler = scheduler
        self.on_step: Callable[[StepStats], None] | None = None
        self.step_clock = StepClock()
        """Which step is waited for, and how long it may take; other threads may ask it."""
        self.step_costs: StepCosts | None = None
        """What steps were found to cost, where `info` does not say it; None until then."""
        self._runner = runner
        self._handovers = handovers
        self._is_blocked = False
        """Whether the last look found nothing to compute, and nothing has changed since."""
        self._in_flight: deque[_InFlight] = deque()
        self._most_in_flight = max(2, scheduler.limits.num_micro_batches)
        self._num_steps = 0
        self._last_step_s = 0.0
        self._observed = ObservedCosts() if info.step_costs is None else None
        self._device_free_at_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now. Requests may wait for KV though it has not: for `poll`, then."""
        return bool(self._in_flight) or (self.scheduler.has_unfinished and not self._is_blocked)

    def watch(
        self,
        *,
        on_step: Callable[[StepStats], None],
        on_start: Callable[[str], None],
        on_end: Callable[[str, int], None],
    ) -> None:
        """Be told of each finished step, of each request that is computed for the first time, and of each that has all
        its output tokens (how many), before its last delta is returned."""
        self.on_step, self.scheduler.on_start, self.scheduler.on_end = on_step, on_start, on_end

    @property
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors that are readable when `poll` has something to bring in."""
        return [] if self._handovers is None else self._handovers.pollables

    def add(self, request: EngineRequest) -> Refusal | None:
        """Queue a request, or say why it is not taken. Without a seed it gets a random one."""
        if request.params.seed is None:
            request.params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
        self._is_blocked = False
        return self.scheduler.add(request) if self._handovers is None else self._handovers.add(request)

    def cancel(self, request_id: str) -> bool:
        """Free all that a request holds at once; no further delta of it will come. False when it is not here."""
        self._is_blocked = False
        return self.scheduler.cancel(request_id)

    def expect(self, ticket: str, prompt_token_ids: list[int], cache_salt: str | None = None) -> None:
        """Another engine will compute these tokens and send their KV, for a request that takes it by this ticket."""
        if self._handovers is not None:
            self._handovers.expect(ticket, prompt_token_ids, cache_salt)

    def release(self, ticket: str) -> None:
        """No request will take it: its blocks are free once nobody writes into them. Unknown tickets are ignored."""
        if self._handovers is not None:
            self._is_blocked = False
            self._handovers.release(ticket)

    def poll(self) -> None:
        """Bring in what other engines and the own ranks say about KV on its way. `step` does, too."""
        if self._handovers is not None and self._handovers.poll():
            self._is_blocked = False

    def step(self) -> list[RequestDelta]:
        """Launch the next step and collect the oldest, unless more may be in flight. Returns the collected step's news,
        possibly none.

        Raises what the runner raises; the core cannot be used after that.
        """
        self.poll()
        launched = self._launch()
        if launched is not None:
            self._in_flight.append(launched)
            if len(self._in_flight) < self._most_in_flight:
                return []
        elif not self._in_flight:
            self._is_blocked = True
            return []
        collected = self._in_flight.popleft()
        before_s = time.monotonic()
        self.step_clock.begin(collected.plan.step_id, collected.plan.num_tokens, before_s)
        result = collected.handle.result()
        after_s = time.monotonic()
        self.step_clock.end(after_s)
        deltas = self.scheduler.update(collected.plan, result)
        self._num_steps += 1
        self._last_step_s = after_s - max(collected.launched_at_s, self._device_free_at_s)
        self._device_free_at_s = after_s
        if self._observed is not None:
            self._observe(self._observed, collected.plan)
        if self.on_step is not None:
            update_s = time.monotonic() - after_s
            self.on_step(self._stats(collected, result, wait_s=after_s - before_s, update_s=update_s))
        return deltas

    def snapshot(self) -> Snapshot:
        """Load and progress now."""
        scheduler, pool = self.scheduler, self.scheduler.cache.pool
        return Snapshot(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_finished=scheduler.num_finished,
            num_cancelled=scheduler.num_cancelled,
            num_refused=scheduler.num_refused,
            last_step_s=self._last_step_s,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_context_tokens=scheduler.num_context_tokens,
            **({} if self._handovers is None else self._handovers.counts()),
        )

    def check(self) -> None:
        """Assert that blocks, slots, queues and leases add up (for tests: after any step)."""
        self.scheduler.check()
        if self._handovers is not None:
            self._handovers.check()
        else:
            assert self.scheduler.set_aside.num_blocks == 0

    def take_cache_events(self) -> CacheEvents | None:
        """Prefix-cache changes since the last call."""
        return self.scheduler.cache.take_events()

    def all_cache_events(self) -> CacheEvents:
        """All that is cached, as of the last `take_cache_events`."""
        return self.scheduler.cache.all_events()

    def prepare_more(self) -> bool:
        """Use a moment without work to make later steps faster. False when nothing is left to prepare."""
        return self._runner.prepare_more()

    def close(self) -> None:
        """Wait for what is in flight and release the device, also that of an engine that failed."""
        while self._in_flight:
            with contextlib.suppress(EngineFailed):  # nobody waits for the result any more
                self._in_flight.popleft().handle.result()
        self._runner.close()
        if self._handovers is not None:
            self._handovers.close()

    def _launch(self) -> _InFlight | None:
        start_s = time.monotonic()
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        if self._handovers is not None:
            self._handovers.planned(plan)
        scheduled_s = time.monotonic()
        handle = self._runner.launch(plan)
        launched_s = time.monotonic()
        return _InFlight(plan, handle, scheduled_s, scheduled_s - start_s, launched_s - scheduled_s)

    def _observe(self, observed: ObservedCosts, plan: StepPlan) -> None:
        observed.observe(StepShape.of(plan), self._last_step_s)
        if self._num_steps % LEARN_INTERVAL == 0:
            self.step_costs = observed.costs()

    def _stats(self, step: _InFlight, result: StepResult, *, wait_s: float, update_s: float) -> StepStats:
        shape = StepShape.of(step.plan)
        return StepStats(
            step_id=step.plan.step_id,
            num_prefill_tokens=shape.num_prefill_tokens,
            num_decode_seqs=shape.num_decode_seqs,
            num_context_tokens=shape.num_decode_context_tokens,
            num_prefill_pairs=shape.num_prefill_pairs,
            schedule_s=step.schedule_s,
            launch_s=step.launch_s,
            wait_s=wait_s,
            update_s=update_s,
            device_s=result.device_s,
            device_idle_s=result.device_idle_s,
        )
