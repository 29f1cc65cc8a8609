"""The Serve application of a deployment: edges in front of engine replicas. Reads no environment and starts nothing."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from manta.replicas.channel import KeyPair
from manta.replicas.deployment import Edge, EdgeSettings, EngineReplica
from manta.replicas.edge.membership import ROUTER_CLASS
from manta.replicas.edge.router import RouterLimits

from .config import DeployConfig

EDGE_CPUS = 0.2
REPLICA_CPUS = 0.1
SHARD_CPUS = 0.5
"""Shares, not cores: a laptop with two cores must have room for an edge and an engine."""
MAX_ONGOING = 1_000_000
"""Serve's own limit of calls a replica; ours are the edge's queue and the engine's."""


def build_app(config: DeployConfig) -> serve.Application:
    """The application to run; its ingress is the edge. Makes the cluster's client keys.

    Raises ConfigError when the engine wants a GPU and the Ray that is connected has none.
    """
    keys = KeyPair.new()
    num_gpus = _num_gpus(config.engine)
    shard = {"num_cpus": SHARD_CPUS, "num_gpus": num_gpus}
    bundles: list[dict[str, float]] = [{"CPU": REPLICA_CPUS}, {"CPU": SHARD_CPUS, **({"GPU": 1} if num_gpus else {})}]
    router_class: Any = ROUTER_CLASS  # Ray declares the field narrower than it is
    serving = config.serving
    engine: Any = serve.deployment(
        name="engine",
        num_replicas=serving.num_replicas,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=router_class),
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=serving.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
    )(EngineReplica)
    edge: Any = serve.deployment(
        name="edge",
        num_replicas=serving.num_edges,
        ray_actor_options={"num_cpus": EDGE_CPUS},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=serving.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
    )(Edge)
    settings = EdgeSettings(
        model=config.engine.model,
        api_keys=serving.api_keys,
        limits=RouterLimits(max_queued_requests=serving.max_queued_requests),
        request_timeout_s=serving.request_timeout_s,
    )
    return edge.bind(settings, keys, engine.bind(config.engine, keys, shard))


def _num_gpus(engine: EngineConfig) -> int:
    """GPUs that one engine asks Ray for."""
    if ":" in engine.device and engine.device.startswith("cuda"):
        raise ConfigError(
            f"engine.device = {engine.device!r}: Ray chooses the GPU of a replica; use device=cuda",
            field="engine.device",
        )
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1
    if engine.device == "cuda" and ray.is_initialized() and not has_gpus:
        raise ConfigError("engine.device = 'cuda': Ray knows no GPU here; use device=cpu", field="engine.device")
    return int(engine.device == "cuda" or (engine.device == "auto" and has_gpus))
