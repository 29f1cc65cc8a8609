"""What one replica's gang of ranks asks of a cluster: how many ranks, in which blocks, with which resources. Pure.

A pipeline stage is a block: its tensor-parallel ranks exchange data several times a layer, so they share a node. Knows
no nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .routing.roles import Role


@dataclass(frozen=True)
class GangSpec:
    """One replica: `tp_size` x `pp_size` ranks, and beside rank 0 the process that Serve sees."""

    tp_size: int = 1
    pp_size: int = 1
    gpus_per_rank: float = 0.0
    """0 for ranks on CPUs; below 1 when ranks share a GPU."""
    cpus_per_rank: float = 0.5
    replica_cpus: float = 0.1
    """CPUs of the process that Serve sees."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the labels of every node must be, in Ray's notation: `a`, `!a`, `in(a,b)` or `!in(a,b)`."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp_size * self.pp_size

    @property
    def stage_gpus(self) -> float:
        """GPUs that a stage needs in one node."""
        return _rounded(self.tp_size * self.gpus_per_rank)

    def bundles(self) -> list[dict[str, float]]:
        """Resources of each stage, which Ray reserves in one node each. The first holds Serve's process too."""
        bundles = []
        for stage in range(self.pp_size):
            cpus = self.tp_size * self.cpus_per_rank + (self.replica_cpus if stage == 0 else 0.0)
            bundle = {"CPU": _rounded(cpus)}
            if self.stage_gpus:
                bundle["GPU"] = self.stage_gpus
            bundles.append(bundle)
        return bundles

    def bundle_of(self, rank: int) -> int:
        """Index of the bundle in which the rank runs: its stage."""
        return rank // self.tp_size

    def rank_resources(self) -> dict[str, float]:
        """What each rank's actor asks for, by Ray's names of options."""
        return {"num_cpus": self.cpus_per_rank, "num_gpus": self.gpus_per_rank}


@dataclass(frozen=True)
class PoolSpec:
    """Replicas that are alike, which Serve knows as one deployment."""

    name: str
    """Of the deployment."""
    gang: GangSpec
    num_replicas: int
    role: Role = Role.MIXED
    """That its replicas begin with."""


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that the selector means. A label that is absent equals nothing."""
    return all(_is_met(wanted, labels.get(name)) for name, wanted in selector.items())


def _is_met(wanted: str, value: str | None) -> bool:
    if wanted.startswith("!"):
        return not _is_met(wanted[1:], value)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return value in {choice.strip() for choice in wanted[3:-1].split(",")}
    return value == wanted


def _rounded(amount: float) -> float:
    """Ray counts resources in ten-thousandths."""
    return round(amount, 4)
