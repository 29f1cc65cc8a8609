"""Arrivals and lengths that are made up: steady, bursty, diurnal, a spike, rates of a table; traces at other rates.

Knows no files and no fleet; every draw comes from the generator that is passed in.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from manta.engine.errors import ConfigError

from .workload import SimRequest, shared_hash


class Lengths(NamedTuple):
    """Of one request, tokens."""

    prompt: int
    output: int


class Rates(Protocol):
    """Requests a second at each moment."""

    @property
    def most(self) -> float:
        """No moment has more."""
        ...

    def at(self, time_s: float) -> float:
        """At this moment."""
        ...


@dataclass(frozen=True)
class Steady:
    """The same all the time."""

    rate: float

    @property
    def most(self) -> float:
        return self.rate

    def at(self, time_s: float) -> float:
        return self.rate


@dataclass(frozen=True)
class Spike:
    """`factor` times the usual rate from `begins_s` on, for `lasts_s`."""

    rate: float
    factor: float = 50.0
    begins_s: float = 300.0
    lasts_s: float = 120.0

    @property
    def most(self) -> float:
        return self.rate * max(self.factor, 1.0)

    def at(self, time_s: float) -> float:
        return self.rate * (self.factor if 0 <= time_s - self.begins_s < self.lasts_s else 1.0)


@dataclass(frozen=True)
class Diurnal:
    """Days of `day_s` seconds: a sine between `low` and `high` that begins at its least."""

    low: float
    high: float
    day_s: float = 86_400.0

    @property
    def most(self) -> float:
        return self.high

    def at(self, time_s: float) -> float:
        return self.low + (self.high - self.low) * (1.0 - math.cos(2.0 * math.pi * time_s / self.day_s)) / 2.0


@dataclass(frozen=True)
class Table:
    """Rates of a table: that of the last time which is not later."""

    times_s: tuple[float, ...]
    rates: tuple[float, ...]

    @property
    def most(self) -> float:
        return max(self.rates)

    @property
    def mean(self) -> float:
        """Of its windows, which are taken as equally long."""
        return sum(self.rates) / len(self.rates)

    def at(self, time_s: float) -> float:
        return self.rates[max(bisect.bisect_right(self.times_s, time_s) - 1, 0)]

    def scaled(self, *, mean: float, faster: float) -> Table:
        """The same shape with another mean rate, `faster` times as fast."""
        factor = mean / self.mean
        return Table(tuple(time_s / faster for time_s in self.times_s), tuple(rate * factor for rate in self.rates))

    @classmethod
    def bursty(
        cls,
        rate: float,
        *,
        duration_s: float,
        burst_factor: float,
        burst_s: float,
        calm_s: float,
        rng: random.Random,
    ) -> Table:
        """Calm and burst by turns, each exponentially long (a Poisson process modulated by two states); `rate` is
        the mean over both, and a burst has `burst_factor` times the rate of calm."""
        calm = rate * (burst_s + calm_s) / (calm_s + burst_factor * burst_s)
        times_s, rates, now_s, is_burst = [0.0], [calm], 0.0, False
        while now_s < duration_s:
            now_s += rng.expovariate(1.0 / (burst_s if is_burst else calm_s))
            is_burst = not is_burst
            times_s.append(now_s)
            rates.append(calm * burst_factor if is_burst else calm)
        return cls(tuple(times_s), tuple(rates))


def arrivals(rates: Rates, *, duration_s: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process with these rates, by thinning (Lewis and Shedler 1979)."""
    now_s, most = 0.0, rates.most
    if most <= 0:
        return
    while True:
        now_s += rng.expovariate(most)
        if now_s >= duration_s:
            return
        if rng.random() * most < rates.at(now_s):
            yield now_s


def lognormal(median: float, sigma: float, *, low: int, high: int) -> Callable[[random.Random], int]:
    """Draws whole numbers, clipped to low..high."""
    mu = math.log(median)
    return lambda rng: min(max(round(rng.lognormvariate(mu, sigma)), low), high)


def made_requests(
    times_s: Iterator[float], lengths: Callable[[random.Random], Lengths], *, rng: random.Random
) -> list[SimRequest]:
    """One request at each time. Raises ConfigError when there is none."""
    requests = []
    for index, time_s in enumerate(times_s):
        drawn = lengths(rng)
        requests.append(SimRequest(str(index), time_s, drawn.prompt, drawn.output))
    if not requests:
        raise ConfigError("the workload has no requests: raise its rate or its duration")
    return requests


def superposed(
    requests: Sequence[SimRequest], factor: float, *, shift_s: float, rng: random.Random
) -> list[SimRequest]:
    """A trace at `factor` times its rate: each request so many times, copies up to `shift_s` earlier or later.

    Unlike squeezing its time, that keeps how fast the load changes. Below 1, requests are drawn. Copies share prefixes
    among themselves as their originals do, and none with the originals.
    """
    if factor == 1.0:
        return list(requests)
    found: list[SimRequest] = []
    whole = int(factor)
    for request in requests:
        for copy in range(whole + (rng.random() < factor - whole)):
            if not copy:
                found.append(request)
                continue
            moved_s = max(request.arrival_s + rng.uniform(-shift_s, shift_s), 0.0)
            found.append(
                replace(
                    request,
                    request_id=f"{request.request_id}.{copy}",
                    arrival_s=moved_s,
                    block_hashes=tuple(_of_copy(block_hash, copy) for block_hash in request.block_hashes),
                )
            )
    found.sort(key=lambda request: request.arrival_s)
    return found


def _of_copy(block_hash: bytes, copy: int) -> bytes:
    return shared_hash((int.from_bytes(block_hash, "big") >> 1) + (copy << 80))
