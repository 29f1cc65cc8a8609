"""What Serve deploys: an engine replica with its shards, and an edge that speaks HTTP. Knows Ray Serve."""

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

from manta.cluster.discover import what_pools_miss
from manta.cluster.routing.admission import Tenant
from manta.cluster.routing.roles import Role
from manta.cluster.spec import GangSpec, PoolSpec
from manta.engine.config import EngineConfig, ModelConfig
from manta.engine.model_source import resolve_model
from manta.engine.stats import EngineInfo
from manta.engine.tokenizer import Tokenizer

from .channel import Address, KeyPair
from .channel_client import ChannelClient
from .cluster_status import cluster_status
from .edge.app import create_app
from .edge.client import EdgeContext, TenantKey
from .edge.membership import MEMBERSHIP, ServeDirectory
from .edge.peers import Peers
from .edge.roles import check_role_change
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

    async def __init__(self, config: EngineConfig, keys: KeyPair, spec: GangSpec, role: Role = Role.MIXED) -> None:  # type: ignore[misc]
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._held = HeldCalls()
        self._group = ShardGroup(
            replica_id,
            config,
            keys.for_engines,
            spec=spec,
            placement_group=ray.util.get_current_placement_group(),
            role=role,
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
    tenant_keys: tuple[TenantKey, ...]
    default_tenant: Tenant
    deadline_s: float | None
    pools: tuple[PoolSpec, ...]
    """Engine replicas that there should be."""


@serve.ingress()
class Edge:
    """One process that speaks HTTP: the OpenAI API over all engine replicas. Its methods are for `manta serve`."""

    async def __init__(self, settings: EdgeSettings, keys: KeyPair, *engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        """One handle a pool."""
        source = resolve_model(settings.model)
        tokenizer = Tokenizer.load(source, chat_template=settings.model.chat_template)
        replica = serve.get_replica_context()
        edge_id, app_name = replica.replica_id.unique_id, replica.app_name
        self._edge_id = edge_id
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
            hash_key=keys.for_engines.block_hashes,
            tenant_keys=settings.tenant_keys,
            default_tenant=settings.default_tenant,
            deadline_s=settings.deadline_s,
            explain=self._explain,
            cluster_status=self._cluster_status,
            roles=tuple(pool.role for pool in settings.pools),
            set_role=self._set_role,
        )
        self._peers = Peers(app_name, replica.deployment)
        self._room = RoomWatch(
            lambda: what_pools_miss(settings.pools, app_name),
            is_needed=lambda: any(len(MEMBERSHIP.ids_of(one.name)) < one.num_replicas for one in settings.pools),
            tell=self._context.set_missing,
        )
        self._pools = (app_name, settings.pools)
        self._watching = asyncio.get_running_loop().create_task(self._room.run())

    async def _cluster_status(self) -> dict[str, Any]:
        return msgspec.to_builtins(await cluster_status(*self._pools))

    def __serve_build_asgi_app__(self) -> Any:
        app = create_app(self._context)
        gc.collect()
        gc.freeze()  # what start-up made lives on; collections need not look at it again
        return app

    async def set_role(self, replica_id: str, role: Role) -> None:
        """Have a replica drain and take another role, without loading anything anew; its frames, and so `replicas` of
        every edge, say when it has it. Raises InvalidRequest for one that is not there or cannot be spared."""
        self._set_role(replica_id, role)

    def _set_role(self, replica_id: str, role: Role) -> None:
        check_role_change(self._router.replicas(), replica_id, role, wanted=self._context.roles)
        self._router.set_role(replica_id, role)

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """How this edge routed a request; None when it does not know it."""
        found = self._router.explain(request_id)
        return None if found is None else {**found, "edge_id": self._edge_id}

    async def _explain(self, request_id: str) -> dict[str, Any] | None:
        own = await self.explain(request_id)
        if own is not None:
            return own
        return next((answer for answer in await self._peers.ask("explain", request_id) if answer is not None), None)

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
