"""Scaling policies to compare with: fixed, stock Serve, queue depth as KEDA and HPA do it, an oracle. Pure.

They take the same snapshots as Manta's policy; the oracle ignores them and knows what will come instead.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from manta.autoscaling.policy import Decision
from manta.autoscaling.signals import FleetSnapshot, PoolState
from manta.cluster.routing.roles import Role
from manta.engine.step_costs import StepCosts

from .workload import SimRequest


class ScalingPolicy(Protocol):
    """Who says how many replicas there should be. What it remembers is a value that the caller keeps."""

    def initial(self) -> Any:
        """The state before the first decision."""
        ...

    def decide(self, state: Any, snapshot: FleetSnapshot, now_s: float) -> tuple[Any, Decision]:
        """What to do at `now_s`, which never falls."""
        ...


@dataclass(frozen=True)
class FixedPeak:
    """So many replicas of each pool, whatever comes."""

    targets: Mapping[str, int]

    def initial(self) -> None:
        return None

    def decide(self, state: None, snapshot: FleetSnapshot, now_s: float) -> tuple[None, Decision]:
        return None, Decision(targets={pool.name: self.targets[pool.name] for pool in snapshot.pools})


@dataclass(frozen=True)
class _Past:
    """What a pool's baseline remembers: (time, value) of a window, and since when it wants to go up or down."""

    values: tuple[tuple[float, float], ...] = ()
    up_since_s: float | None = None
    down_since_s: float | None = None

    def add(self, now_s: float, value: float, *, keep_s: float) -> tuple[tuple[float, float], ...]:
        return (*(pair for pair in self.values if pair[0] > now_s - keep_s), (now_s, value))


@dataclass(frozen=True)
class ServeStock:
    """Ray Serve's request-based autoscaling: replicas for the mean number of ongoing requests over a look-back, after
    delays. Defaults are Serve's. Requests that wait anywhere count as ongoing."""

    target_ongoing_requests: float = 2.0
    look_back_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0

    def initial(self) -> dict[str, _Past]:
        return {}

    def decide(
        self, state: dict[str, _Past], snapshot: FleetSnapshot, now_s: float
    ) -> tuple[dict[str, _Past], Decision]:
        after, targets = {}, {}
        for pool in snapshot.pools:
            past = state.get(pool.name, _Past())
            values = past.add(now_s, ongoing(pool, snapshot), keep_s=self.look_back_s)
            mean = sum(value for _, value in values) / len(values)
            wanted = _clamp(pool, math.ceil(mean / self.target_ongoing_requests - 1e-9))
            up_s = past.up_since_s if wanted > pool.target else None
            down_s = past.down_since_s if wanted < pool.target else None
            target = pool.target
            if wanted > target:
                up_s = now_s if up_s is None else up_s
                if now_s - up_s >= self.upscale_delay_s or not target:
                    target, up_s = wanted, None
            elif wanted < target:
                down_s = now_s if down_s is None else down_s
                if now_s - down_s >= self.downscale_delay_s:
                    target, down_s = wanted, None
            after[pool.name] = _Past(values, up_s, down_s)
            targets[pool.name] = target
        return after, Decision(targets=within_budget(snapshot, targets))


@dataclass(frozen=True)
class QueueDepth:
    """KEDA with a Prometheus trigger, which feeds a HorizontalPodAutoscaler: replicas = metric / threshold, looked at
    every 15 s; nothing within a tenth of it; up by no more than the double or 4 in 15 s; down to the most of the last
    300 s. Defaults are theirs."""

    threshold: float
    """Requests a replica."""
    counts_running: bool = False
    """Whether the metric counts requests that run beside those that wait."""
    period_s: float = 15.0
    stabilization_s: float = 300.0
    tolerance: float = 0.1

    def initial(self) -> dict[str, _Past]:
        return {}

    def decide(
        self, state: dict[str, _Past], snapshot: FleetSnapshot, now_s: float
    ) -> tuple[dict[str, _Past], Decision]:
        after, targets = dict(state), {}
        for pool in snapshot.pools:
            targets[pool.name] = pool.target
            past = state.get(pool.name, _Past(((now_s, pool.target),)))  # what is there counts as wanted, too
            if pool.name in state and now_s - past.values[-1][0] < self.period_s - 1e-9:
                continue
            metric = ongoing(pool, snapshot)
            if not self.counts_running:
                metric -= pool.num_running
            ratio = metric / (self.threshold * pool.target) if pool.target else math.inf
            is_near = abs(ratio - 1.0) <= self.tolerance
            wanted = pool.target if is_near else math.ceil(metric / self.threshold - 1e-9)
            values = past.add(now_s, wanted, keep_s=self.stabilization_s)
            most_up = max(2 * pool.target, pool.target + 4)
            target = min(wanted, most_up)
            if wanted < pool.target:
                target = min(pool.target, max(int(value) for _, value in values))
            after[pool.name] = _Past(values)
            targets[pool.name] = _clamp(pool, target)
        return after, Decision(targets=within_budget(snapshot, targets))


@dataclass(frozen=True)
class Oracle:
    """Has made its plan with the requests in hand; each replica starts early enough to be ready in time."""

    plan: Mapping[str, tuple[Sequence[float], Sequence[int]]] = field(default_factory=dict)
    """By pool: times, and replicas from each on."""

    def initial(self) -> None:
        return None

    def decide(self, state: None, snapshot: FleetSnapshot, now_s: float) -> tuple[None, Decision]:
        targets = {}
        for pool in snapshot.pools:
            times_s, counts = self.plan[pool.name]
            targets[pool.name] = _clamp(pool, counts[max(bisect.bisect_right(times_s, now_s) - 1, 0)])
        return None, Decision(targets=within_budget(snapshot, targets))


@dataclass(frozen=True)
class OraclePlan:
    """How much work comes when, in seconds of one replica; counts of replicas follow with an `ease`."""

    window_s: float
    work_s: tuple[float, ...]
    """Of each window."""

    @classmethod
    def of(
        cls, requests: Sequence[SimRequest], seconds_of: Callable[[SimRequest], float], *, window_s: float
    ) -> OraclePlan:
        """`seconds_of` a request: what it takes of a replica that is as busy as may be."""
        work_s = [0.0] * (int(requests[-1].arrival_s / window_s) + 1)
        for request in requests:
            work_s[int(request.arrival_s / window_s)] += seconds_of(request)
        return cls(window_s, tuple(work_s))

    def counts(self, ease: float, *, ahead_s: float, keep_s: float) -> tuple[list[float], list[int]]:
        """Times, and replicas from each on: `ease` times the work's, begun `ahead_s` early, kept through lulls of
        less than `keep_s`: to stop and start one in it costs as much."""
        needs = [math.ceil(ease * work / self.window_s - 1e-9) for work in self.work_s]
        num_kept = round(keep_s / self.window_s)
        kept = list(needs)
        for index, need in enumerate(needs):
            later = max(needs[index : index + num_kept + 1])
            before = max(needs[max(index - num_kept, 0) : index + 1])
            kept[index] = max(need, min(later, before))
        num_ahead = math.ceil(ahead_s / self.window_s)
        early = [max(kept[index : index + num_ahead + 1]) for index in range(len(kept))]
        return [index * self.window_s for index in range(len(early))], early


def seconds_of_replica(request: SimRequest, costs: StepCosts, role: Role, *, batch: float) -> float:
    """Seconds of a replica that a request takes where `batch` others decode beside it."""
    prefill_s = request.num_prompt_tokens * costs.token_s + request.num_prompt_tokens**2 / 2 * costs.pair_s
    context = request.num_prompt_tokens + request.num_output_tokens / 2
    step_s = (costs.overhead_s + max(costs.weights_s, batch * costs.token_s)) / batch
    decode_s = request.num_output_tokens * (step_s + context * costs.context_token_s)
    return {Role.PREFILL: prefill_s, Role.DECODE: decode_s, Role.MIXED: prefill_s + decode_s}[role]


def ongoing(pool: PoolState, snapshot: FleetSnapshot) -> float:
    """Requests that run or wait in a pool; those at the edge count for whoever takes them first."""
    held = 0 if pool.role is Role.DECODE else snapshot.num_held
    return pool.num_running + pool.num_waiting + held


def within_budget(snapshot: FleetSnapshot, targets: Mapping[str, int]) -> dict[str, int]:
    """Each pool in its turn as much as the budget leaves."""
    budget = snapshot.gpu_budget
    if budget is None:
        return dict(targets)
    found = {}
    for pool in snapshot.pools:
        room = int((budget + 1e-9) // pool.gpus_per_replica)
        found[pool.name] = max(min(targets[pool.name], room), pool.min_replicas)
        budget -= found[pool.name] * pool.gpus_per_replica
    return found


def _clamp(pool: PoolState, target: int) -> int:
    return min(max(target, pool.min_replicas), pool.max_replicas)
