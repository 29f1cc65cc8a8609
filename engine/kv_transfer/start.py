"""Puts an engine's part in hand-overs together at start-up: endpoints, then control, leases and sends. Torch-free."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manta.engine.config import EngineConfig
from manta.engine.plan import Runner
from manta.engine.scheduler import Scheduler

from .control import KvControl
from .handovers import HandOvers, HandOverTimes, KvRanks
from .leases import LeaseTimes
from .messages import KvEvent, KvPeer, KvShard
from .sends import SendTimes

if TYPE_CHECKING:
    from manta.engine.runner import ModelRunner


def new_kv_key() -> bytes:
    """The secret of one engine's KV sockets."""
    return secrets.token_bytes(32)


@dataclass(frozen=True)
class StartedKv:
    """The endpoints of all ranks, and what the core needs to take part in transfers."""

    ranks: KvRanks
    key: bytes
    host: str
    rank_urls: list[str]
    shards: list[KvShard]
    times: HandOverTimes = field(default_factory=HandOverTimes)

    def handovers(
        self, scheduler: Scheduler, runner: Runner, *, model: str, head_dim: int, block_size: int, dtype: str
    ) -> HandOvers:
        """The core's part; what it tells others is its `own`."""
        control = KvControl(self.key, host=self.host)
        own = KvPeer(
            control_url=control.url,
            rank_urls=self.rank_urls,
            shards=self.shards,
            model=model,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
            key=self.key,
        )
        return HandOvers(
            scheduler,
            self.ranks,
            control,
            own,
            runner.obey,
            first_generation=secrets.randbits(62),
            times=self.times,
        )


def times_of(config: EngineConfig, *, is_cpu: bool = False) -> HandOverTimes:
    """As the configuration says. On a CPU steps may take seconds, and what waits for their end takes as long."""
    cache = config.cache
    wait_s = cache.kv_wait_s or (30.0 if is_cpu else 5.0)
    lease = LeaseTimes(lease_s=cache.kv_lease_s, wait_s=wait_s)
    return HandOverTimes(lease, SendTimes(answer_s=30.0 if is_cpu else 10.0, send_s=cache.kv_lease_s))


def open_endpoint(
    runner: ModelRunner,
    config: EngineConfig,
    shards: list[KvShard],
    rank: int,
    *,
    key: bytes,
    host: str,
    on_event: Callable[[KvEvent], None],
) -> str:
    """The endpoint of a rank's cache, which its runner owns from now on. Returns where it listens."""
    from .endpoint import KvEndpoint

    endpoint = KvEndpoint(
        runner.caches,
        shards,
        rank,
        block_size=runner.block_size,
        key=key,
        on_event=on_event,
        host=host,
        checksums=config.cache.kv_checksums,
        shares_gpu_memory=config.cache.kv_gpu_sharing,
    )
    runner.attach(endpoint)
    return endpoint.url
