"""A way to use GPUs: pools of replicas, how each is split over GPUs, and number formats. Pure; judges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from manta.cluster.routing.roles import Role
from manta.engine.hardware import Hardware
from manta.engine.model_shape import ModelShape
from manta.engine.precision import KV_DTYPES, PRECISIONS
from manta.engine.step_time import H200_SHARES, PEAKS, StepTimeModel

from .problem import Problem


@dataclass(frozen=True)
class ReplicaKind:
    """How one replica uses GPUs, and in which formats."""

    tp: int
    pp: int
    weights: str
    kv: str

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        split = f"TP{self.tp}" + (f" PP{self.pp}" if self.pp > 1 else "")
        return f"{split}, {self.weights} weights, {self.kv} KV"

    def misfit(self, shape: ModelShape, hardware: Hardware, *, gpus_per_node: int) -> str | None:
        """Why the model cannot be split or stored so; None: it can."""
        for what, size in (("attention heads", shape.num_heads), ("KV heads", max(shape.num_kv_heads, self.tp))):
            if size % self.tp:
                return f"{size} {what} cannot be shared by {self.tp} ranks"
        if shape.intermediate_size % self.tp:
            return f"intermediate size {shape.intermediate_size} cannot be shared by {self.tp} ranks"
        if self.tp > gpus_per_node:
            return f"{self.tp} ranks that share layers need one node, which has {gpus_per_node} GPUs"
        if self.pp > shape.num_layers:
            return f"{shape.num_layers} layers cannot make {self.pp} stages"
        return PRECISIONS[self.weights].misfit(hardware)

    def step_times(self, problem: Problem, shape: ModelShape) -> StepTimeModel:
        """Stages of a replica that fits a node stay in it."""
        precision, cluster = PRECISIONS[self.weights], problem.cluster
        is_in_node = self.num_gpus <= cluster.gpus_per_node
        return StepTimeModel(
            shape,
            cluster.hardware,
            dtype=shape.dtype,
            tp=self.tp,
            pp=self.pp,
            weight_bits=precision.weight_bits,
            activation_bits=precision.activation_bits,
            kv_dtype=KV_DTYPES[self.kv],
            shares=H200_SHARES if problem.search.step_times == "fitted" else PEAKS,
            stage_link=None if is_in_node else cluster.network(self.tp),
        )


@dataclass(frozen=True)
class Pool:
    """Replicas that are alike."""

    role: Role
    num_replicas: int
    step_target_s: float | None = None
    """Bounds the prompt tokens of a step that also decodes; None: whatever it has room for."""

    @property
    def name(self) -> str:
        return "engine" if self.role is Role.MIXED else self.role.value


@dataclass(frozen=True)
class Placement:
    """All pools, of one kind of replica."""

    kind: ReplicaKind
    pools: tuple[Pool, ...]

    @property
    def num_replicas(self) -> int:
        return sum(pool.num_replicas for pool in self.pools)

    @property
    def num_gpus(self) -> int:
        return self.num_replicas * self.kind.num_gpus

    @property
    def name(self) -> str:
        counted = " + ".join(f"{pool.num_replicas} {pool.role.value}" for pool in self.pools)
        targets = {pool.step_target_s for pool in self.pools if pool.step_target_s is not None}
        bound = f", steps of {min(targets) * 1e3:g} ms" if targets else ""
        return f"{counted} x {self.kind.name}{bound}"

    def with_replicas(self, *counts: int) -> Placement:
        """The same with other numbers of replicas, pool by pool."""
        pools = tuple(replace(pool, num_replicas=count) for pool, count in zip(self.pools, counts, strict=True))
        return replace(self, pools=pools)


def kinds(problem: Problem) -> Iterator[ReplicaKind]:
    """All that the problem lets try, whether or not they can be."""
    search = problem.search
    for weights in search.weights:
        for kv in search.kv:
            for pp in search.pipeline_parallel:
                for tp in search.tensor_parallel:
                    yield ReplicaKind(tp, pp, weights, kv)


def arrangements(problem: Problem, kind: ReplicaKind) -> Iterator[Placement]:
    """Pools of one replica each, for every way of dividing the work; with and without a bound on steps where TPOT has
    a limit."""
    targets = (None,) if problem.slo.tpot_s is None else (None, problem.slo.tpot_s)
    if "mixed" in problem.search.pools:
        for target_s in targets:
            yield Placement(kind, (Pool(Role.MIXED, 1, target_s),))
    if "split" in problem.search.pools:
        yield Placement(kind, (Pool(Role.PREFILL, 1), Pool(Role.DECODE, 1)))
