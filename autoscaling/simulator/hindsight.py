"""How far ahead a fleet's size must be known to attain so much in so few GPU hours. No policy; knows no files.

Time is cut into windows. In each the fleet has the size that is best for it, known before the window begins; starts and
stops cost nothing. Who is late in a window is who was late in it with a fixed fleet of that size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .compare import Scenario
from .figures import is_good
from .policies import FixedPeak

WINDOWS_S = (120.0, 300.0, 600.0, 1200.0)
"""Beside the whole time: one fixed fleet."""


@dataclass(frozen=True)
class Held:
    """What a choice of sizes comes to."""

    gpu_hours: float
    slo_attainment: float


@dataclass(frozen=True)
class KnownAhead:
    """Where sizes are known for windows of `window_s`."""

    window_s: float
    cheapest: Held | None
    """The fewest hours with at least the attainment that was asked for; None: never."""
    best: Held | None
    """The highest attainment with at most the hours that were asked for; None: never."""


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
    scenario: Scenario, *, least_attainment: float, most_gpu_hours: float, windows_s: Sequence[float] = WINDOWS_S
) -> list[KnownAhead]:
    """For each window and for one size all the time: what so much attainment costs, what so many hours attain."""
    late, num = late_arrivals(scenario), len(scenario.requests)
    end_s, gpus = scenario.requests[-1].arrival_s, scenario.pools[0].gpus_per_replica
    found = []
    for window_s in (*(one for one in windows_s if one < end_s), end_s):
        held = [
            Held(held_s * gpus / 3600, 1 - num_late / num)
            for held_s, num_late in choices(late, window_s=window_s, end_s=end_s)
        ]
        cheapest = next((one for one in held if one.slo_attainment >= least_attainment), None)
        best = next((one for one in reversed(held) if one.gpu_hours <= most_gpu_hours), None)
        found.append(KnownAhead(window_s, cheapest, best))
    return found
