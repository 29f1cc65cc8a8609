"""What the cluster looks like to its operator: nodes, and each replica's ranks with their start-up. Knows Ray, no HTTP.

Any process that is connected to Ray can ask; ranks answer whether or not their replica is ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from manta.cluster.discover import GangReservation, discover, reservations, what_pools_miss
from manta.cluster.spec import PoolSpec
from manta.cluster.topology import Node

from .shard import NAMESPACE, Progress, rank_name

ANSWER_TIMEOUT_S = 2.0


class NodeStatus(msgspec.Struct, kw_only=True):
    """One node and what of it is free."""

    address: str
    node_id: str
    is_head: bool
    num_gpus: float
    free_gpus: float
    num_cpus: float
    free_cpus: float
    labels: dict[str, str]


class RankStatus(msgspec.Struct, kw_only=True):
    """One rank of a gang."""

    rank: int
    state: str
    """`up`, `starting`, `silent` (it does not answer) or `absent` (there is no such process)."""
    address: str | None = None
    pid: int | None = None
    gpu_ids: list[str] = []
    phases_s: dict[str, float] = {}
    """Phases of start-up that are over, seconds."""


class GangStatus(msgspec.Struct, kw_only=True):
    """One replica's gang."""

    replica_id: str
    pool: str
    """Its deployment in Serve."""
    state: str
    """`placed`, or `waiting` for room."""
    nodes: list[str]
    """Address of the node of each stage."""
    ranks: list[RankStatus]


class PoolStatus(msgspec.Struct, kw_only=True):
    """Replicas that are alike."""

    name: str
    role: str
    """That its replicas begin with."""
    num_replicas: int
    """How many there should be."""
    tensor_parallel_size: int
    pipeline_parallel_size: int


class ClusterStatus(msgspec.Struct, kw_only=True):
    """All of it."""

    nodes: list[NodeStatus]
    gangs: list[GangStatus]
    pools: list[PoolStatus]
    missing: str | None
    """What a gang lacks that waits for room."""


async def cluster_status(app_name: str, pools: Sequence[PoolSpec]) -> ClusterStatus:
    """Ask Ray and every rank; takes at most a few seconds however many do not answer."""
    topology, gangs, missing = await asyncio.to_thread(
        lambda: (
            discover(),
            [(pool, gang) for pool in pools for gang in reservations(app_name, pool.name)],
            what_pools_miss(pools, app_name),
        )
    )
    addresses = {node.node_id: node.address for node in topology.nodes}
    return ClusterStatus(
        nodes=[_node_status(node) for node in topology.nodes],
        gangs=list(await asyncio.gather(*(_gang_status(gang, pool, addresses) for pool, gang in gangs))),
        pools=[_pool_status(pool) for pool in pools],
        missing=missing,
    )


async def _gang_status(gang: GangReservation, pool: PoolSpec, addresses: dict[str, str]) -> GangStatus:
    ranks = [await asyncio.to_thread(_actor, gang.replica_id, rank) for rank in range(pool.gang.world_size)]
    return GangStatus(
        replica_id=gang.replica_id,
        pool=pool.name,
        state="placed" if gang.is_placed else "waiting",
        nodes=[addresses.get(node_id, node_id) for node_id in gang.node_ids],
        ranks=list(await asyncio.gather(*(_rank_status(rank, actor) for rank, actor in enumerate(ranks)))),
    )


async def _rank_status(rank: int, actor: Any | None) -> RankStatus:
    if actor is None:
        return RankStatus(rank=rank, state="absent")
    try:
        progress: Progress = await asyncio.wait_for(_resolve(actor.progress.remote()), ANSWER_TIMEOUT_S)
    except TimeoutError:
        return RankStatus(rank=rank, state="silent")
    except RayError:
        return RankStatus(rank=rank, state="absent")
    return RankStatus(
        rank=rank,
        state="up" if progress.is_up else "starting",
        address=progress.where.host,
        pid=progress.where.pid,
        gpu_ids=progress.where.gpu_ids,
        phases_s=progress.phases_s,
    )


def _actor(replica_id: str, rank: int) -> Any | None:
    try:
        return ray.get_actor(rank_name(replica_id, rank), namespace=NAMESPACE)
    except ValueError:  # Ray's word for: there is none of that name
        return None


def _pool_status(pool: PoolSpec) -> PoolStatus:
    return PoolStatus(
        name=pool.name,
        role=pool.role,
        num_replicas=pool.num_replicas,
        tensor_parallel_size=pool.gang.tp_size,
        pipeline_parallel_size=pool.gang.pp_size,
    )


def _node_status(node: Node) -> NodeStatus:
    return NodeStatus(
        address=node.address,
        node_id=node.node_id,
        is_head=node.is_head,
        num_gpus=node.num_gpus,
        free_gpus=node.free_gpus,
        num_cpus=node.num_cpus,
        free_cpus=node.free_cpus,
        labels=dict(node.labels),
    )


async def _resolve(ref: Any) -> Any:
    return await ref
