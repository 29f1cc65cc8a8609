"""The two Serve deployments: an engine replica with its shards, and an edge that speaks HTTP. Knows Ray Serve."""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from manta.cluster.discover import what_is_missing
from manta.cluster.spec import GangSpec
from manta.engine.config import EngineConfig, ModelConfig
from manta.engine.model_source import resolve_model
from manta.engine.stats import EngineInfo
from manta.engine.tokenizer import Tokenizer

from .channel import Address, KeyPair
from .channel_client import ChannelClient
from .cluster_status import cluster_status
from .edge.app import create_app
from .edge.client import EdgeContext
from .edge.membership import MEMBERSHIP, ServeDirectory
from .edge.router import ChannelRouter, RouterLimits
from .held_calls import HeldCalls
from .metrics import EdgeMetrics
from .protocol import Frame
from .room_watch import RoomWatch
from .shard_group import ShardGroup

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
INFO_WAIT_S = 5.0


class EngineReplica:
    """One engine: owns its gang of ranks. Serve sees one `hold` call an edge that has streams here; requests and tokens
    travel over the channel."""

    async def __init__(self, config: EngineConfig, keys: KeyPair, spec: GangSpec) -> None:  # type: ignore[misc]
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._held = HeldCalls()
        self._group = ShardGroup(
            replica_id,
            config,
            keys.public,
            spec=spec,
            placement_group=ray.util.get_current_placement_group(),
        )
        try:
            self._address = await self._group.start()
            self._watch = ChannelClient(
                self._address,
                edge_id=f"replica {replica_id}",
                keys=keys,
                is_watcher=True,
                on_frame=self._learn_busy_edges,
            )
            await self._watch.connect(CONNECT_TIMEOUT_S)
        except BaseException:
            self._group.kill()
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._end_all_when_lost())

    async def get_address(self, *, replica_id: str) -> Address:
        """Where the engine listens. `replica_id` is for Serve's router."""
        return self._address

    async def hold(self, edge_id: str, *, replica_id: str) -> None:
        """Open while the edge has streams here. Serve lets it end before it stops this replica, and counts it as one
        ongoing request, however many streams there are. Raises ChannelLost when the engine is gone."""
        if self._watch.lost is not None:
            raise self._watch.lost
        await self._held.wait(edge_id)

    async def check_health(self) -> None:
        """Raises when a rank is dead or hangs. ActorDiedError has this replica replaced at the first failure: also when
        its engine is alive but the channel to it is lost, as edges have lost theirs then."""
        if self._watch.lost is not None:
            raise ActorDiedError from self._watch.lost
        await self._group.check()

    def __del__(self) -> None:
        if hasattr(self, "_group"):
            self._group.kill()

    def _learn_busy_edges(self, frame: Frame) -> None:
        self._held.learn(frame.busy_edges)

    async def _end_all_when_lost(self) -> None:
        await self._watch.wait_lost()
        logger.warning("the engine is lost: %s", self._watch.lost)
        self._held.end_all()


@dataclass(frozen=True)
class EdgeSettings:
    """What an edge process needs to know."""

    model: ModelConfig
    api_keys: tuple[str, ...]
    limits: RouterLimits
    request_timeout_s: float | None
    spec: GangSpec
    """Of every engine replica."""
    num_replicas: int
    """Engine replicas that there should be."""


@serve.ingress()
class Edge:
    """One process that speaks HTTP: the OpenAI API over all engine replicas. Its methods are for `manta serve`."""

    async def __init__(self, settings: EdgeSettings, keys: KeyPair, engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        source = resolve_model(settings.model)
        tokenizer = Tokenizer.load(source, chat_template=settings.model.chat_template)
        edge_id = serve.get_replica_context().replica_id.unique_id
        metrics = EdgeMetrics(edge_id)
        self._router = ChannelRouter(
            ServeDirectory(engines, edge_id=edge_id),
            edge_id=edge_id,
            keys=keys,
            limits=settings.limits,
            metrics=metrics,
        )
        MEMBERSHIP.listen(self._router.set_members)
        self._context = EdgeContext(
            self._router,
            tokenizer,
            settings.model.served_model_name or source.name,
            api_keys=settings.api_keys,
            observer=metrics,
            request_timeout_s=settings.request_timeout_s,
            cluster_status=self._cluster_status,
        )
        self._room = RoomWatch(
            lambda: what_is_missing(settings.spec, engines.app_name, engines.deployment_name),
            is_needed=lambda: len(MEMBERSHIP.ids) < settings.num_replicas,
            tell=self._context.set_missing,
        )
        self._engines = (engines.app_name, engines.deployment_name, settings.spec)
        self._watching = asyncio.get_running_loop().create_task(self._room.run())

    async def _cluster_status(self) -> dict[str, Any]:
        return msgspec.to_builtins(await cluster_status(*self._engines))

    def __serve_build_asgi_app__(self) -> Any:
        app = create_app(self._context)
        gc.collect()
        gc.freeze()  # what start-up made lives on; collections need not look at it again
        return app

    async def engine_info(self) -> EngineInfo | None:
        """Of a ready replica, for which it waits a little; None while all are loading."""
        until_s = asyncio.get_running_loop().time() + INFO_WAIT_S
        while self._router.info is None and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.05)
        return self._router.info

    async def drain(self) -> None:
        """Refuse new work from now on."""
        self._context.drain()

    async def num_open_requests(self) -> int:
        """Requests that are being answered."""
        return self._context.num_open_requests

    async def abort_open_requests(self) -> None:
        """End every open request with an error."""
        self._context.abort_open_requests()
