"""The gang of shard actors behind one replica (one shard today): starts, watches and ends it. Knows Ray, not Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from manta.engine.config import EngineConfig
from manta.engine.errors import EngineFailed

from .channel import Address
from .shard import Progress, shard_actor_class

logger = logging.getLogger(__name__)

POLL_S = 1.0
PING_TIMEOUT_S = 5.0
HANG_S = 30.0
"""A loop without a new turn for so long hangs."""
CPU_HANG_S = 120.0
"""The same on a CPU, where one step may take many seconds."""
STOP_TIMEOUT_S = 2.0


class ShardGroup:
    """One engine's shards. `start`, then `check` again and again; `kill` at the end, whatever happened."""

    def __init__(
        self,
        replica_id: str,
        config: EngineConfig,
        client_key: bytes,
        *,
        resources: Mapping[str, float],
        placement_group: PlacementGroup | None = None,
        bundle_index: int = 1,
    ) -> None:
        """`resources`: num_cpus and num_gpus of the shard, which goes into that bundle of the placement group."""
        options: dict[str, Any] = {**resources, "max_restarts": 0}
        if placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=bundle_index
            )
        self._shard = shard_actor_class().options(**options).remote(replica_id, config, client_key)
        self._run: asyncio.Future[None] | None = None
        self._device = config.device

    async def start(self) -> Address:
        """Until the engine listens. Raises what its start raised."""
        self._run = asyncio.ensure_future(_resolve(self._shard.run.remote()))
        while True:
            asked = asyncio.ensure_future(_resolve(self._shard.wait_address.remote(POLL_S)))
            await asyncio.wait((asked, self._run), return_when=asyncio.FIRST_COMPLETED)
            if self._run.done():
                asked.cancel()
                self._raise_ended()
            address = asked.result()
            if address is not None:
                return address

    async def progress(self) -> Progress:
        """What the shard says. Raises TimeoutError or RayActorError."""
        return await asyncio.wait_for(_resolve(self._shard.progress.remote()), PING_TIMEOUT_S)

    async def check(self) -> None:
        """Raise ActorDiedError when a shard is dead (also when its engine failed), EngineFailed when it hangs."""
        if self._run is not None and self._run.done():
            self._raise_ended()
        try:
            progress = await self.progress()
        except TimeoutError:
            raise EngineFailed(f"the engine's process did not answer within {PING_TIMEOUT_S:g} s") from None
        hang_s = CPU_HANG_S if progress.info is not None and progress.info.device == "cpu" else HANG_S
        if progress.turn_age_s > hang_s:
            raise EngineFailed(f"the engine hangs: no step for {progress.turn_age_s:.0f} s")

    def kill(self) -> None:
        """End all shards: the loop is asked to end, and the process killed. Blocks for at most STOP_TIMEOUT_S."""
        try:
            ray.get(self._shard.stop.remote(), timeout=STOP_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            logger.info("a shard did not stop by itself: %s", type(error).__name__)
        ray.kill(self._shard)

    def _raise_ended(self) -> None:
        assert self._run is not None
        error = self._run.exception()
        if error is None:
            raise ActorDiedError
        if isinstance(error, RayActorError):
            raise ActorDiedError from error
        raise error


async def _resolve(ref: Any) -> Any:
    return await ref
