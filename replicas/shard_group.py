"""The gang of ranks behind one replica: starts, watches and ends them as one. Knows Ray, not Serve.

A gang is whole or gone: when one rank ends, all do, and Serve starts the replica anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from manta.cluster.routing.roles import Role
from manta.cluster.spec import GangSpec
from manta.engine.config import EngineConfig
from manta.engine.errors import EngineFailed
from manta.engine.parallel.member import GangMember, new_gang_id
from manta.engine.parallel.place import RankPlace

from .channel import Address, EngineKeys
from .shard import NAMESPACE, Progress, RankHost, rank_name, shard_actor_class

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0
PING_TIMEOUT_S = 5.0
HANG_S = 30.0
"""A loop without a new turn for so long hangs."""
CPU_HANG_S = 120.0
"""The same on a CPU, where one step may take many seconds."""
STOP_TIMEOUT_S = 2.0
REASON_WAIT_S = 1.0
"""When a rank ends, others may still say why; after so long all are killed."""


class ShardGroup:
    """One engine's ranks. `start`, then `check` again and again; `kill` at the end, whatever happened."""

    def __init__(
        self,
        replica_id: str,
        config: EngineConfig,
        keys: EngineKeys,
        *,
        spec: GangSpec,
        placement_group: PlacementGroup | None = None,
        role: Role = Role.MIXED,
    ) -> None:
        """Ranks go into the bundles of the placement group that `spec` gives them. `role`: the engine's at first."""
        self._spec = spec
        actor_class = shard_actor_class()
        self._shards = []
        for rank in range(spec.world_size):
            options: dict[str, Any] = {**spec.rank_resources(), "max_restarts": 0}
            options |= {"name": rank_name(replica_id, rank), "namespace": NAMESPACE}
            if placement_group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    placement_group=placement_group, placement_group_bundle_index=spec.bundle_of(rank)
                )
            self._shards.append(actor_class.options(**options).remote(replica_id, rank, config, keys, role))
        self._runs: list[asyncio.Future[None]] = []
        self._collapse: asyncio.Task[None] | None = None

    async def start(self) -> Address:
        """Until the engine listens. Raises what the start of a rank raised."""
        located = [shard.locate.remote(rank == 0) for rank, shard in enumerate(self._shards)]
        hosts: list[RankHost] = await asyncio.gather(*(_resolve(ref) for ref in located))
        members = gang_members(self._spec, hosts)
        self._runs = [
            asyncio.ensure_future(_resolve(shard.run.remote(member)))
            for shard, member in zip(self._shards, members, strict=True)
        ]
        self._collapse = asyncio.get_running_loop().create_task(self._end_together())
        while True:
            asked = asyncio.ensure_future(_resolve(self._shards[0].wait_address.remote(POLL_S)))
            await asyncio.wait((asked, *self._runs), return_when=asyncio.FIRST_COMPLETED)
            if self._has_ended:
                asked.cancel()
                await asyncio.wait(self._runs, timeout=REASON_WAIT_S)
                raise self._reason()
            address = asked.result()
            if address is not None:
                return address

    async def progress(self) -> list[Progress | None]:
        """What each rank says; None for one that does not answer in time. Raises RayActorError for a dead one."""
        return list(await asyncio.gather(*(_in_time(_resolve(shard.progress.remote())) for shard in self._shards)))

    async def check(self) -> None:
        """Raise ActorDiedError when a rank is dead (also when its engine failed), EngineFailed when one hangs."""
        if self._has_ended:
            raise self._reason()
        ranks = await self.progress()
        silent = [rank for rank, progress in enumerate(ranks) if progress is None]
        if silent:
            raise EngineFailed(f"{_ranks(silent)} did not answer within {PING_TIMEOUT_S:g} s")
        driver = ranks[0]
        assert driver is not None
        hang_s = CPU_HANG_S if driver.info is not None and driver.info.device == "cpu" else HANG_S
        if driver.turn_age_s > hang_s:
            raise EngineFailed(f"the engine hangs: no step for {driver.turn_age_s:.0f} s")

    def kill(self) -> None:
        """End all ranks: they are asked to stop, and the processes killed. Blocks for at most STOP_TIMEOUT_S."""
        if self._collapse is not None:
            self._collapse.cancel()
        asked = [shard.stop.remote() for shard in self._shards]
        try:
            ray.wait(asked, num_returns=len(asked), timeout=STOP_TIMEOUT_S)
        except RayError as error:
            logger.info("not every rank stopped by itself: %s", type(error).__name__)
        self._kill_now()

    @property
    def _has_ended(self) -> bool:
        return any(run.done() for run in self._runs)

    async def _end_together(self) -> None:
        await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        ended = [rank for rank, run in enumerate(self._runs) if run.done()]
        logger.error("%s of %d ended; the whole gang does", _ranks(ended), len(self._runs))
        await asyncio.wait(self._runs, timeout=REASON_WAIT_S)
        self._kill_now()

    def _kill_now(self) -> None:
        for shard in self._shards:
            ray.kill(shard)

    def _reason(self) -> BaseException:
        return telling_error([run.exception() for run in self._runs if run.done() and not run.cancelled()])


def gang_members(spec: GangSpec, hosts: Sequence[RankHost]) -> list[GangMember | None]:
    """What each rank must know of its gang; a gang of one needs to know nothing."""
    if spec.world_size == 1:
        return [None]
    store_port = hosts[0].store_port
    assert store_port is not None
    gang_id = new_gang_id()
    return [
        GangMember(
            place=RankPlace(rank, spec.tp_size, spec.pp_size),
            store_host=hosts[0].host,
            store_port=store_port,
            hosts=tuple(host.host for host in hosts),
            gang_id=gang_id,
            backend="gloo" if 0 < spec.gpus_per_rank < 1 else None,
        )
        for rank in range(spec.world_size)
    ]


def telling_error(errors: Sequence[BaseException | None]) -> BaseException:
    """Of all ranks that ended, the error that says why: what one raised rather than that others died of it."""
    for error in errors:
        if error is not None and not isinstance(error, RayActorError):
            return error
    died = ActorDiedError()
    died.__cause__ = next((error for error in errors if error is not None), None)
    return died


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


async def _resolve(ref: Any) -> Any:
    return await ref


async def _in_time(call: Coroutine[Any, Any, T]) -> T | None:
    try:
        return await asyncio.wait_for(call, PING_TIMEOUT_S)
    except TimeoutError:
        return None
