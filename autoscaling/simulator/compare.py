"""Scaling policies on the same requests: each at the best of its parameters, Manta's at its settings. Knows no files.

Of a policy's parameters, those are best that hold the objective with the fewest GPU hours; where none holds it, those
with the highest attainment.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .elastic import ElasticFleet, ElasticRun, ElasticSettings, PoolKind
from .figures import ScalingFigures, scaling_figures
from .handoff import KvLink
from .policies import FixedPeak, Oracle, OraclePlan, QueueDepth, ScalingPolicy, ServeStock, seconds_of_replica
from .workload import SimRequest

POLICIES = ("manta", "fixed_peak", "serve_stock", "queue_depth", "oracle")
ONGOING_TARGETS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Requests a replica, for who counts those that run and wait."""
WAITING_TARGETS = (1, 2, 5, 10, 20)
"""The same for those that only wait."""
STOCK_DELAYS_S = ((30.0, 600.0), (10.0, 120.0))
"""Up and down: Serve's defaults, and what somebody sets who wants it to be quicker."""
WORK_WINDOW_S = 10.0
"""Over which the oracle adds up work."""
USUAL_BATCH = 48.0
LEAST_EASE, MOST_EASE, EASE_STEPS = 0.5, 4.0, 6
"""Bounds of the oracle's replicas over the work's, and halvings of what lies between."""


@dataclass(frozen=True)
class Scenario:
    """Requests for a fleet, and what it is made of."""

    requests: Sequence[SimRequest]
    pools: tuple[PoolKind, ...]
    settings: ElasticSettings
    manta: ScalingPolicy
    link: KvLink | None = None

    def run(self, policy: ScalingPolicy, num_initial: Mapping[str, int]) -> ElasticRun:
        """One fleet, from `num_initial` replicas on."""
        fleet = ElasticFleet(self.pools, self.settings, link=self.link)
        is_collecting = gc.isenabled()
        gc.disable()  # hardly anything in a run dies in a cycle, and looking for it takes a fifth of the time
        try:
            return fleet.run(self.requests, policy, num_initial=num_initial)
        finally:
            if is_collecting:
                gc.enable()

    def plans(self) -> dict[str, OraclePlan]:
        """Each pool's work by time."""
        return {
            pool.name: OraclePlan.of(
                self.requests,
                lambda request, pool=pool: seconds_of_replica(request, pool.kind.costs, pool.role, batch=USUAL_BATCH),
                window_s=WORK_WINDOW_S,
            )
            for pool in self.pools
        }


@dataclass(frozen=True)
class Tried:
    """A policy with one set of parameters, and what came of it."""

    policy: str
    parameters: Mapping[str, Any]
    figures: ScalingFigures


@dataclass
class Comparison:
    """What was found."""

    best: dict[str, Tried] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    runs: dict[str, ElasticRun] = field(default_factory=dict)
    """Of the best ones."""
    num_initial: dict[str, int] = field(default_factory=dict)


def compare(scenario: Scenario, *, say: Callable[[str], None], policies: Sequence[str] = POLICIES) -> Comparison:
    """Each policy at its best. `say` is told of each run. All but the fixed fleet begin with the oracle's replicas."""
    found = Comparison()
    slo = scenario.settings.slo

    def try_one(name: str, parameters: Mapping[str, Any], policy: ScalingPolicy, initial: Mapping[str, int]) -> Tried:
        run = scenario.run(policy, initial)
        tried = Tried(name, parameters, scaling_figures(run, slo))
        found.tried.append(tried)
        before = found.best.get(name)
        if before is None or is_better(tried.figures, before.figures, slo.target):
            found.best[name], found.runs[name] = tried, run
        shown = ", ".join(f"{key} {value:g}" for key, value in parameters.items())
        figures = tried.figures
        say(f"{name:12} {shown:46} attainment {figures.slo_attainment:.4f}, {figures.gpu_hours:.2f} GPU hours")
        return tried

    found.num_initial = _try_oracle(scenario, try_one)
    for name in policies:
        if name == "fixed_peak":
            _try_fixed(scenario, try_one)
        elif name == "manta":
            try_one(name, {}, scenario.manta, found.num_initial)
        elif name != "oracle":  # which was tried first
            for sweep in sweeps(name):
                _try_sweep(sweep, name, try_one, found.num_initial, slo.target)
    return found


def is_better(new: ScalingFigures, before: ScalingFigures, target: float) -> bool:
    """By the rule of this file's beginning."""
    holds, held = new.slo_attainment >= target, before.slo_attainment >= target
    if holds and held:
        return new.gpu_hours < before.gpu_hours
    return holds or (not held and new.slo_attainment > before.slo_attainment)


def sweeps(name: str) -> list[list[tuple[dict[str, float], ScalingPolicy]]]:
    """The parameters that a policy is tried with, each list by rising targets."""
    if name == "serve_stock":
        return [
            [
                (
                    {"ongoing": target, "up_s": up_s, "down_s": down_s},
                    ServeStock(target, upscale_delay_s=up_s, downscale_delay_s=down_s),
                )
                for target in ONGOING_TARGETS
            ]
            for up_s, down_s in STOCK_DELAYS_S
        ]
    assert name == "queue_depth", name
    return [
        [({"waiting": number}, QueueDepth(number)) for number in WAITING_TARGETS],
        [({"ongoing": number}, QueueDepth(number, counts_running=True)) for number in ONGOING_TARGETS],
    ]


_Try = Callable[[str, Mapping[str, Any], ScalingPolicy, Mapping[str, int]], Tried]


def _try_oracle(scenario: Scenario, try_one: _Try) -> dict[str, int]:
    """The least replicas over the work's that hold the objective. Returns how many its best begins with."""
    target, low, high = scenario.settings.slo.target, LEAST_EASE, MOST_EASE
    plans, initial = scenario.plans(), {}

    def holds(ease: float) -> bool:
        policy = _oracle(scenario, plans, ease)
        begins = {pool.name: _bounded(pool, policy.plan[pool.name][1][0]) for pool in scenario.pools}
        tried = try_one("oracle", {"ease": round(ease, 3)}, policy, begins)
        is_held = tried.figures.slo_attainment >= target
        if is_held or not initial:
            initial.update(begins)
        return is_held

    for _ in range(EASE_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return initial


def _oracle(scenario: Scenario, plans: Mapping[str, OraclePlan], ease: float) -> Oracle:
    settings = scenario.settings
    plan = {}
    for pool in scenario.pools:
        cold_s = pool.cold_start.total_s * (1.0 + pool.cold_start.spread) + settings.delay_s + settings.period_s
        plan[pool.name] = plans[pool.name].counts(ease, ahead_s=cold_s, keep_s=pool.cold_start.total_s)
    return Oracle(plan)


def _try_sweep(
    sweep: Sequence[tuple[Mapping[str, float], ScalingPolicy]],
    name: str,
    try_one: _Try,
    initial: Mapping[str, int],
    target: float,
) -> None:
    """The highest target a replica that holds the objective costs least, so halve what lies between; where the lowest
    does not hold it, every second is tried."""

    def holds(index: int) -> bool:
        parameters, policy = sweep[index]
        return try_one(name, parameters, policy, initial).figures.slo_attainment >= target

    low, high = 0, len(sweep)
    if not holds(0):
        for index in range(2, len(sweep), 2):
            holds(index)
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)


def _try_fixed(scenario: Scenario, try_one: _Try) -> None:
    """The smallest fleet that holds the objective; with several pools, in the proportion of their work."""
    plans = scenario.plans()
    work = {name: sum(plan.work_s) for name, plan in plans.items()}
    most_pool = max(work, key=lambda name: work[name])

    def targets(number: int) -> dict[str, int]:
        wanted = {name: -(-number * work[name] // work[most_pool]) for name in work}
        return {pool.name: _bounded(pool, int(wanted[pool.name])) for pool in scenario.pools}

    def holds(number: int) -> bool:
        fixed = targets(number)
        tried = try_one("fixed_peak", fixed, FixedPeak(fixed), fixed)
        return tried.figures.slo_attainment >= scenario.settings.slo.target

    most = max(pool.max_replicas for pool in scenario.pools)
    low, high = 0, 1
    while high < most and not holds(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)


def _bounded(pool: PoolKind, number: int) -> int:
    return min(max(number, pool.min_replicas), pool.max_replicas)
