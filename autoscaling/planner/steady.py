"""A replica in steady state: how long its steps are, how busy it is, and the most requests it can take. Pure.

Mean values only (Little's law): at r requests a second and steps of T seconds, r T prompts and as many times the
answers' tokens are in a step, which takes what the step-time model says; T solves that. Knows no queue, no request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manta.cluster.routing.roles import Role
from manta.engine.step_time import StepShape, StepTimeModel

from .demand import Demand

KV_SHARE = 0.95
"""Of the KV room that may be in use on average: the rest is for longer requests than the mean."""
LONGEST_STEP_S = 1e3


@dataclass(frozen=True)
class Sizes:
    """Limits of one replica."""

    kv_room_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Steady:
    """One replica at a rate below what it sustains. Seconds, and counts in a mean step."""

    step_s: float
    num_seqs: float
    """That decode."""
    num_kv_tokens: float
    utilization: float
    """Share of the highest rate that it sustains."""
    max_rate: float
    """Requests a second, of one replica."""
    bound: str
    """What that highest rate is bound by: compute, bandwidth, communication, kv_memory or sequences."""
    shares: dict[str, float]
    """Of a mean step's time, by what it goes into."""


def steady(model: StepTimeModel, demand: Demand, role: Role, sizes: Sizes, rate: float) -> Steady | None:
    """At `rate` requests/s of one replica; None when it cannot keep up."""
    load = _Load(model, demand, role, sizes)
    max_rate, bound = load.max_rate()
    if rate >= max_rate:
        return None
    low, high = 0.0, load.longest_step_s(rate)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if load.step_s(rate, middle) <= middle else (middle, high)
    num_seqs = load.num_seqs(rate, high)
    return Steady(
        high, num_seqs, num_seqs * demand.num_context_tokens, rate / max_rate, max_rate, bound, load.shares(rate, high)
    )


def max_rate(model: StepTimeModel, demand: Demand, role: Role, sizes: Sizes) -> float:
    """Requests a second that one replica sustains."""
    return _Load(model, demand, role, sizes).max_rate()[0]


class _Load:
    def __init__(self, model: StepTimeModel, demand: Demand, role: Role, sizes: Sizes) -> None:
        self._model, self._demand, self._sizes = model, demand, sizes
        self._prompt = 0.0 if role is Role.DECODE else demand.num_prompt_tokens
        self._pairs = 0.0 if role is Role.DECODE else demand.num_pairs
        self._output = 0.0 if role is Role.PREFILL else demand.num_output_tokens

    def num_seqs(self, rate: float, step_s: float) -> float:
        return rate * self._output * step_s

    def step_s(self, rate: float, step_s: float) -> float:
        """Of a step with what comes in `step_s`."""
        return self._model.predict_full(self._shape(rate, step_s))

    def longest_step_s(self, rate: float) -> float:
        """A step may take so long before KV, sequences or tokens are too many; what comes first."""
        return min(self._limits(rate).values())

    def max_rate(self) -> tuple[float, str]:
        """The highest rate for which a step of some length takes what comes while it runs. Step times are convex in
        what a step holds, so that the longest one that is allowed decides."""
        low, high = 0.0, 1.0
        while self._is_sustained(high) and high < 1e9:
            low, high = high, 2 * high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._is_sustained(middle) else (low, middle)
        limits = self._limits(low)
        longest_s = min(limits.values())
        shares = self.shares(low, longest_s)
        resource = max(("compute", "bandwidth", "communication"), key=lambda name: shares.get(name, 0.0))
        # Were the room twice as large, would more fit in? Then room is what is missing.
        first = min(limits, key=lambda name: limits[name])
        if first in ("kv_memory", "sequences") and self.step_s(low, 2 * longest_s) < 0.97 * 2 * longest_s:
            return low, first
        return low, resource

    def shares(self, rate: float, step_s: float) -> dict[str, float]:
        """Parts of a step's time; those of measured profiles follow the roofline's."""
        terms = self._model.terms(self._shape(rate, step_s))
        total = terms.total_s or 1.0
        return {
            "compute": (terms.compute_s + terms.attention_s) / total,
            "bandwidth": (terms.weights_s + terms.head_s + terms.context_s) / total,
            "communication": terms.communication_s / total,
            "overhead": terms.overhead_s / total,
        }

    def _is_sustained(self, rate: float) -> bool:
        longest_s = self.longest_step_s(rate)
        return self.step_s(rate, longest_s) <= longest_s

    def _limits(self, rate: float) -> dict[str, float]:
        sizes, demand = self._sizes, self._demand
        tokens = sizes.max_num_batched_tokens / (rate * (self._prompt + self._output))
        if not self._output:
            return {"tokens": min(tokens, LONGEST_STEP_S)}
        each = rate * self._output
        return {
            "tokens": min(tokens, LONGEST_STEP_S),
            "kv_memory": KV_SHARE * sizes.kv_room_tokens / (each * demand.num_context_tokens),
            "sequences": sizes.max_num_seqs / each,
        }

    def _shape(self, rate: float, step_s: float) -> StepShape:
        num_requests = rate * step_s
        num_seqs = self.num_seqs(rate, step_s)
        return StepShape(
            math.ceil(num_requests * self._prompt),
            math.ceil(num_seqs),
            math.ceil(num_seqs * self._demand.num_context_tokens),
            math.ceil(num_requests * self._pairs),
        )
