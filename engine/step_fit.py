"""The few numbers that bring a roofline near measured steps, and how far predictions are off. Torch-free, pure.

Knows points (what a step computed, and its seconds), whoever measured them. A profile's surface is exact where it was
measured; these shares say what may be expected of a model, a split or a GPU of which there is no profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .step_profile import StepPoint
from .step_time import PEAKS, Shares, StepShape, StepTimeModel

MOST_SWEEPS = 2000
ENOUGH = 1e-7
"""No factor changes by a larger part of itself in a sweep: it is solved."""
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class ErrorTable:
    """How far a model is off, percent of the measured seconds; one row a point."""

    rows: tuple[ErrorRow, ...]

    @property
    def median_percent(self) -> float:
        ordered = sorted(row.error_percent for row in self.rows)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    @property
    def max_percent(self) -> float:
        return max(row.error_percent for row in self.rows)


@dataclass(frozen=True)
class ErrorRow:
    """One point."""

    point: StepPoint
    predicted_s: float

    @property
    def error_percent(self) -> float:
        return 100.0 * abs(self.predicted_s / self.point.seconds - 1.0)


def errors(predict: Callable[[StepShape], float], points: Sequence[StepPoint]) -> ErrorTable:
    """Of a model's `predict` at some points, at least one."""
    assert points, "an error needs a point"
    return ErrorTable(tuple(ErrorRow(point, predict(StepShape.of_point(point))) for point in points))


def fit_shares(model: StepTimeModel, points: Sequence[StepPoint]) -> Shares:
    """Shares of the peaks for which the roofline of `model` (one without profile, at its peaks) is nearest.

    Least squares of relative errors with no term below its floor, along one term after the other. What the points say
    nothing of (prompts' attention, say) keeps the whole peak.
    """
    terms = [model.terms(StepShape.of_point(point)) for point in points]
    matrices = [one.weights_s + one.compute_s + one.head_s for one in terms]
    columns = [[1.0] * len(points), matrices, [one.attention_s for one in terms], [one.context_s for one in terms]]
    others = [one.communication_s for one in terms]
    seconds = [point.seconds for point in points]
    factors, least = [terms[0].overhead_s, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]
    for _ in range(MOST_SWEEPS):
        before = list(factors)
        for index, column in enumerate(columns):
            weight = sum((value / target) ** 2 for value, target in zip(column, seconds, strict=True))
            if weight <= 0.0:
                continue
            left = 0.0
            for row, (target, value) in enumerate(zip(seconds, column, strict=True)):
                said = others[row] + sum(
                    factor * one[row]
                    for place, (factor, one) in enumerate(zip(factors, columns, strict=True))
                    if place != index
                )
                left += (target - said) / target * value / target
            factors[index] = min(max(left / weight, least[index]), 1 / LEAST_SHARE if index else float("inf"))
        if all(abs(one - other) <= ENOUGH * other for one, other in zip(factors, before, strict=True)):
            break
    overhead_s, matrices_factor, attention_factor, context_factor = factors
    return Shares(1 / matrices_factor, 1 / attention_factor, 1 / context_factor, overhead_s)


def held_out_errors(
    model_with: Callable[[Shares], StepTimeModel], points: Sequence[StepPoint], *, folds: int
) -> ErrorTable:
    """Each point predicted by shares that were fitted to the points of the other folds."""
    rows: list[ErrorRow] = []
    for fold in range(folds):
        fitted = [point for index, point in enumerate(points) if index % folds != fold]
        judged = [point for index, point in enumerate(points) if index % folds == fold]
        if judged:
            rows += errors(model_with(fit_shares(model_with(PEAKS), fitted)).predict, judged).rows
    return ErrorTable(tuple(rows))
