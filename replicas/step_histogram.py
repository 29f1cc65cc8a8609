"""How long an engine's steps take, as counts in fixed buckets. Knows no clock, no channel and no metric's name.

A step's time is the distance between its end and the end of the step before, with everything that the loop does in
between: what a stream's client sees as the gap between two tokens, at best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

BOUNDS_S = tuple(round(0.001 * 2 ** (index / 8), 6) for index in range(81))
"""Upper bounds of the buckets: from 1 ms to 1 s, eight for each doubling. One more bucket holds what is longer."""


class StepHistogram(msgspec.Struct):
    """Counts of steps since the engine started. They only rise."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """One for each of BOUNDS_S, then that of longer steps."""
    sum_s: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.sum_s += seconds * times


def quantile(counts: Sequence[float], share: float) -> float | None:
    """The time in seconds below which this share of the steps lies, linear inside its bucket; None without steps.

    `counts` as in StepHistogram, or differences of two. Steps beyond the last bound count as that long.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    for index, count in enumerate(counts[:-1]):
        if count and wanted <= count:
            low_s = BOUNDS_S[index - 1] if index else 0.0
            return low_s + (BOUNDS_S[index] - low_s) * wanted / count
        wanted -= count
    return BOUNDS_S[-1]
