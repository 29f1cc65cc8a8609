"""Arrivals a second, now and when a replica that starts now is ready: level, trend, bursts. Pure; knows no clock."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

SHORT_S, MIDDLE_S, LONG_S = 5.0, 30.0, 120.0
"""Windows: for a burst, for the level, for the trend."""
SAMPLE_S = 1.0
BURST_SIGMAS = 5.0
"""So many standard deviations of a Poisson process above the level is no accident."""
TREND_SIGMAS = 2.0
MOST_GROWTH = 2.0
"""A trend is believed up to so many times the level."""


@dataclass(frozen=True)
class Samples:
    """How many had arrived by when; oldest first, at most LONG_S of them."""

    times_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def add(self, time_s: float, count: int) -> Samples:
        """With one more, unless the last is less than SAMPLE_S old."""
        if self.times_s and time_s - self.times_s[-1] < SAMPLE_S - 1e-9:
            return self
        first = max(bisect_right(self.times_s, time_s - LONG_S) - 1, 0)
        return Samples((*self.times_s[first:], time_s), (*self.counts[first:], count))

    def rate(self, window_s: float) -> float | None:
        """Arrivals a second over the last `window_s`, or what is known of it; None before two samples."""
        if len(self.times_s) < 2:
            return None
        end = self.times_s[-1]
        index = max(min(bisect_right(self.times_s, end - window_s + 1e-9) - 1, len(self.times_s) - 2), 0)
        return (self.counts[-1] - self.counts[index]) / (end - self.times_s[index])


@dataclass(frozen=True)
class Forecast:
    """Requests a second."""

    level: float = 0.0
    """Lately."""
    expected: float = 0.0
    """When a replica that starts now is ready, never below what comes now."""
    is_burst: bool = False


def forecast(samples: Samples, *, horizon_s: float) -> Forecast:
    """What is to be expected in `horizon_s`."""
    level, short = samples.rate(MIDDLE_S), samples.rate(SHORT_S)
    if level is None or short is None:
        return Forecast()
    before = _rate_before(samples)
    num_expected = before * SHORT_S
    # The level before is itself known from so many arrivals only.
    sigma = math.sqrt(num_expected * (1 + SHORT_S / MIDDLE_S) + 1)
    is_burst = short * SHORT_S > num_expected + BURST_SIGMAS * sigma + 1
    expected = max(level, level + _trend(samples) * (horizon_s + MIDDLE_S / 2))
    expected = min(expected, MOST_GROWTH * level)
    if is_burst:
        expected = max(expected, short)
    return Forecast(level, expected, is_burst)


def _rate_before(samples: Samples) -> float:
    """Over the window before the shortest."""
    times_s, counts, end = samples.times_s, samples.counts, samples.times_s[-1]
    last = bisect_right(times_s, end - SHORT_S + 1e-9) - 1
    first = bisect_left(times_s, end - SHORT_S - MIDDLE_S - 1e-9)
    if last < 1:
        return samples.rate(SHORT_S) or 0.0
    if first >= last:
        return samples.rate(MIDDLE_S) or 0.0
    return (counts[last] - counts[first]) / (times_s[last] - times_s[first])


def _trend(samples: Samples) -> float:
    """Requests a second that the rate gains each second; 0 where it may be chance, or is over by now: after a step up
    the halves of a long window differ for long, those of a short one do not."""
    span = samples.times_s[-1] - samples.times_s[0]
    if span < MIDDLE_S:
        return 0.0
    gain, sigma = _gain(samples, span)
    if gain <= TREND_SIGMAS * sigma:
        return 0.0
    lately, _ = _gain(samples, MIDDLE_S)
    return max(min(gain / (span / 2), lately / (MIDDLE_S / 2)), 0.0)


def _gain(samples: Samples, span_s: float) -> tuple[float, float]:
    """By how much the rate in the newer half of the last `span_s` is above that in the older, and the deviation that
    is to be expected of it."""
    end, counts = samples.times_s[-1], samples.counts
    first = bisect_left(samples.times_s, end - span_s - 1e-9)
    middle = bisect_left(samples.times_s, end - span_s / 2)
    older_s, newer_s = samples.times_s[middle] - samples.times_s[first], end - samples.times_s[middle]
    if older_s <= 0 or newer_s <= 0:
        return 0.0, 0.0
    older, newer = counts[middle] - counts[first], counts[-1] - counts[middle]
    return newer / newer_s - older / older_s, math.sqrt(newer / newer_s**2 + older / older_s**2)
