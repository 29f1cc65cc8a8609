"""What Serve deploys: an engine replica with its shards, and an edge that speaks HTTP. Knows Ray Serve."""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from prometheus_client.core import Metric
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from manta.cluster.discover import what_pools_miss
from manta.cluster.routing.admission import Tenant
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import EdgeSignals, PoolSignals, ScalingStatus
from manta.cluster.slo import Slo
from manta.cluster.spec import GangSpec, PoolSpec
from manta.engine.config import EngineConfig, ModelConfig
from manta.engine.errors import InvalidRequest
from manta.engine.model_source import resolve_model
from manta.engine.stats import EngineInfo
from manta.engine.tokenizer import Tokenizer

from .channel import Address, KeyPair
from .channel_client import ChannelClient
from .cluster_status import GangStatus, cluster_status
from .edge.app import create_app
from .edge.client import EdgeContext, Observers, RequestObserver, TenantKey
from .edge.holding import Holding
from .edge.membership import MEMBERSHIP, ServeDirectory
from .edge.peers import Peers
from .edge.roles import check_role_change
from .edge.router import ChannelRouter, RouterLimits
from .edge.scaling_report import ScalingReporter, pool_signals
from .edge.tracing import TraceObserver
from .exposition import Exposition, Observability
from .held_calls import HeldCalls
from .metrics import EdgeMetrics
from .protocol import Frame
from .room_watch import RoomWatch
from .shard_group import ShardGroup
from .start_watch import StartWatch

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
    """Engine replicas that there should be; with an autoscaler, at the beginning."""
    slo: Slo = field(default_factory=Slo)
    observability: Observability = field(default_factory=Observability)
    holds_at_zero: bool = False
    """Whether a pool may have no replica until a request comes."""


@serve.ingress()
class Edge:
    """One process that speaks HTTP: the OpenAI API over all engine replicas. Its methods are for `manta serve`."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: EdgeSettings,
        keys: KeyPair,
        *engines: DeploymentHandle[Any],
        autoscaler: DeploymentHandle[Any] | None = None,
    ) -> None:
        """One handle a pool."""
        source = resolve_model(settings.model)
        tokenizer = Tokenizer.load(source, chat_template=settings.model.chat_template)
        replica = serve.get_replica_context()
        edge_id, app_name = replica.replica_id.unique_id, replica.app_name
        self._edge_id = edge_id
        shown, model_name = settings.observability, settings.model.served_model_name or source.name
        metrics = EdgeMetrics(
            edge_id,
            slo=settings.slo,
            pools=settings.pools,
            pool_of=MEMBERSHIP.deployment_of,
            dollars_per_gpu_hour=shown.dollars_per_gpu_hour,
        )
        ledger = metrics.ledger
        observers: list[RequestObserver] = [metrics]
        if shown.traces_endpoint is not None:
            traces = TraceObserver(
                shown.traces_endpoint, model_name=model_name, edge_id=edge_id, share=shown.traces_share
            )
            observers.append(traces)
        self._holding = Holding(
            max_held=settings.limits.max_queued_requests,
            max_wait_s=settings.limits.max_wait_s,
            is_open=lambda: self._router.info is not None,
        )
        self._router = ChannelRouter(
            ServeDirectory(engines, edge_id=edge_id),
            edge_id=edge_id,
            keys=keys,
            limits=settings.limits,
            metrics=metrics,
            ledger=ledger,
            on_joined=self._joined,
        )
        self._autoscaler = autoscaler
        self._reporter = ScalingReporter(
            edge_id,
            counters=ledger.counters,
            num_held=lambda: self._router.num_held + self._holding.num_held,
            pools=self._pool_signals,
            send=self._send_report,
            learned=metrics.scaling_learned,
        )
        MEMBERSHIP.listen(self._router.set_members)
        self._context = EdgeContext(
            self._router,
            tokenizer,
            model_name,
            api_keys=settings.api_keys,
            observer=Observers(tuple(observers)),
            request_timeout_s=settings.request_timeout_s,
            hash_key=keys.for_engines.block_hashes,
            tenant_keys=settings.tenant_keys,
            default_tenant=settings.default_tenant,
            deadline_s=settings.deadline_s,
            explain=self._explain,
            cluster_status=self._cluster_status,
            roles=tuple(pool.role for pool in settings.pools),
            set_role=self._set_role,
            hold=self._holding.wait if settings.holds_at_zero else None,
            metrics=lambda: self._exposition.page(),
            metrics_targets=lambda: self._exposition.targets(),
            scaling=None if autoscaler is None else lambda: self._reporter.status,
            starting=lambda: self._starts.starting(),
        )
        self._peers = Peers(app_name, replica.deployment)
        self._exposition = Exposition(
            self._router.metric_families,
            model_name=model_name,
            ask_all=self._peers.ask if settings.limits.num_edges > 1 else None,
            host=ray.util.get_node_ip_address(),
            aliases=shown.aliases,
        )
        self._room = RoomWatch(
            lambda: what_pools_miss(settings.pools, app_name),
            is_needed=self._waits_for_replicas,
            tell=self._context.set_missing,
        )
        self._pools = (app_name, settings.pools)
        self._starts = StartWatch(self._gangs, is_needed=self._waits_for_replicas)
        runs = [self._room.run(), self._starts.run(), *([] if autoscaler is None else [self._reporter.run()])]
        self._watching = [asyncio.get_running_loop().create_task(run) for run in runs]

    def _waits_for_replicas(self) -> bool:
        status = self._reporter.status
        wanted = {one.name: one.num_replicas for one in self._pools[1]}
        if status is not None:
            wanted |= {pool.name: pool.desired for pool in status.pools}
        return any(len(MEMBERSHIP.ids_of(name)) < num for name, num in wanted.items())

    async def _gangs(self) -> list[GangStatus]:
        return (await cluster_status(*self._pools)).gangs

    def _joined(self, replica_id: str, info: EngineInfo) -> None:
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in info.startup_s.items())
        logger.warning("replica %s is ready: %s", replica_id, phases or "it does not say how it started")
        self._holding.open()

    def _pool_signals(self) -> tuple[PoolSignals, ...]:
        pools = [(pool.name, pool.role) for pool in self._pools[1]]
        return pool_signals(pools, self._router.loads(), MEMBERSHIP.deployment_of)

    async def _send_report(self, signals: EdgeSignals) -> ScalingStatus | None:
        assert self._autoscaler is not None
        return await self._autoscaler.report.remote(signals)

    async def change_roles(self, pool: str, role: Role, num_replicas: int) -> None:
        """Have so many replicas of a pool take a role, those with the least to do; fewer where none can be spared."""
        loads = [load for load in self._router.loads() if MEMBERSHIP.deployment_of(load.replica_id) == pool]
        loads = [load for load in loads if load.role is not role and not load.is_draining]
        loads.sort(key=lambda load: (load.snapshot.num_running + load.snapshot.num_waiting, load.replica_id))
        for load in loads[:num_replicas]:
            try:
                self._set_role(load.replica_id, role)
            except InvalidRequest as error:
                logger.warning("replica %s keeps its role: %s", load.replica_id, error)

    async def metric_families(self) -> list[Metric]:
        """This edge's metrics, for the one that answers for all."""
        return self._router.metric_families()

    async def metrics_target(self) -> str:
        """Host and port of this edge's own page of metrics."""
        return self._exposition.target

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
