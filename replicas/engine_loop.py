"""The step loop of an engine core's process, between core and channel. Knows no Ray and not how the core works."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from manta.engine.loop_gc import LoopGc
from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import EngineRequest, Refusal, RefusalReason, RequestDelta
from manta.engine.stats import Snapshot

from .channel import FRAME_INTERVAL_S
from .channel_server import ChannelServer
from .protocol import Cancel, Submit
from .step_histogram import StepHistogram


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: EngineRequest) -> Refusal | None: ...
    def cancel(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestDelta]: ...
    def prepare_more(self) -> bool: ...
    def snapshot(self) -> Snapshot: ...
    def take_cache_events(self) -> CacheEvents | None: ...


class EngineLoop:
    """Poll, add and cancel, step, publish; until `stop`. `run` owns the calling thread, core and channel.

    Pauses are used: for Python's garbage, and, once the first request has been worked on, for what makes later steps
    faster. Both give way to requests.
    """

    def __init__(self, core: Core, server: ChannelServer, *, collector: LoopGc | None = None) -> None:
        self._core = core
        self._server = server
        self._gc = collector or LoopGc()
        self._is_draining = False
        self._can_prepare = False
        self._step_times = StepHistogram()
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
        commands = server.receive(0.0 if core.has_work or self._can_prepare else FRAME_INTERVAL_S)
        refusals = []
        for command in commands:
            if isinstance(command, Submit):
                refusal = self._add(command.request)
                if refusal is not None:
                    refusals.append(refusal)
            elif isinstance(command, Cancel):
                core.cancel(command.request_id)
            else:
                self._is_draining = not command.is_over
                server.set_draining(self._is_draining)
        deltas = self._step() if core.has_work else []
        # After the last request is gone, and after commands without work, edges learn the load at once.
        to_all = not core.has_work and bool(commands or deltas)
        server.publish(
            deltas,
            refusals,
            snapshot=core.snapshot(),
            step_times=self._step_times,
            cache_events=core.take_cache_events(),
            to_all=to_all,
        )
        if not core.has_work:
            self._pause(is_long=not commands and not deltas)

    def _step(self) -> list[RequestDelta]:
        deltas = self._core.step()
        now_s = time.monotonic()
        if self._step_ended_at_s is not None:
            self._step_times.add(now_s - self._step_ended_at_s)
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
            message = "This replica is leaving."
            return Refusal(request_id=request.request_id, reason=RefusalReason.DRAINING, message=message)
        return self._core.add(request)
