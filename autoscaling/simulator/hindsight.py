"""What must be known to attain so much in so few GPU hours. Three yardsticks; knows no files.

Sizes known ahead: time is cut into windows. In each the fleet has the size that is best for it, known before the window
begins; starts and stops cost nothing. Who is late in a window is who was late in it with a fixed fleet of that size.

Standing fleets: one size while there is work and for some time after, another one else. They know the past alone, but
all that they are told was found with the load known, and they begin with their size.

The present: replicas for the work that the oracle sees, when it comes and not before, and more of them while requests
wait. Nothing need be noticed, nothing is forecast; what is paid is the start. The rest was found with the load known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manta.autoscaling.policy import Decision
from manta.autoscaling.signals import FleetSnapshot

from .compare import Scenario
from .figures import is_good, scaling_figures
from .policies import FixedPeak

WINDOWS_S = (120.0, 300.0, 600.0, 1200.0)
"""Beside the whole time: one fixed fleet."""


IDLE_STARTS = (0.5, 1.0, 2.0, 4.0)
"""Cold starts that a standing fleet stays without work."""
NEAR, MOST_SIZE = 0.1, 1.5
"""Sizes of standing fleets that are tried: fixed ones of which lack no more attainment than that, and up to so many
times the first that lacks none."""
EASES, SURGES = (1.0, 1.3), (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Over the oracle's replicas: those that are tried for the present, and for what waits."""
KEPT_STARTS = (0.0, 1.0, 3.0)
"""Cold starts that a replica of the present stays after it was needed."""
WAITS = 10
"""Requests that wait at each ready replica, up to which nothing more is started for them."""


@dataclass(frozen=True)
class Standing:
    """A policy: `size` while there is work and until `idle_s` after, else `least`."""

    size: int
    least: int
    idle_s: float

    def initial(self) -> float:
        """When there was work last."""
        return 0.0

    def decide(self, state: float, snapshot: FleetSnapshot, now_s: float) -> tuple[float, Decision]:
        has_work = snapshot.num_held + sum(pool.num_running + pool.num_waiting for pool in snapshot.pools) > 0
        last_s = now_s if has_work else state
        target = self.size if now_s - last_s <= self.idle_s else self.least
        return last_s, Decision(targets={pool.name: target for pool in snapshot.pools})


@dataclass(frozen=True)
class Present:
    """A policy: of `counts`, from each of `times_s` on, the most of the last `keep_s`, and while requests wait `surge`
    times what is needed now."""

    times_s: Sequence[float]
    counts: Sequence[int]
    surge: float
    keep_s: float

    def initial(self) -> None:
        return None

    def decide(self, state: None, snapshot: FleetSnapshot, now_s: float) -> tuple[None, Decision]:
        last = bisect_right(self.times_s, now_s) - 1
        first = max(bisect_right(self.times_s, now_s - self.keep_s) - 1, 0)
        targets = {}
        for pool in snapshot.pools:
            target = max(self.counts[first : last + 1])
            if snapshot.num_held + pool.num_waiting > WAITS * pool.num_ready:
                target = max(target, math.ceil(self.surge * self.counts[last]))
            targets[pool.name] = min(max(target, pool.min_replicas), pool.max_replicas)
        return None, Decision(targets=targets)


@dataclass(frozen=True)
class Held:
    """What a choice of sizes comes to."""

    gpu_hours: float
    slo_attainment: float


@dataclass(frozen=True)
class Found:
    """None: never."""

    cheapest: Held | None
    """The fewest hours with at least the attainment that was asked for."""
    best: Held | None
    """The highest attainment with at most the hours that were asked for."""

    @classmethod
    def of(cls, held: Sequence[Held], *, least_attainment: float, most_gpu_hours: float) -> Found:
        enough = [one for one in held if one.slo_attainment >= least_attainment]
        affordable = [one for one in held if one.gpu_hours <= most_gpu_hours]
        return cls(
            min(enough, key=lambda one: one.gpu_hours, default=None),
            max(affordable, key=lambda one: one.slo_attainment, default=None),
        )


def late_arrivals(scenario: Scenario) -> dict[int, list[float]]:
    """By size of a fixed fleet, the smallest first: when those came that were late. Up to the first that holds all.
    Of one pool."""
    (pool,) = scenario.pools
    late: dict[int, list[float]] = {}
    for size in range(1, pool.max_replicas + 1):
        run = scenario.run(FixedPeak({pool.name: size}), {pool.name: size})
        late[size] = [one.request.arrival_s for one in run.served if not is_good(one, scenario.settings.slo)]
        if not late[size]:
            break
    return late


def choices(late: Mapping[int, Sequence[float]], *, window_s: float, end_s: float) -> list[tuple[float, int]]:
    """Seconds of replicas and requests that are late, for all choices of sizes than which none is better in both:
    the seconds rise, the late ones fall."""
    found = [(0.0, 0)]
    num_windows = math.ceil(end_s / window_s)
    num_late = {size: [0] * num_windows for size in late}
    for size, times_s in late.items():
        for time_s in times_s:
            num_late[size][min(int(time_s / window_s), num_windows - 1)] += 1
    for index in range(num_windows):
        lasts_s = min(window_s, end_s - index * window_s)
        sums = sorted((held_s + size * lasts_s, num + num_late[size][index]) for held_s, num in found for size in late)
        found = []
        for held_s, num in sums:
            if not found or num < found[-1][1]:
                found.append((held_s, num))
    return found


def known_ahead(
    scenario: Scenario, late: Mapping[int, Sequence[float]], *, windows_s: Sequence[float] = WINDOWS_S
) -> dict[float, list[Held]]:
    """What choices of sizes come to, by window; the last is the whole time. `late` is that of fixed fleets."""
    num, end_s, gpus = len(scenario.requests), scenario.requests[-1].arrival_s, scenario.pools[0].gpus_per_replica
    return {
        window_s: [
            Held(held_s * gpus / 3600, 1 - num_late / num)
            for held_s, num_late in choices(late, window_s=window_s, end_s=end_s)
        ]
        for window_s in (*(one for one in windows_s if one < end_s), end_s)
    }


def standing(scenario: Scenario, late: Mapping[int, Sequence[float]], *, least_attainment: float) -> list[Held]:
    """What standing fleets come to whose sizes are near the one that attains that much."""
    (pool,), num = scenario.pools, len(scenario.requests)
    attained = {size: 1 - len(times_s) / num for size, times_s in late.items()}
    enough = next((size for size, share in attained.items() if share >= least_attainment), max(attained))
    held = []
    for size, share in attained.items():
        if share < least_attainment - NEAR or size > MOST_SIZE * enough:
            continue
        for least in sorted({pool.min_replicas, size // 2}):
            for starts in IDLE_STARTS:
                policy = Standing(size, least, starts * pool.cold_start.total_s)
                figures = scaling_figures(scenario.run(policy, {pool.name: size}), scenario.settings.slo)
                held.append(Held(figures.gpu_hours, figures.slo_attainment))
    return held


def present(scenario: Scenario, *, ease: float, num_initial: Mapping[str, int]) -> dict[float, list[Held]]:
    """What fleets for the present come to that begin with `num_initial` replicas, by how long replicas stay; `ease` is
    the oracle's."""
    (pool,), found = scenario.pools, {}
    plan = scenario.plans()[pool.name]
    for starts in KEPT_STARTS:
        keep_s = starts * pool.cold_start.total_s
        held = found[keep_s] = []
        for factor in EASES:
            times_s, counts = plan.counts(factor * ease, ahead_s=0.0, keep_s=0.0)
            for surge in SURGES:
                run = scenario.run(Present(times_s, counts, surge, keep_s), num_initial)
                figures = scaling_figures(run, scenario.settings.slo)
                held.append(Held(figures.gpu_hours, figures.slo_attainment))
    return found
