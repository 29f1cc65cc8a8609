"""How many replicas to hold for bursts that come back and are over before a replica could start. Pure; no clock.

Whoever follows such bursts is late for each. So it is reckoned along what fleets of each size, held all the time, would
have made of what came; that one is held which would have kept the objective. The worst burst of each is left out: one
says nothing of a second, and how often the highest comes is not known from having come once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .error_budget import MEMORY_S
from .policy_settings import PolicySettings
from .slo import Slo

LEAST_LATE = 0.5
"""Fewer requests than that, faded, are none."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Of one pool; a value. Requests, sums faded. Tuples are by fleet, the smallest of one replica; those that are not
    there made nobody late."""

    waiting: tuple[float, ...] = ()
    """That would wait now."""
    late: tuple[float, ...] = ()
    burst: tuple[float, ...] = ()
    """Late ones since requests last did not wait."""
    worst: tuple[float, ...] = ()
    """Late ones of the worst burst."""
    num_arrived: float = 0.0
    counted: int = 0
    """Arrivals, of all times."""
    asked: tuple[tuple[float, int], ...] = ()
    """When how many replicas were asked for by following the load."""
    at_s: float | None = None

    def learn(
        self, counted: int, followed: int, now_s: float, *,
        rate_each: float, most: int, is_burst: bool, cold_start_s: float, settings: PolicySettings,
    ) -> Floor:  # fmt: skip
        """After one more look: so many requests have come in all, a replica holds `rate_each` of them a second, and
        following the load asks for `followed` replicas, which come after a cold start and stay for the quiet window.
        Who is late without a burst is not late for want of a floor. Fleets of up to `most` replicas are reckoned."""
        asked = (*(one for one in self.asked if one[0] > now_s - cold_start_s - settings.quiet_s), (now_s, followed))
        if self.at_s is None:
            return replace(self, counted=counted, asked=asked, at_s=now_s)
        passed_s, new = now_s - self.at_s, counted - self.counted
        there = max((num for time_s, num in asked if time_s <= now_s - cold_start_s), default=asked[0][1])
        kept, patience_s = math.exp(-passed_s / MEMORY_S), settings.slo.ttft_s or math.inf
        waiting, late, burst, worst = [], [], [], []
        for index in range(most):
            rate = max(index + 1, there) * rate_each
            wait = max(_at(self.waiting, index) + new - rate * passed_s, 0.0)
            new_late = min(max(wait - rate * patience_s, 0.0), new) if is_burst else 0.0
            all_late = kept * _at(self.late, index) + new_late
            if not wait and all_late < LEAST_LATE:
                break  # nor has any larger one made somebody late
            waiting.append(wait)
            late.append(all_late)
            burst.append(kept * _at(self.burst, index) + new_late if wait else 0.0)
            worst.append(max(kept * _at(self.worst, index), burst[-1]))
        return Floor(
            waiting=tuple(waiting), late=tuple(late), burst=tuple(burst), worst=tuple(worst),
            num_arrived=kept * self.num_arrived + new, counted=counted, asked=asked, at_s=now_s,
        )  # fmt: skip

    def num_replicas(self, slo: Slo) -> int:
        """To be held; 0: none beside those that follow the load."""
        num_allowed = (1 - slo.target) * self.num_arrived
        too_small = (num for num in range(len(self.late), 0, -1) if self.num_late(num) > num_allowed)
        return next(too_small, -1) + 1

    def num_late(self, num_replicas: int) -> float:
        """Requests that so many replicas would have made late, without those of the worst burst."""
        return _at(self.late, num_replicas - 1) - _at(self.worst, num_replicas - 1)


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if index < len(values) else 0.0
