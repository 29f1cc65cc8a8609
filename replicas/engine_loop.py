"""The step loop of an engine core's process, between core and channel. Knows no Ray and not how the core works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from manta.cluster.routing.roles import Role
from manta.engine.loop_gc import LoopGc
from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import EngineRequest, Refusal, RefusalReason, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot, StepStats
from manta.engine.step_costs import StepCosts

from .channel import FRAME_INTERVAL_S
from .channel_server import ChannelServer
from .engine_times import EngineWatch
from .protocol import Cancel, Drain, Expect, Release, SetRole, Submit
from .step_histogram import StepHistogram

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def has_work(self) -> bool: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def step_costs(self) -> StepCosts | None: ...
    @property
    def pollables(self) -> Sequence[zmq.Socket[bytes] | int]: ...
    def add(self, request: EngineRequest) -> Refusal | None: ...
    def cancel(self, request_id: str) -> bool: ...
    def expect(self, ticket: str, prompt_token_ids: list[int], cache_salt: str | None) -> None: ...
    def release(self, ticket: str) -> None: ...
    def poll(self) -> None: ...
    def step(self) -> list[RequestDelta]: ...
    def prepare_more(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def watch(
        self,
        *,
        on_step: Callable[[StepStats], None],
        on_start: Callable[[str], None],
        on_end: Callable[[str, int], None],
    ) -> None: ...
    def take_cache_events(self) -> CacheEvents | None: ...
    def all_cache_events(self) -> CacheEvents: ...


class EngineLoop:
    """Poll, add and cancel, step, publish; until `stop`. `run` owns the calling thread, core and channel.

    A replica that is asked for another role takes no new work until all that it has is done or has moved away, KV that
    comes or goes included; then it has the role and works on.

    Pauses are used: for Python's garbage, and, once the first request has been worked on, for what makes later steps
    faster. Both give way to requests.
    """

    def __init__(
        self, core: Core, server: ChannelServer, *, collector: LoopGc | None = None, role: Role = Role.MIXED
    ) -> None:
        self._core = core
        self._server = server
        self._gc = collector or LoopGc()
        self._is_leaving = False
        self._role = role
        self._next_role: Role | None = None
        """Taken when there is no work left."""
        server.set_role(role)
        self._can_prepare = False
        self._step_times = StepHistogram()
        self._watch = watch = EngineWatch()
        core.watch(
            on_step=watch.step_finished,
            on_start=lambda request_id: watch.started(request_id, time.monotonic()),
            on_end=watch.ended,
        )
        self._step_ended_at_s: float | None = None
        """End of the last step, when the next one follows without a pause."""
        self._stop = threading.Event()
        self.last_turn_at_s = time.monotonic()
        """When the loop last began a turn; read by other threads."""

    def stop(self) -> None:
        """End `run` after the current turn, at most a heartbeat later. From any thread."""
        self._stop.set()

    def run(self) -> None:
        """Raises what the core raises."""
        with self._gc:
            while not self._stop.is_set():
                self._turn()

    def _turn(self) -> None:
        core, server = self._core, self._server
        self.last_turn_at_s = time.monotonic()
        is_busy = core.has_work or self._can_prepare
        commands = server.receive(0.0) if is_busy else server.receive(FRAME_INTERVAL_S, wake=core.pollables)
        refusals = []
        for command in commands:
            if isinstance(command, Submit):
                refusal = self._add(command.request)
                if refusal is not None:
                    refusals.append(refusal)
            else:
                self._obey(command)
        if not core.has_work:
            core.poll()  # a step does, too; requests may wait for what other engines send
        deltas = self._step() if core.has_work else []
        # After the last request is gone, and after commands without work, edges learn the load at once.
        to_all = not core.has_work and bool(commands or deltas)
        snapshot = core.snapshot()
        to_all = self._take_role(snapshot) or to_all
        cache_events = core.take_cache_events()
        server.publish(
            deltas,
            refusals,
            snapshot=snapshot,
            step_times=self._step_times,
            times=self._watch.times,
            step_costs=core.step_costs,
            cache_events=cache_events,
            cached=core.all_cache_events() if server.needs_cached else None,
            to_all=to_all,
        )
        if not core.has_work:
            self._pause(is_long=not commands and not deltas)

    def _obey(self, command: Cancel | Drain | Expect | Release | SetRole) -> None:
        if isinstance(command, Cancel):
            self._core.cancel(command.request_id)
            self._watch.cancelled(command.request_id)
        elif isinstance(command, Expect):
            if not self._is_draining:
                self._core.expect(command.ticket, command.prompt_token_ids, command.cache_salt)
        elif isinstance(command, Release):
            self._core.release(command.ticket)
        elif isinstance(command, Drain):
            self._is_leaving = not command.is_over
        else:
            self._next_role = None if command.role is self._role else command.role
        self._server.set_draining(self._is_draining)

    @property
    def _is_draining(self) -> bool:
        return self._is_leaving or self._next_role is not None

    def _take_role(self, snapshot: Snapshot) -> bool:
        """Whether the role that was asked for is taken now."""
        has_requests = snapshot.num_running or snapshot.num_waiting
        if self._next_role is None or self._core.has_work or has_requests or snapshot.num_kv_leases:
            return False
        logger.info("the role is %s now, and was %s", self._next_role, self._role)
        self._role, self._next_role = self._next_role, None
        self._server.set_role(self._role)
        self._server.set_draining(self._is_draining)
        return True

    def _step(self) -> list[RequestDelta]:
        deltas = self._core.step()
        now_s = time.monotonic()
        gap_s = None if self._step_ended_at_s is None else now_s - self._step_ended_at_s
        if gap_s is not None:
            self._step_times.add(gap_s)
        self._watch.stepped(deltas, now_s, gap_s=gap_s, costs=self._core.info.step_costs or self._core.step_costs)
        self._step_ended_at_s, self._can_prepare = now_s, True
        self._gc.step_done()
        return deltas

    def _pause(self, *, is_long: bool) -> None:
        """`is_long`: nothing happened in this turn. Who sends one request after the other meets no collection."""
        self._step_ended_at_s = None
        if self._can_prepare:
            self._can_prepare = self._core.prepare_more()
        elif is_long:
            self._gc.pause()

    def _add(self, request: EngineRequest) -> Refusal | None:
        if self._is_draining:
            message = "This replica is leaving." if self._is_leaving else f"This replica will be {self._next_role}."
            return Refusal(request_id=request.request_id, reason=RefusalReason.DRAINING, message=message)
        refusal = self._core.add(request)
        if refusal is None:
            self._watch.submitted(request, time.monotonic())
        return refusal
