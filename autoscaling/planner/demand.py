"""The requests that a placement is judged with: arrivals and lengths, drawn or recorded, and their moments. Pure.

Knows no trace file: who reads one passes its rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from manta.engine.errors import ConfigError

from .problem import Lengths, Workload


class Asked(NamedTuple):
    """One request. Lengths in tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Demand:
    """Requests in the order of arrival, and their rate. No two share a prefix."""

    rate: float
    """Requests a second."""
    requests: tuple[Asked, ...]

    @classmethod
    def drawn(cls, workload: Workload, count: int, rng: random.Random) -> Demand:
        """Poisson arrivals with lognormal lengths."""
        assert workload.rate is not None
        assert workload.prompt is not None
        assert workload.output is not None
        now_s, requests = 0.0, []
        for _ in range(count):
            now_s += rng.expovariate(workload.rate)
            requests.append(Asked(now_s, _draw(workload.prompt, rng), _draw(workload.output, rng)))
        return cls(workload.rate, tuple(requests))

    @classmethod
    def recorded(cls, rows: Iterable[tuple[float, int, int]], rate: float | None) -> Demand:
        """A trace's (arrival_s, prompt, output), its arrivals stretched or squeezed to `rate`. Raises ConfigError."""
        asked = [Asked(*row) for row in rows if row[1] >= 1 and row[2] >= 1]
        if len(asked) < 2 or asked[-1].arrival_s <= asked[0].arrival_s:
            raise ConfigError("the trace has fewer than two requests at different times: nothing follows from it")
        first_s = asked[0].arrival_s
        own = (len(asked) - 1) / (asked[-1].arrival_s - first_s)
        scale = own / (rate or own)
        return cls(rate or own, tuple(Asked((one.arrival_s - first_s) * scale, one[1], one[2]) for one in asked))

    def at(self, rate: float) -> Demand:
        """The same requests at another rate."""
        scale = self.rate / rate
        return Demand(rate, tuple(Asked(one[0] * scale, one[1], one[2]) for one in self.requests))

    @cached_property
    def num_prompt_tokens(self) -> float:
        """Of a mean request."""
        return _mean([one.num_prompt_tokens for one in self.requests])

    @cached_property
    def num_output_tokens(self) -> float:
        """Of a mean request."""
        return _mean([one.num_output_tokens for one in self.requests])

    @cached_property
    def num_pairs(self) -> float:
        """Query-key pairs of a mean prompt."""
        return _mean([one.num_prompt_tokens * (one.num_prompt_tokens + 1) / 2 for one in self.requests])

    @cached_property
    def num_context_tokens(self) -> float:
        """KV tokens that are read in a mean decode step of a sequence: long answers count for more steps."""
        read = sum(n * (p + n / 2) for _, p, n in self.requests)
        return read / sum(n for _, _, n in self.requests)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        return max(one.num_prompt_tokens + one.num_output_tokens for one in self.requests)


def _draw(lengths: Lengths, rng: random.Random) -> int:
    value = round(rng.lognormvariate(math.log(lengths.median), lengths.sigma)) if lengths.sigma else lengths.median
    return int(min(lengths.high, max(lengths.low, value)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
