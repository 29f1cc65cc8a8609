"""What quick replicas of one kind share: sizes and step times in a few numbers; and their steps. Knows no jobs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from manta.engine.step_budget import StepBudget
from manta.engine.step_costs import StepCosts
from manta.engine.step_time import StepShape

from .replica import ReplicaSpec

if TYPE_CHECKING:
    from .quick import Job

CONTEXT_RASTER = 1 << 15
"""Tokens of context over which a step's time is taken as linear."""


class DecodeTimes:
    """Seconds of steps of decodes alone, from few calls of a model. Replicas of one kind share it."""

    def __init__(self, predict: Callable[[StepShape], float]) -> None:
        self._predict = predict
        self._pieces: dict[tuple[int, int], tuple[float, float]] = {}

    def piece(self, num_seqs: int, num_context_tokens: int) -> tuple[float, float]:
        """(base, slope): such a step takes base + slope * its context tokens, near these many of them."""
        key = num_seqs, num_context_tokens // CONTEXT_RASTER
        piece = self._pieces.get(key)
        if piece is None:
            low = key[1] * CONTEXT_RASTER
            low_s = self._predict(StepShape(0, num_seqs, max(low, num_seqs)))
            slope = (self._predict(StepShape(0, num_seqs, low + CONTEXT_RASTER)) - low_s) / (
                low + CONTEXT_RASTER - max(low, num_seqs)
            )
            piece = self._pieces[key] = low_s - slope * max(low, num_seqs), slope
        return piece


class QuickKind:
    """What replicas of one kind share: sizes, step times, budget."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.decode_times = DecodeTimes(spec.predict)
        self.costs = StepCosts.of(spec.predict)
        self.room = spec.num_blocks * spec.block_size
        """KV tokens."""
        self.budget = None
        if spec.tpot_target_s is not None:
            self.budget = StepBudget(spec.predict, target_s=spec.tpot_target_s, max_tokens=spec.max_num_batched_tokens)


class QuickStep:
    """One step, or some that are alike: decodes of the same sequences."""

    __slots__ = ("base", "begins_s", "computed", "context", "ends_s", "first", "last", "num_seqs", "prefill", "slope")

    def __init__(self, first: int, num_seqs: int, context: int) -> None:
        self.first = self.last = first
        self.num_seqs, self.context = num_seqs, context
        """Of the first one's decodes."""
        self.prefill = 0
        self.computed: list[Job] | None = None
        """Jobs whose prompts it completes."""
        self.base = self.slope = self.begins_s = self.ends_s = 0.0


def seconds_of_steps(step: QuickStep, num_steps: int) -> float:
    """Of so many steps like this, each with one more token of context for each sequence."""
    return num_steps * step.base + step.slope * step.num_seqs * num_steps * (num_steps - 1) / 2


def num_steps_in(step: QuickStep, seconds: float) -> int:
    """How many of them have ended after so long."""
    half = step.slope * step.num_seqs / 2
    linear = step.base - half
    if half <= 0.0:
        count = int(seconds / linear)
    else:
        count = int((math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))
    while count > 0 and seconds_of_steps(step, count) > seconds:
        count -= 1
    while seconds_of_steps(step, count + 1) <= seconds:
        count += 1
    return count
