"""The process of an engine core: its step loop between core and channel, and the Ray actor around it.

`EngineLoop` knows core and channel but no Ray. `EngineShard` adds start-up, control calls and the end of the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Protocol

import msgspec
import ray

from manta.engine.config import EngineConfig
from manta.engine.loop_gc import LoopGc
from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import EngineRequest, Refusal, RefusalReason, RequestDelta
from manta.engine.startup import start_engine
from manta.engine.stats import EngineInfo, Snapshot

from .channel import FRAME_INTERVAL_S, Address
from .channel_server import ChannelServer
from .protocol import Cancel, Submit
from .step_histogram import StepHistogram

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0


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
                self._is_draining = True
                server.start_draining()
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


class Progress(msgspec.Struct, kw_only=True):
    """What a shard can say about itself at any time."""

    phases_s: dict[str, float]
    """Phases of start-up that are over, seconds."""
    info: EngineInfo | None
    """Once the engine runs."""
    address: Address | None
    turn_age_s: float
    """Since the loop's last turn began; 0 before it runs."""


class EngineShard:
    """A Ray actor. `run` starts the engine and ends when it is stopped; the other methods answer meanwhile."""

    def __init__(self, replica_id: str, config: EngineConfig, client_key: bytes) -> None:
        self._replica_id = replica_id
        self._config = config
        self._client_key = client_key
        self._phases_s: dict[str, float] = {}
        self._info: EngineInfo | None = None
        self._address: Address | None = None
        self._loop: EngineLoop | None = None
        self._is_up = threading.Event()

    def run(self) -> None:
        """Raises ConfigError or CheckpointError when the engine cannot start. A failure later ends the process."""
        core = start_engine(self._config, self._report)
        host = ray.util.get_node_ip_address()
        server = ChannelServer(self._replica_id, core.info, client_key=self._client_key, host=host)
        self._loop = EngineLoop(core, server)
        self._info, self._address = core.info, server.address
        self._is_up.set()
        try:
            self._loop.run()
        except Exception:
            logger.exception("the engine of replica %s failed", self._replica_id)
            logging.shutdown()
            os._exit(1)
        server.close()
        core.close()

    @ray.method(concurrency_group="control")
    def wait_address(self, timeout_s: float) -> Address | None:
        """Where the engine listens, as soon as it does; None when the time is over before."""
        self._is_up.wait(timeout_s)
        return self._address

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Start-up and the loop's last turn."""
        age_s = 0.0 if self._loop is None else time.monotonic() - self._loop.last_turn_at_s
        return Progress(phases_s=dict(self._phases_s), info=self._info, address=self._address, turn_age_s=age_s)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the loop, and `run` with it."""
        if self._loop is not None:
            self._loop.stop()

    def _report(self, phase: str, seconds: float) -> None:
        self._phases_s[phase] = self._phases_s.get(phase, 0.0) + seconds


def shard_actor_class() -> Any:
    """EngineShard as a Ray actor class. With a second concurrency group Ray calls are answered while `run` runs."""
    remote: Any = ray.remote
    return remote(concurrency_groups={"control": 2})(EngineShard)
