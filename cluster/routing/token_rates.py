"""How many tokens a tenant may send a second, and each edge's share of that. Pure; the clock is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping

DEMAND_MEMORY_S = 10.0
"""How long demand is remembered: after so long, a token counts 1/e."""
FLOOR_SHARE = 0.1
"""Of a limit, what is divided evenly, so that an edge that had no demand can take some at once."""


class TokenBucket:
    """`rate` tokens flow in each second, at most `burst` are kept. What takes more than `burst` waits for a full bucket
    and leaves a debt."""

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at_s = now_s

    def resize(self, rate: float, burst: float, now_s: float) -> None:
        """Other sizes from now on; the level keeps its part of the burst."""
        level = self.level(now_s)
        self._level = level * burst / self._burst if level > 0 else level
        self._rate, self._burst = rate, burst

    def level(self, now_s: float) -> float:
        """Tokens that are there; below 0 while there is a debt."""
        if now_s > self._at_s:
            self._level = min(self._burst, self._level + (now_s - self._at_s) * self._rate)
            self._at_s = now_s
        return self._level

    def wait_s(self, num_tokens: float, now_s: float) -> float:
        """Seconds until so many may be taken; 0: now."""
        missing = min(num_tokens, self._burst) - self.level(now_s)
        return missing / self._rate if missing > 0 else 0.0

    def take(self, num_tokens: float, now_s: float) -> None:
        """Take them, whether or not they are there; a negative number gives back."""
        self._level = min(self._burst, self.level(now_s) - num_tokens)


class DemandMeter:
    """Tokens a second that were asked for lately, granted or not."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s = -math.inf

    def add(self, num_tokens: float, now_s: float) -> None:
        self._tokens = self._decayed(now_s) + num_tokens
        self._at_s = max(now_s, self._at_s)

    def tokens_per_s(self, now_s: float) -> float:
        return self._decayed(now_s) / DEMAND_MEMORY_S

    def _decayed(self, now_s: float) -> float:
        age_s = max(0.0, now_s - self._at_s)
        return self._tokens * math.exp(-age_s / DEMAND_MEMORY_S) if self._tokens else 0.0


def divide(demands: Mapping[str, float]) -> dict[str, float]:
    """Each edge's share of a tenant's limit, from what each was asked for (tokens a second). They add up to 1.

    The same for every edge that knows the same demands. A part is divided evenly, the rest in proportion.
    """
    if not demands:
        return {}
    total = sum(demands.values())
    even = 1.0 / len(demands)
    if total <= 0:
        return dict.fromkeys(demands, even)
    return {edge: FLOOR_SHARE * even + (1.0 - FLOOR_SHARE) * demand / total for edge, demand in demands.items()}
