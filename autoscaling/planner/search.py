"""From a problem to placements: which keep the objective with how many GPUs, and why the others do not. Pure.

Mean values (steady.py) say how many replicas there must be at least, the recursion (estimate.py) whether requests are
in time with so many; one more is added until they are, or until there are no more GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from manta.cluster.routing.roles import Role
from manta.engine.model_shape import ModelShape
from manta.engine.step_time import StepShape, StepTimeModel

from .demand import Demand
from .estimate import Estimate, ReplicaModel, Transfer, estimate, quantile
from .memory import MemoryLedger, ledger
from .placement import Placement, ReplicaKind, arrangements, kinds
from .problem import Problem
from .steady import Sizes, Steady, max_rate, steady

TRANSFER_LATENCY_S = 3e-3
"""From the last byte of a request's KV to its being ready."""
SLACK_GPUS = 2
"""Placements that need so many GPUs more than the best one are looked at too; those that need even more are not."""
NO_BETTER_THAN_FP8 = {
    "w8a8": "takes the same bytes and time as fp8 on this hardware",
    "fp8_tensor": "takes the same bytes and time as fp8",
    "fp8_block": "takes more bytes than fp8 and the same time",
    "int8": "takes the same bytes as fp8 and multiplies in 16 bits",
}
"""Weights, on hardware that multiplies FP8 numbers."""
RATE_STEPS = 7
"""Halvings when the largest feasible rate is sought."""
MOST_SEARCHED = 6
"""Arrangements for which it is sought."""


@dataclass(frozen=True)
class Judged:
    """A placement at a rate."""

    placement: Placement
    rate: float
    ledger: MemoryLedger
    steady: tuple[Steady, ...]
    """One for each pool."""
    estimate: Estimate
    missed: str | None
    """Why it does not do; None: it does."""

    @property
    def utilization(self) -> float:
        """Of the pool that is nearest to its limit."""
        return max(one.utilization for one in self.steady)


@dataclass(frozen=True)
class Rejected:
    """What was not judged, or not good enough."""

    name: str
    reason: str
    largest_rate: float = 0.0
    """Requests a second that its mean values would allow on all GPUs; 0: none, or not looked for."""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    problem: Problem
    shape: ModelShape
    demand: Demand
    ranked: tuple[Judged, ...]
    """All that keep the objective, the best first; those at `largest_rate` where none does at the problem's rate."""
    rejected: tuple[Rejected, ...]
    """The others, what came nearest first."""
    is_feasible: bool
    largest_rate: float | None
    """Requests a second that could be served, where the problem's rate cannot; 0: not even one. None: it can."""

    @property
    def best(self) -> Judged | None:
        return self.ranked[0] if self.ranked else None


class Planner:
    """One problem. `say` is told what is being looked at."""

    def __init__(
        self, problem: Problem, shape: ModelShape, demand: Demand, *, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._problem, self._shape, self._demand, self._say = problem, shape, demand, say
        self._models: dict[ReplicaKind, tuple[StepTimeModel, MemoryLedger]] = {}
        self._rejected: list[Rejected] = []

    def plan(self) -> Plan:
        """The placements that do, ranked by GPUs, then by how much their formats round, then by utilization."""
        rate = self._demand.rate
        starts = sorted(self._starts(rate), key=lambda one: one.num_gpus)
        fitting = [one for one in starts if self._fits(one)]
        for one in starts:
            if one not in fitting:
                self._rejected.append(self._too_many(one))
        good: list[Judged] = []
        for start in fitting:
            least = min((one.placement.num_gpus for one in good), default=math.inf)
            if start.num_gpus > least + SLACK_GPUS:
                self._reject(start.name, f"needs at least {start.num_gpus} GPUs, the best one {least:.0f}")
                continue
            found = self._grow(start)
            if found.missed is None:
                good.append(found)
            else:
                self._reject(found.placement.name, found.missed, self._bound(found.placement))
        largest = None
        if not good:
            largest, good = self._largest(starts)
        ranked = tuple(sorted(good, key=self._rank))
        is_feasible = largest is None
        rejected = tuple(sorted(self._rejected, key=lambda one: -one.largest_rate))
        return Plan(self._problem, self._shape, self._demand, ranked, rejected, is_feasible, largest)

    def judge(self, placement: Placement, rate: float) -> Judged | None:
        """At that rate; None when it cannot keep up."""
        model, memory = self._model(placement.kind)
        demand, sizes, search = self._demand, self._sizes(memory), self._problem.search
        found = [steady(model, demand, pool.role, sizes, rate / pool.num_replicas) for pool in placement.pools]
        if any(one is None for one in found):
            return None
        replicas = [
            ReplicaModel(
                model.predict_full,
                pool.role,
                memory.kv_room_tokens,
                search.max_num_seqs,
                search.max_num_batched_tokens,
                pool.step_target_s,
            )
            for pool in placement.pools
            for _ in range(pool.num_replicas)
        ]
        guessed = estimate(
            replicas,
            demand.at(rate),
            percentile=self._problem.slo.percentile,
            transfer=transfer_of(self._problem, placement, model),
        )
        judged = Judged(placement, rate, memory, tuple(one for one in found if one is not None), guessed, None)
        return replace(judged, missed=self._missed(judged))

    def _starts(self, rate: float) -> Iterator[Placement]:
        """Every arrangement with the fewest replicas that keep up with the rate."""
        problem, hardware = self._problem, self._problem.cluster.hardware
        for kind in kinds(problem):
            reason = kind.misfit(self._shape, hardware, gpus_per_node=problem.cluster.gpus_per_node)
            if reason is None and hardware.has_fp8 and "fp8" in problem.search.weights:
                reason = NO_BETTER_THAN_FP8.get(kind.weights)
            if reason is None and not self._most_replicas(kind):
                reason = f"needs {kind.num_gpus} GPUs, there are {problem.cluster.num_gpus}"
            if reason is None:
                reason = self._model(kind)[1].misfit(self._demand.longest) or self._too_slow(self._model(kind)[0])
            if reason is not None:
                self._reject(kind.name, reason)
                continue
            model, memory = self._model(kind)
            for one in arrangements(problem, kind):
                rates = [max_rate(model, self._demand, pool.role, self._sizes(memory)) for pool in one.pools]
                most = problem.search.max_utilization
                yield one.with_replicas(*(max(1, math.ceil(rate / (most * each))) for each in rates))

    def _too_slow(self, model: StepTimeModel) -> str | None:
        """Why not even an idle replica keeps the objective; None: it may."""
        slo, demand = self._problem.slo, self._demand
        token_s = model.predict_full(StepShape(num_decode_seqs=1))
        if self._is_late(token_s, slo.tpot_s):
            return f"an idle replica takes {token_s * 1e3:.3g} ms for a token"
        lengths = sorted(one.num_prompt_tokens for one in demand.requests)
        length = int(quantile(lengths, slo.percentile))
        first_s = model.predict_full(StepShape(length, 0, 0, length * (length + 1) // 2))
        if self._is_late(first_s, slo.ttft_s):
            return f"an idle replica takes {first_s * 1e3:.3g} ms for a prompt of {length} tokens"
        return None

    def _grow(self, placement: Placement) -> Judged:
        """With as many more replicas as the objective asks for, or as there are GPUs for."""
        while True:
            self._say(placement.name)
            judged = self.judge(placement, self._demand.rate)
            assert judged is not None, "a start keeps up"
            counts = [pool.num_replicas for pool in placement.pools]
            counts[self._short_of(judged)] += 1
            more = placement.with_replicas(*counts)
            if judged.missed is None or not self._fits(more):
                return judged
            placement = more

    def _short_of(self, judged: Judged) -> int:
        """The pool that needs another replica first."""
        if len(judged.steady) == 1 or self._is_late(judged.estimate.ttft_at_s, self._problem.slo.ttft_s):
            return 0
        return 1

    def _largest(self, starts: Sequence[Placement]) -> tuple[float, list[Judged]]:
        """The highest rate at which some placement on all GPUs keeps the objective, and what was found there."""
        bounds = sorted(
            ((self._bound(full), full) for one in starts for full in self._full(one)),
            key=lambda found: found[0],
            reverse=True,
        )
        best: Judged | None = None
        for bound, placement in bounds[:MOST_SEARCHED]:
            low = 0.0 if best is None else best.rate
            bound = min(bound, self._demand.rate)
            if bound <= low:
                continue
            self._say(f"the largest rate of {placement.name}")
            high = bound
            for step in range(RATE_STEPS):
                rate = high if step == 0 else (low + high) / 2
                judged = self.judge(placement, rate)
                if judged is not None and judged.missed is None:
                    best, low = judged, rate
                    if step == 0:
                        break
                else:
                    high = rate
        return (0.0, []) if best is None else (best.rate, [best])

    def _bound(self, placement: Placement) -> float:
        """Requests a second that it sustains at the highest utilization that is allowed."""
        model, memory = self._model(placement.kind)
        rates = [
            pool.num_replicas * max_rate(model, self._demand, pool.role, self._sizes(memory))
            for pool in placement.pools
        ]
        return self._problem.search.max_utilization * min(rates)

    def _full(self, placement: Placement) -> Iterator[Placement]:
        """The same on all GPUs; for two pools, in the proportion that sustains most."""
        most = self._most_replicas(placement.kind)
        if len(placement.pools) == 1:
            yield placement.with_replicas(most)
        elif most >= 2:
            ways = [placement.with_replicas(first, most - first) for first in range(1, most)]
            yield max(ways, key=self._bound)

    def _fits(self, placement: Placement) -> bool:
        return placement.num_replicas <= self._most_replicas(placement.kind)

    def _most_replicas(self, kind: ReplicaKind) -> int:
        """For which there are GPUs: in one node each, or stage by stage where one is too small."""
        cluster = self._problem.cluster
        if kind.num_gpus <= cluster.gpus_per_node:
            return cluster.num_nodes * (cluster.gpus_per_node // kind.num_gpus)
        return cluster.num_nodes * (cluster.gpus_per_node // kind.tp) // kind.pp

    def _too_many(self, placement: Placement) -> Rejected:
        cluster = self._problem.cluster
        largest = max((self._bound(full) for full in self._full(placement)), default=0.0)
        model, memory = self._model(placement.kind)
        bounds = [
            found.bound
            for pool in placement.pools
            if (found := steady(model, self._demand, pool.role, self._sizes(memory), 1e-6)) is not None
        ]
        reason = (
            f"needs {placement.num_gpus} GPUs to keep up with {self._demand.rate:.4g} requests/s, there are "
            f"{cluster.num_gpus}: at most {largest:.3g}/s ({' and '.join(dict.fromkeys(bounds))})"
        )
        return Rejected(placement.name, reason, largest)

    def _missed(self, judged: Judged) -> str | None:
        slo, found = self._problem.slo, judged.estimate
        if judged.utilization > self._problem.search.max_utilization + 1e-9:
            return f"utilization would be {judged.utilization:.2f}"
        said = []
        for name, value, limit in (("TTFT", found.ttft_at_s, slo.ttft_s), ("TPOT", found.tpot_at_s, slo.tpot_s)):
            if limit is not None and self._is_late(value, limit):
                said.append(f"p{slo.percentile:g} {name} {value * 1e3:.0f} ms instead of {limit * 1e3:.0f}")
        return ", ".join(said) or None

    @staticmethod
    def _is_late(value: float, limit: float | None) -> bool:
        return limit is not None and not value <= limit

    def _rank(self, judged: Judged) -> tuple[float, ...]:
        kind, search = judged.placement.kind, self._problem.search
        formats = search.weights.index(kind.weights), search.kv.index(kind.kv)
        return (-judged.rate, judged.placement.num_gpus, *formats, judged.utilization)

    def _reject(self, name: str, reason: str, largest_rate: float = 0.0) -> None:
        self._rejected.append(Rejected(name, reason, largest_rate))

    def _model(self, kind: ReplicaKind) -> tuple[StepTimeModel, MemoryLedger]:
        if kind not in self._models:
            model = kind.step_times(self._problem, self._shape)
            self._models[kind] = model, ledger(self._problem, self._shape, model)
        return self._models[kind]

    def _sizes(self, memory: MemoryLedger) -> Sizes:
        search = self._problem.search
        return Sizes(memory.kv_room_tokens, search.max_num_seqs, search.max_num_batched_tokens)


def transfer_of(problem: Problem, placement: Placement, model: StepTimeModel) -> Transfer:
    """KV from replica to replica: inside the node where there is one, else over each replica's share of the network."""
    cluster, num_gpus = problem.cluster, placement.kind.num_gpus
    link = cluster.network(num_gpus) if cluster.num_nodes > 1 else cluster.hardware.link
    return Transfer(float(model.kv_bytes_per_token), link.bytes_per_s, TRANSFER_LATENCY_S)


def has_pools(placement: Placement) -> bool:
    """Whether prompts are computed elsewhere than answers."""
    return any(pool.role is Role.PREFILL for pool in placement.pools)
