"""The Serve application of a deployment: edges in front of engine replicas. Reads no environment and starts nothing.

`build_app` makes it from a configuration; `build` from the arguments of a Serve config file, for `serve deploy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from manta.autoscaling.serve_policy import DEPLOYMENT as AUTOSCALER
from manta.autoscaling.serve_policy import Autoscaler
from manta.autoscaling.steering import PoolLimits, SteeringSettings
from manta.cluster.discover import discover, what_pools_miss
from manta.cluster.placement import CannotPlace, demand, place_pools
from manta.cluster.spec import GangSpec, PoolSpec
from manta.cluster.topology import Topology
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from manta.replicas.channel import KeyPair
from manta.replicas.cluster_keys import cluster_keys
from manta.replicas.deployment import Edge, EdgeSettings, EngineReplica
from manta.replicas.edge.membership import ROUTER_CLASS
from manta.replicas.edge.router import RouterLimits
from manta.replicas.edge.tracing import check_installed as check_traces
from manta.replicas.exposition import Observability

from .checks import locate_all
from .config import DeployConfig, Pool, ServingConfig, load_config, pools_of
from .parallelism import resolve_parallel
from .settings import Settings
from .traffic_config import default_tenant, tenant_keys, tenant_of

logger = logging.getLogger(__name__)

EDGE = "edge"
"""Name of the edges' deployment."""
EDGE_CPUS = 0.2
EDGE_CHECK_S = 3.0
"""An edge that does not say that it lives, three times in a row for so long, is replaced: 9 to 10 s after it froze."""
AUTOSCALER_CPUS = 0.1
REPLICA_CPUS = 0.1
RANK_CPUS = 0.5
"""Shares, not cores: a laptop with two cores must have room for an edge and an engine."""
MAX_ONGOING = 1_000_000
"""Serve's own limit of calls a replica; ours are the edge's queue and the engine's."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application that a Serve config file describes, `import_path: manta.deploy.app:build`.

    `args` are `model` (whatever `manta serve` takes: a name, a path, a YAML file), overrides by dotted or leaf name,
    as in `{model: sim-h200, num_replicas: 2}`, and `api_key_file`, whose lines are the accepted API keys. Paths mean
    the same on every node. Raises ConfigError.
    """
    return build_app(locate_all(config_of(args), Settings.from_environment()))


def config_of(args: Mapping[str, Any]) -> DeployConfig:
    """The deployment that the arguments of a Serve config file describe. Raises ConfigError."""
    overrides = dict(args)
    target, key_file = overrides.pop("model", None), overrides.pop("api_key_file", None)
    if key_file is not None:
        overrides["serving.api_keys"] = _read_keys(Path(key_file))
    return load_config(target, overrides)


def build_app(config: DeployConfig) -> serve.Application:
    """The application to run on the Ray that is connected; its ingress is the edge.

    Nodes may join later: what has no room waits. Raises ConfigError when no split of the model is possible.
    """
    if config.observability.traces_endpoint is not None:
        check_traces()
    keys = cluster_keys()
    planned, serving = plan(config, _topology()), config.serving
    for pool in planned:
        logger.info("%s: %s", pool.spec.name, pool.reason)
    edge: Any = serve.deployment(
        name=EDGE,
        num_replicas=serving.num_edges,
        ray_actor_options={"num_cpus": EDGE_CPUS},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=1.0,
        health_check_timeout_s=EDGE_CHECK_S,
        graceful_shutdown_timeout_s=serving.edge_drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
    )(Edge)
    scaling = config.autoscaling
    settings = EdgeSettings(
        model=config.engine.model,
        api_keys=serving.api_keys,
        limits=RouterLimits(
            max_queued_requests=serving.max_queued_requests,
            max_wait_s=serving.replica_wait_s,
            drain_grace_s=serving.drain_grace_s,
            tenants=tuple(tenant_of(one) for one in serving.tenants),
            num_edges=serving.num_edges,
            routes_by_prefix=serving.routing.prefix,
            max_index_blocks=serving.routing.max_index_blocks,
            detour_from_tokens=serving.routing.detour_from_tokens,
        ),
        request_timeout_s=serving.request_timeout_s,
        tenant_keys=tenant_keys(serving.tenants),
        default_tenant=default_tenant(serving.tenants),
        deadline_s=serving.deadline_s,
        pools=tuple(pool.spec for pool in planned),
        slo=config.slo.slo(),
        observability=Observability(
            aliases=config.observability.metrics_aliases,
            dollars_per_gpu_hour=config.observability.gpu_dollars_per_hour,
            traces_endpoint=config.observability.traces_endpoint,
            traces_share=config.observability.traces_share,
        ),
        holds_at_zero=scaling.enabled and any(pool.min_replicas == 0 for pool in pools_of(config)),
    )
    engines = [_engines(pool, keys, serving) for pool in planned]
    if not scaling.enabled:
        return edge.bind(settings, keys, *engines)
    return edge.bind(settings, keys, *engines, autoscaler=_autoscaler(config, planned))


def _autoscaler(config: DeployConfig, planned: Sequence[PlannedPool]) -> Any:
    """The bound deployment of the one autoscaler."""
    limits = {pool.name: pool for pool in pools_of(config)}
    settings = SteeringSettings(
        model=config.engine.model.served_model_name or config.engine.model.model,
        pools=tuple(
            PoolLimits(
                name=one.spec.name,
                role=one.spec.role,
                min_replicas=limits[one.spec.name].min_replicas,
                max_replicas=limits[one.spec.name].max_replicas,
                gpus_per_replica=_budgeted_gpus(config, one),
            )
            for one in planned
        ),
        policy=config.autoscaling.policy_settings(config.slo.slo()),
        gpu_budget=config.autoscaling.gpu_budget,
        period_s=config.autoscaling.period_s,
    )
    deployment: Any = serve.deployment(
        name=AUTOSCALER,
        num_replicas=1,
        ray_actor_options={"num_cpus": AUTOSCALER_CPUS},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
    )(Autoscaler)
    return deployment.bind(settings, EDGE)


def _budgeted_gpus(config: DeployConfig, pool: PlannedPool) -> float:
    """What a replica counts for: the GPUs it asks for; where it asks for none, one a device of the model's split."""
    if config.autoscaling.gpus_per_replica is not None:
        return config.autoscaling.gpus_per_replica
    gang, parallel = pool.spec.gang, pool.engine.parallel
    return gang.world_size * gang.gpus_per_rank or float(parallel.num_ranks)


def _engines(pool: PlannedPool, keys: KeyPair, serving: ServingConfig) -> Any:
    """The bound deployment of a pool's replicas."""
    spec = pool.spec
    asked = demand(spec.gang)
    labels: dict[str, Any] = {}
    if asked.bundle_labels is not None:
        labels["placement_group_bundle_label_selector"] = list(asked.bundle_labels)
    router_class: Any = ROUTER_CLASS  # Ray declares the field narrower than it is
    engine: Any = serve.deployment(
        name=spec.name,
        num_replicas=spec.num_replicas,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=list(asked.bundles),
        placement_group_strategy=asked.strategy,
        max_ongoing_requests=MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=router_class),
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=serving.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        **labels,
    )(EngineReplica)
    return engine.bind(pool.engine, keys, spec.gang, spec.role)


@dataclass(frozen=True)
class PlannedPool:
    """A pool with its split settled."""

    engine: EngineConfig
    spec: PoolSpec
    reason: str
    """Why the model is split like that, as a sentence without its end."""


def plan(config: DeployConfig, topology: Topology) -> list[PlannedPool]:
    """Settle how the model is split over ranks, in each pool. Raises ConfigError when it cannot be."""
    planned = []
    for pool in pools_of(config):
        uses_gpus = _uses_gpus(pool.engine, topology)
        engine, reason = resolve_parallel(pool.engine, topology, uses_gpus=uses_gpus, labels=pool.node_labels)
        gang = gang_spec(pool, engine, uses_gpus=uses_gpus)
        planned.append(PlannedPool(engine, PoolSpec(pool.name, gang, pool.num_replicas, pool.role), reason))
    return planned


def plan_here(config: DeployConfig) -> list[PlannedPool]:
    """The same on the Ray that is connected."""
    return plan(config, _topology())


def gang_spec(pool: Pool, engine: EngineConfig, *, uses_gpus: bool) -> GangSpec:
    """What each replica of a pool asks of the cluster; `engine` is the pool's with its split settled. A simulated
    device is one process."""
    is_simulated = engine.device.startswith("sim")
    return GangSpec(
        tp_size=1 if is_simulated else int(engine.parallel.tensor_parallel_size),
        pp_size=1 if is_simulated else int(engine.parallel.pipeline_parallel_size),
        gpus_per_rank=pool.gpus_per_rank if uses_gpus else 0.0,
        cpus_per_rank=RANK_CPUS,
        replica_cpus=REPLICA_CPUS,
        labels=pool.node_labels,
    )


def check_room(config: DeployConfig) -> None:
    """Raise ConfigError when the Ray that is connected has no room for all replicas; for one that will not grow."""
    topology = _topology()
    planned = plan(config, topology)
    if any(pool.engine.device == "cuda" for pool in planned) and not any(node.num_gpus for node in topology.nodes):
        raise ConfigError("engine.device = 'cuda': Ray knows no GPU here; use device=cpu", field="engine.device")
    result = place_pools(topology, [pool.spec for pool in planned])
    if isinstance(result, CannotPlace):
        what, field = "this deployment", "serving.num_replicas"
        if result.pool is not None:
            what, field = f"pool {result.pool} beside the others", f"pools.{result.pool}.num_replicas"
        raise ConfigError(f"there is no room for {what}: it {result.missing}", field=field)


def room_question(config: DeployConfig, app_name: str) -> Callable[[], str | None]:
    """What asks the Ray that is connected why engine replicas wait for room; see `what_is_missing`."""
    pools = [pool.spec for pool in plan_here(config)]
    return lambda: what_pools_miss(pools, app_name)


def _read_keys(file: Path) -> list[str]:
    try:
        keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"api_key_file = {str(file)!r}: {error.strerror or error}", field="api_key_file") from None
    if not keys:
        raise ConfigError(f"api_key_file = {str(file)!r} holds no key", field="api_key_file")
    return keys


def _topology() -> Topology:
    return discover() if ray.is_initialized() else Topology(())


def _uses_gpus(engine: EngineConfig, topology: Topology) -> bool:
    """Whether ranks ask Ray for GPUs."""
    if ":" in engine.device and engine.device.startswith("cuda"):
        raise ConfigError(
            f"engine.device = {engine.device!r}: Ray chooses the GPU of a replica; use device=cuda",
            field="engine.device",
        )
    return engine.device == "cuda" or (engine.device == "auto" and any(node.num_gpus for node in topology.nodes))
