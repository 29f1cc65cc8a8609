"""What a planner is asked: a model, requests, an objective and the GPUs there are. Checked, and nothing more. Pure.

Knows no files: who reads one passes its tree. The model's shape is settled by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import msgspec

from manta.autoscaling.slo import Slo
from manta.engine.errors import ConfigError
from manta.engine.hardware import Hardware, Link, hardware_named
from manta.engine.precision import kv_dtype_named, precision_named

SECTION = "plan"
"""Of the YAML file: its only top-level name."""
NETWORK_SHARE = 0.9
"""Of a network's nominal rate, what payload gets."""
NETWORK_LATENCY_S = 20e-6


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown names are errors."""


class Lengths(_Section, frozen=True, kw_only=True):
    """Lognormal lengths in tokens, clipped."""

    median: float
    sigma: float
    low: int = 1
    high: int = 131_072

    @property
    def mean(self) -> float:
        """Of the clipped distribution."""
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        return self._moment(2)

    def quantile(self, share: float) -> float:
        """The length that `share` of the requests (0 to 1) do not exceed."""
        if self.sigma == 0:
            return min(max(self.median, self.low), self.high)
        return min(max(self.median * math.exp(self.sigma * _normal_quantile(share)), self.low), self.high)

    def _moment(self, order: int) -> float:
        if self.sigma == 0:
            return self.quantile(0.5) ** order
        mean, sigma = math.log(self.median), self.sigma
        low, high = ((math.log(end) - mean) / sigma for end in (self.low, self.high))
        within = _normal(high - order * sigma) - _normal(low - order * sigma)
        inner = math.exp(order * mean + (order * sigma) ** 2 / 2) * within
        return inner + self.low**order * _normal(low) + self.high**order * (1 - _normal(high))


class Workload(_Section, frozen=True, kw_only=True):
    """Requests: lengths and a rate, or a trace's own."""

    rate: float | None = None
    """Requests a second; None: the trace's."""
    prompt: Lengths | None = None
    output: Lengths | None = None
    trace: str | None = None
    """A trace's name or file, in place of the lengths; its arrivals, at `rate` if given."""
    arrivals: Literal["poisson"] = "poisson"
    seed: int = 0


class Cluster(_Section, frozen=True, kw_only=True):
    """The GPUs that may be used."""

    gpu: str
    num_nodes: int = 1
    gpus_per_node: int = 8
    network_gbit_s: float = 400.0
    """Between nodes: of each node, shared by its GPUs."""
    dollars_per_gpu_hour: float = 2.5

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def hardware(self) -> Hardware:
        return hardware_named(self.gpu)

    def network(self, num_gpus: int = 1) -> Link:
        """The way out of the node for the share of it that so many GPUs have."""
        bytes_per_s = self.network_gbit_s / 8 * 1e9 * NETWORK_SHARE
        return Link(bytes_per_s * min(num_gpus, self.gpus_per_node) / self.gpus_per_node, NETWORK_LATENCY_S)


class Search(_Section, frozen=True, kw_only=True):
    """What is tried, and what every placement has in common."""

    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    pipeline_parallel: tuple[int, ...] = (1, 2)
    weights: tuple[str, ...] = ("bf16", "fp8", "w8a8", "int4")
    kv: tuple[str, ...] = ("bf16", "fp8")
    pools: tuple[Literal["mixed", "split"], ...] = ("mixed", "split")
    """One pool that does both, or one for prompts and one for answers."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 64
    memory_fraction: float = 0.9
    max_utilization: float = 0.9
    """Of what a placement sustains at most; the rest is for what nobody foresees."""
    step_times: Literal["peaks", "fitted"] = "peaks"
    """The roofline of the hardware's reachable peaks and a fixed overhead, as router and simulated device have it; or
    with the shares of these peaks that Manta was measured to reach on an H200."""


class Problem(_Section, frozen=True, kw_only=True):
    """All of it."""

    model: str
    """A model as `engine.model.model` takes it, usually a config.json."""
    workload: Workload
    slo: Slo
    cluster: Cluster
    search: Search = Search()


def problem_from(tree: Mapping[str, Any], *, source: str = "the file") -> Problem:
    """The problem in a file's tree. Raises ConfigError with a sentence that names the field."""
    if SECTION not in tree:
        raise ConfigError(
            f"{source} has no section `{SECTION}`: a planning problem begins with it; `manta serve` takes the others"
        )
    others = sorted(set(tree) - {SECTION})
    if others:
        raise ConfigError(
            f"{source} has {', '.join(others)} beside `{SECTION}`: a planning problem is a file of its own"
        )
    slo = tree[SECTION].get("slo") if isinstance(tree[SECTION], Mapping) else None
    known = [field.name for field in fields(Slo)]
    if isinstance(slo, Mapping) and (wrong := sorted(set(slo) - set(known))):
        raise ConfigError(f"{source}: {SECTION}.slo.{wrong[0]} is unknown; known are {', '.join(known)}")
    try:
        problem = msgspec.convert(tree[SECTION], Problem, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        said = str(error).replace("`$.", f"`{SECTION}.").replace("`$`", f"`{SECTION}`")
        raise ConfigError(f"{source}: {said}") from None
    check(problem)
    return problem


def check(problem: Problem) -> None:
    """Raises ConfigError for numbers that mean nothing."""
    workload, cluster, search = problem.workload, problem.cluster, problem.search
    _must(workload.rate is None or workload.rate > 0, "workload.rate", workload.rate, "must be above 0")
    if workload.trace is None:
        _must(workload.rate is not None, "workload.rate", None, "give requests a second, or a trace")
        for name, lengths in (("prompt", workload.prompt), ("output", workload.output)):
            if lengths is None:
                raise ConfigError(f"{SECTION}.workload.{name} is missing: give its median and sigma, or a trace")
            field = f"workload.{name}"
            _must(lengths.median > 0, f"{field}.median", lengths.median, "must be above 0")
            _must(lengths.sigma >= 0, f"{field}.sigma", lengths.sigma, "must not be negative")
            _must(1 <= lengths.low <= lengths.high, f"{field}.low", lengths.low, "must be from 1 to high")
    else:
        _must(
            workload.prompt is None and workload.output is None,
            "workload.trace",
            workload.trace,
            "has lengths of its own: leave out prompt and output",
        )
    _must(problem.slo.ttft_s is not None or problem.slo.tpot_s is not None, "slo", "{}", "give ttft_s, tpot_s or both")
    hardware_named(cluster.gpu)
    _must(cluster.num_nodes >= 1, "cluster.num_nodes", cluster.num_nodes, "must be at least 1")
    _must(cluster.gpus_per_node >= 1, "cluster.gpus_per_node", cluster.gpus_per_node, "must be at least 1")
    _must(cluster.network_gbit_s > 0, "cluster.network_gbit_s", cluster.network_gbit_s, "must be above 0")
    _must(
        cluster.dollars_per_gpu_hour >= 0,
        "cluster.dollars_per_gpu_hour",
        cluster.dollars_per_gpu_hour,
        "must not be negative",
    )
    for name, sizes in (("tensor_parallel", search.tensor_parallel), ("pipeline_parallel", search.pipeline_parallel)):
        _must(bool(sizes) and min(sizes) >= 1, f"search.{name}", list(sizes), "must be numbers of at least 1")
    _must(
        bool(search.weights) and bool(search.kv) and bool(search.pools),
        "search",
        "{}",
        "weights, kv and pools must not be empty",
    )
    for name in search.weights:
        precision_named(name)
    for name in search.kv:
        kv_dtype_named(name)
    _must(0 < search.memory_fraction < 1, "search.memory_fraction", search.memory_fraction, "must be between 0 and 1")
    _must(
        0 < search.max_utilization <= 1,
        "search.max_utilization",
        search.max_utilization,
        "must be above 0 and at most 1",
    )
    sizes = search.max_num_seqs, search.max_num_batched_tokens, search.block_size
    _must(min(sizes) >= 1, "search", list(sizes), "sizes must be at least 1")


def _must(holds: bool, field: str, value: object, what: str) -> None:
    if not holds:
        raise ConfigError(f"{SECTION}.{field} = {value}: {what}", field=f"{SECTION}.{field}")


def _normal(x: float) -> float:
    """The normal distribution's share below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _normal_quantile(share: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _normal(middle) < share else (low, middle)
    return (low + high) / 2
