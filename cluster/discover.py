"""What Ray knows of the cluster, as data: its nodes, and the placement groups of a deployment. Knows Ray, no torch.

Calls block for a few milliseconds each (the head answers them); the process must be connected to Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state
from ray.util import placement_group_table

from .hardware import SOCKETS_LABEL, sockets_from_label
from .placement import CannotPlace, place
from .spec import GangSpec, PoolSpec
from .topology import Node, Topology

HEAD_RESOURCE = "node:__internal_head__"


def discover() -> Topology:
    """The nodes that are alive now."""
    free = ray_state.available_resources_per_node()
    return topology_of(ray.nodes(), free)


def topology_of(nodes: list[dict[str, Any]], free: dict[str, dict[str, float]]) -> Topology:
    """From Ray's own tables of nodes and of the free resources of each."""
    return Topology(
        tuple(_node(one, free.get(one["NodeID"], {})) for one in sorted(nodes, key=_name) if one.get("Alive"))
    )


@dataclass(frozen=True)
class GangReservation:
    """The placement group of one replica."""

    replica_id: str
    is_placed: bool
    node_ids: tuple[str, ...]
    """Of each bundle; empty while it is not placed."""


def reservations(app_name: str, deployment: str) -> list[GangReservation]:
    """The placement groups that exist for replicas of a deployment, or wait for room."""
    return reservations_of(placement_group_table(), app_name, deployment)


def reservations_of(table: dict[str, dict[str, Any]], app_name: str, deployment: str) -> list[GangReservation]:
    """From Ray's own table of placement groups; Serve names each as it names its replica's actor."""
    prefix = f"SERVE_REPLICA::{app_name}#{deployment}#"
    found = []
    for group in table.values():
        if not group["name"].startswith(prefix) or group["state"] == "REMOVED":
            continue
        nodes = group.get("bundles_to_node_id", {})
        node_ids = tuple(nodes[index] for index in sorted(nodes) if nodes[index])
        found.append(GangReservation(group["name"].removeprefix(prefix), group["state"] == "CREATED", node_ids))
    return sorted(found, key=lambda one: one.replica_id)


def what_is_missing(spec: GangSpec, app_name: str, deployment: str) -> str | None:
    """Why replicas wait for room, as a sentence without its end; None when none waits, or there is room by now."""
    num_waiting = sum(not one.is_placed for one in reservations(app_name, deployment))
    if not num_waiting:
        return None
    result = place(discover(), spec, num_replicas=num_waiting)
    return result.missing if isinstance(result, CannotPlace) else None


def what_pools_miss(pools: Sequence[PoolSpec], app_name: str) -> str | None:
    """The same of the first pool of which a replica waits; it is named when there are several."""
    for pool in pools:
        missing = what_is_missing(pool.gang, app_name, pool.name)
        if missing is not None:
            return f"{missing} (pool {pool.name})" if len(pools) > 1 else missing
    return None


def _node(table: dict[str, Any], free: dict[str, float]) -> Node:
    total, labels = table.get("Resources", {}), table.get("Labels", {})
    return Node(
        node_id=table["NodeID"],
        address=table["NodeManagerAddress"],
        num_gpus=total.get("GPU", 0.0),
        free_gpus=free.get("GPU", 0.0),
        num_cpus=total.get("CPU", 0.0),
        free_cpus=free.get("CPU", 0.0),
        labels=labels,
        gpu_sockets=sockets_from_label(labels.get(SOCKETS_LABEL, "")),
        is_head=HEAD_RESOURCE in total,
    )


def _name(table: dict[str, Any]) -> tuple[str, str]:
    return table["NodeManagerAddress"], table["NodeID"]
