"""The Ray actor around an engine core's step loop: start-up, control calls and the end of the process."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import msgspec
import ray

from manta.engine.config import EngineConfig
from manta.engine.startup import start_engine
from manta.engine.stats import EngineInfo

from .channel import Address
from .channel_server import ChannelServer
from .engine_loop import Core as Core
from .engine_loop import EngineLoop as EngineLoop

logger = logging.getLogger(__name__)


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
