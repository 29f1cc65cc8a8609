"""Where the replicas' gangs go: tensor-parallel ranks inside a node, stages across nodes where one is too small. Pure.

Ray does the placing; what it is asked for follows from the spec alone (a bundle for each stage, so that a stage cannot
be torn apart). `place` foresees whether that can work on a topology and on which nodes, or says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .spec import GangSpec, PoolSpec, matches
from .topology import Node, Topology

Strategy = Literal["STRICT_PACK", "PACK"]


@dataclass(frozen=True)
class Demand:
    """What Ray is asked to reserve for one replica."""

    bundles: tuple[dict[str, float], ...]
    strategy: Strategy
    bundle_labels: tuple[dict[str, str], ...] | None
    """For each bundle, what its node's labels must be."""


@dataclass(frozen=True)
class Placement:
    """There is room for every replica."""

    nodes: tuple[tuple[str, ...], ...]
    """For each replica the node of each stage, by node id."""


@dataclass(frozen=True)
class CannotPlace:
    """There is no room for all replicas."""

    num_placed: int
    """Replicas that find room."""
    missing: str
    """What the next one lacks, as a sentence without its end."""
    pool: str | None = None
    """Whose replica it is, where there are several pools."""


def demand(spec: GangSpec) -> Demand:
    """Several stages are packed, not strictly: a gang that lost its node may come back across two."""
    bundles = tuple(spec.bundles())
    labels = tuple(dict(spec.labels) for _ in bundles) if spec.labels else None
    return Demand(bundles, "STRICT_PACK" if len(bundles) == 1 else "PACK", labels)


def place(topology: Topology, spec: GangSpec, *, num_replicas: int) -> Placement | CannotPlace:
    """Nodes for that many replicas out of what is free: each in as few nodes as possible, replicas apart."""
    nodes = {node.node_id: node for node in topology.nodes if matches(spec.labels, node.labels)}
    num_gangs = dict.fromkeys(nodes, 0)
    placed: list[tuple[str, ...]] = []
    for _ in range(num_replicas):
        chosen = _place_one(nodes, spec.bundles(), num_gangs)
        if chosen is None:
            missing = _what_is_missing(topology, list(nodes.values()), spec)
            if num_replicas > 1:
                missing = f"{len(placed)} of {num_replicas} replicas find room; the next one {missing}"
            return CannotPlace(len(placed), missing)
        for node_id, bundle in zip(chosen, spec.bundles(), strict=True):
            nodes[node_id] = nodes[node_id].without(bundle)
        for node_id in set(chosen):
            num_gangs[node_id] += 1
        placed.append(chosen)
    return Placement(tuple(placed))


def place_pools(topology: Topology, pools: Sequence[PoolSpec]) -> Mapping[str, Placement] | CannotPlace:
    """Nodes for all pools together, by name: those that need the largest blocks first, each of what the others left."""
    placed: dict[str, Placement] = {}
    for pool in sorted(pools, key=lambda one: (-one.gang.stage_gpus, -one.gang.bundles()[0]["CPU"])):
        result = place(topology, pool.gang, num_replicas=pool.num_replicas)
        if isinstance(result, CannotPlace):
            return replace(result, pool=pool.name) if len(pools) > 1 else result
        placed[pool.name] = result
        topology = _without(topology, pool.gang, result)
    return placed


def _without(topology: Topology, spec: GangSpec, placement: Placement) -> Topology:
    """What is left when the replicas are where they were placed."""
    nodes = {node.node_id: node for node in topology.nodes}
    for node_ids in placement.nodes:
        for node_id, bundle in zip(node_ids, spec.bundles(), strict=True):
            nodes[node_id] = nodes[node_id].without(bundle)
    return Topology(tuple(nodes.values()))


def _place_one(
    nodes: Mapping[str, Node], bundles: list[dict[str, float]], num_gangs: Mapping[str, int]
) -> tuple[str, ...] | None:
    whole = [node for node in nodes.values() if _num_held(node, bundles) == len(bundles)]
    if whole:  # apart from other replicas first, then where the least is left over
        best = min(whole, key=lambda node: (num_gangs[node.node_id], node.free_gpus, node.free_cpus, node.node_id))
        return (best.node_id,) * len(bundles)
    chosen: list[str] = []
    left = dict(nodes)
    while len(chosen) < len(bundles):
        rest = bundles[len(chosen) :]
        held = {node_id: _num_held(node, rest) for node_id, node in left.items()}
        if not any(held.values()):
            return None
        node_id = min(held, key=lambda one: (-held[one], num_gangs[one], one))
        chosen += [node_id] * held[node_id]
        del left[node_id]
    return tuple(chosen)


def _num_held(node: Node, bundles: list[dict[str, float]]) -> int:
    """How many of the bundles, from the first on, the node can hold together."""
    for count, bundle in enumerate(bundles):
        if not node.can_hold(bundle):
            return count
        node = node.without(bundle)
    return len(bundles)


def _what_is_missing(topology: Topology, nodes: list[Node], spec: GangSpec) -> str:
    """`nodes`: those with the right labels, as they are when all earlier replicas are placed."""
    if not topology.nodes:
        return "needs a node, and the cluster has none"
    if not nodes:
        wanted = ", ".join(f"{name}={value}" for name, value in spec.labels.items())
        return f"needs nodes with the labels {wanted}, and none of {_count(len(topology.nodes), 'node')} has them"
    labelled = " with these labels" if spec.labels else ""
    gpus, bundle = spec.stage_gpus, spec.bundles()[0]
    if gpus and not any(node.num_gpus for node in nodes):
        return f"needs {_count(gpus, 'GPU')} in one node, and no node{labelled} has any"
    enough = [node for node in nodes if node.can_hold({"GPU": gpus})]
    if not enough:
        best = max(nodes, key=lambda node: (node.free_gpus, node.num_gpus, node.node_id))
        return (
            f"needs {_count(gpus, 'GPU')} in one node, the largest free block{labelled} is {best.free_gpus:g} "
            f"(of {best.num_gpus:g}, node {best.address})"
        )
    if not any(node.can_hold(bundle) for node in nodes):
        best = max(enough, key=lambda node: (node.free_cpus, node.node_id))
        beside = f" beside {_count(gpus, 'GPU')}" if gpus else ""
        return (
            f"needs {_count(bundle['CPU'], 'CPU')}{beside} in one node, the most that is free{labelled} is "
            f"{best.free_cpus:g} (of {best.num_cpus:g}, node {best.address})"
        )
    block = _count(gpus, "GPU") if gpus else _count(bundle["CPU"], "CPU")
    num_blocks = sum(_num_held(node, [spec.bundles()[-1]] * spec.pp_size) for node in nodes)
    return (
        f"needs {spec.pp_size} blocks of {block}, one for each pipeline stage and each in one node, and there is room "
        f"for {min(num_blocks, spec.pp_size - 1)}{labelled}"
    )


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"
