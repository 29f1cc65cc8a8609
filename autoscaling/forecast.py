"""Arrivals a second, now and when a replica that starts now is ready: level, trend, bursts. Pure; knows no clock."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

SHORT_S, MIDDLE_S, LONG_S = 5.0, 30.0, 120.0
"""Windows: for a burst, for the level of a rate that has just changed, for the trend and for a steady rate's level."""
LEAST_S = 15.0
"""Before so long is known nothing is said: a rate by a few seconds is a guess, and what waits asks for itself."""
SAMPLE_S = 1.0
BURST_SIGMAS = 5.0
"""So many standard deviations of a Poisson process above the level is no accident."""
CHANGE_SIGMAS = 3.0
"""Two halves of a window that differ by so many standard deviations do not have the same rate."""
CHANCE_SIGMAS = 2.0
"""So many of what a rate gains may be chance: only the rest is taken for a trend."""
LEARNED = 0.1
"""Weight of each second of a burst in what is known of how long they last."""
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
    """Since it last changed, as far as can be told."""
    expected: float = 0.0
    """When a replica that starts now is ready, never below what comes now."""
    recent: float = 0.0
    """Over the last half minute."""
    before: float = 0.0
    """Before the last seconds."""
    burst: float = 0.0
    """So much more came in the last seconds, where that is no accident; 0: it may be."""

    @property
    def is_burst(self) -> bool:
        return self.burst > 0


@dataclass(frozen=True)
class Bursts:
    """Which share of a burst was still there when a replica that it asked for would have been ready. A value.

    A first burst is believed to last; those that were over sooner make the next ones count for less.
    """

    lasting: float = 1.0
    last_s: float = -math.inf
    """When the last one was seen."""
    claims: tuple[tuple[float, float, float], ...] = ()
    """Of the last seconds with bursts: when to look, the rate before, how much more came."""

    def learn(self, found: Forecast, now_s: float, *, horizon_s: float) -> Bursts:
        """After one more look."""
        lasting, claims = self.lasting, self.claims
        while claims and claims[0][0] <= now_s:
            _, before, burst = claims[0]
            kept = min(max(found.recent - before, 0.0) / burst, 1.0)
            lasting, claims = lasting + LEARNED * (kept - lasting), claims[1:]
        if found.is_burst:
            claims = (*claims, (now_s + horizon_s + MIDDLE_S, found.before, found.burst))
        return Bursts(lasting, now_s if found.is_burst else self.last_s, claims)

    def are_lately(self, now_s: float) -> bool:
        """Whether one was seen within the last half minute."""
        return now_s - self.last_s < MIDDLE_S


NO_BURSTS = Bursts()


def forecast(
    samples: Samples, bursts: Bursts = NO_BURSTS, *, horizon_s: float, patience_s: float = SHORT_S
) -> Forecast:
    """What is to be expected in `horizon_s`, by what was learned of bursts. Where requests may wait for `patience_s`,
    what is over sooner is worked off meanwhile, and no burst."""
    short_s = min(max(patience_s, SHORT_S), MIDDLE_S)
    recent, short = samples.rate(MIDDLE_S), samples.rate(short_s)
    if recent is None or short is None or samples.times_s[-1] - samples.times_s[0] < LEAST_S:
        return Forecast()
    window_s = _steady_s(samples)
    level = samples.rate(window_s) or 0.0
    before = _rate_before(samples, short_s)
    num_expected = before * short_s
    # The level before is itself known from so many arrivals only.
    sigma = math.sqrt(num_expected * (1 + short_s / MIDDLE_S) + 1)
    is_burst = short * short_s > num_expected + BURST_SIGMAS * sigma + 1
    # A rate that has jumped does not go on rising as fast: what it gained by that is no trend.
    trend = 0.0 if is_burst else _trend(samples, bursts.last_s)
    expected = level + trend * (horizon_s + window_s / 2)
    expected = min(expected, MOST_GROWTH * level)
    burst = short - before if is_burst else 0.0
    expected = max(expected, before + bursts.lasting * burst) if is_burst else expected
    return Forecast(level, expected, recent, before, burst)


def _steady_s(samples: Samples) -> float:
    """Over so long the rate has not changed, as far as can be told: chance counts the less the longer that is."""
    window_s, known_s = MIDDLE_S, samples.times_s[-1] - samples.times_s[0]
    while 2 * window_s <= min(LONG_S, known_s) + SAMPLE_S:
        gain, sigma = _gain(samples, 2 * window_s)
        if abs(gain) > CHANGE_SIGMAS * sigma:
            break
        window_s *= 2
    return window_s


def _rate_before(samples: Samples, short_s: float) -> float:
    """Over the window before the last `short_s`."""
    times_s, counts, end = samples.times_s, samples.counts, samples.times_s[-1]
    last = bisect_right(times_s, end - short_s + 1e-9) - 1
    first = bisect_left(times_s, end - short_s - MIDDLE_S - 1e-9)
    if last < 1:
        return samples.rate(short_s) or 0.0
    if first >= last:
        return samples.rate(MIDDLE_S) or 0.0
    return (counts[last] - counts[first]) / (times_s[last] - times_s[first])


def _trend(samples: Samples, jumped_s: float) -> float:
    """Requests a second that the rate gains each second since it last jumped; 0 where it may be chance, or is over by
    now: after a step up that was no burst the halves of a long window differ for long, those of a short one do not."""
    span = samples.times_s[-1] - max(samples.times_s[0], jumped_s)
    if span < MIDDLE_S:
        return 0.0
    gain, sigma = _gain(samples, span)
    lately, _ = _gain(samples, MIDDLE_S)
    return max(min((gain - CHANCE_SIGMAS * sigma) / (span / 2), lately / (MIDDLE_S / 2)), 0.0)


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
