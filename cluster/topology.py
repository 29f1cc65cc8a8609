"""The nodes of a cluster as data: what each has, what of it is free, how it is labelled. Pure; discover.py fills it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """One machine, or what Ray takes for one."""

    node_id: str
    address: str
    num_gpus: float = 0.0
    free_gpus: float = 0.0
    num_cpus: float = 0.0
    free_cpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    gpu_sockets: tuple[int, ...] = ()
    """Socket of each GPU, where that is known."""
    is_head: bool = False

    @property
    def free_block(self) -> int:
        """Whole GPUs that are free together."""
        return math.floor(self.free_gpus + 1e-6)

    def can_hold(self, resources: Mapping[str, float]) -> bool:
        """Whether a bundle of `CPU` and `GPU` fits into what is free. Parts of GPUs do not make a whole one."""
        gpus = resources.get("GPU", 0.0)
        free_gpus = self.free_gpus if gpus < 1 else self.free_block
        return gpus <= free_gpus + 1e-6 and resources.get("CPU", 0.0) <= self.free_cpus + 1e-6

    def without(self, resources: Mapping[str, float]) -> Node:
        """The node when a bundle has been taken out of it."""
        return Node(
            self.node_id,
            self.address,
            self.num_gpus,
            self.free_gpus - resources.get("GPU", 0.0),
            self.num_cpus,
            self.free_cpus - resources.get("CPU", 0.0),
            self.labels,
            self.gpu_sockets,
            self.is_head,
        )


@dataclass(frozen=True)
class Topology:
    """All nodes that are alive."""

    nodes: tuple[Node, ...]

    @property
    def num_gpus(self) -> float:
        """GPUs, free or not."""
        return sum(node.num_gpus for node in self.nodes)

    @property
    def largest_node(self) -> Node | None:
        """The node with the most GPUs, free or not; None when no node has one."""
        with_gpus = [node for node in self.nodes if node.num_gpus >= 1]
        return max(with_gpus, key=lambda node: (node.num_gpus, node.node_id)) if with_gpus else None
