"""A step's seconds in five numbers, small enough to travel, and how they are learned where nobody knows them. Pure.

Knows tokens, pairs and seconds; no model, no device and no requests. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from .step_time import StepShape

LARGE_STEP = 8192
"""Tokens of a step whose time the matrix units limit, on any hardware that has figures."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """step = overhead + max(weights, tokens * token) + pairs * pair + context * context_token, seconds.

    The roofline of step_time.py with the output head counted as overhead: the weights are read once or the matrix units
    are the limit; attention comes on top.
    """

    overhead_s: float
    """Of every step."""
    weights_s: float
    """Reading the weights: what the tokens of a small step take, however few they are."""
    token_s: float
    """A token's share of the matrix products, in steps large enough for that to be the limit."""
    pair_s: float
    """A query-key pair of a prefill's attention."""
    context_token_s: float
    """A KV-cache token that a decode reads."""

    def step_s(self, num_tokens: int, num_pairs: int = 0, num_context_tokens: int = 0) -> float:
        """Seconds of one step; 0 for an empty one. `num_tokens` counts those of prefills and one for each decode."""
        if num_tokens <= 0:
            return 0.0
        return (
            self.overhead_s
            + max(self.weights_s, num_tokens * self.token_s)
            + num_pairs * self.pair_s
            + num_context_tokens * self.context_token_s
        )

    def prefill_s(self, num_tokens: int, start: int, *, tokens_a_step: int) -> float:
        """Seconds of a prompt's `num_tokens` tokens behind `start` cached ones, alone, in chunks; 0 for none."""
        num_full, rest = divmod(num_tokens, tokens_a_step)
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_full * self.step_s(tokens_a_step) + self.step_s(rest) + num_pairs * self.pair_s

    @classmethod
    def of(cls, predict: Callable[[StepShape], float]) -> Self:
        """Fitted to a step-time model's `predict`: its large steps, its smallest, and what attention adds to them.

        Exact for the roofline, while few enough sequences decode that the output head is bound by bytes, too.
        """
        large_s = predict(StepShape(LARGE_STEP))
        token_s = max(0.0, (large_s - predict(StepShape(LARGE_STEP // 2))) / (LARGE_STEP // 2))
        least_s = predict(StepShape(num_decode_seqs=1))
        overhead_s = min(max(0.0, large_s - LARGE_STEP * token_s), least_s)
        num_pairs, num_context = LARGE_STEP * LARGE_STEP, 64 * LARGE_STEP
        with_pairs_s = predict(StepShape(LARGE_STEP, num_prefill_pairs=num_pairs))
        decodes_s = predict(StepShape(num_decode_seqs=64))
        with_context_s = predict(StepShape(num_decode_seqs=64, num_decode_context_tokens=num_context))
        return cls(
            overhead_s=overhead_s,
            weights_s=least_s - overhead_s,
            token_s=token_s,
            pair_s=max(0.0, (with_pairs_s - large_s) / num_pairs),
            context_token_s=max(0.0, (with_context_s - decodes_s) / num_context),
        )


LEAST_OVERHEAD_S = 1e-5
"""No host begins a step in less, whatever the fit says: steps that grew slower as their contexts grew longer, because
somebody else took the machine, look as if all of a step were its context, and an empty one were free."""
LEAST_PAIRS_A_TOKEN = 128
"""Of a step, with so many tokens or more, by which the cost of pairs is told from that of tokens. In shorter prompts
attention is a few percent of a token's work, and what pairs seem to cost is chance; a prompt a hundred times as long
has ten thousand times as many."""
LEAST_STEPS, LEAST_SECONDS = 16, 0.2
"""What must have been observed before anything is said."""
MEMORY_STEPS = 512.0
"""After so many steps, an observation counts 1/e of a new one."""
MOST_SURPRISE = 4.0
"""A step that took longer than so many times the expected seconds counts as one that took just that."""
PAIRS = 2
"""Place of their cost among the numbers that are fitted."""
MOST_SWEEPS = 200
ENOUGH = 1e-4
"""No number changes by a larger part of itself in a sweep: it is solved."""


class ObservedCosts:
    """Learns StepCosts from the steps of a device of unknown speed, in bounded memory.

    Least squares of relative errors over overhead, tokens, pairs and context, none of them below 0, in which old steps
    fade. Reading weights and overhead cannot be told apart by it: all is overhead. One step that took far too long (a
    pause of the machine, a first use of some code) moves it a little only.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        """That were observed."""
        self._seconds = 0.0
        self._products = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        self._found = [0.0] * 4
        self._is_known = False
        self._knows_pairs = False
        """Whether a step had so many a token that their cost shows."""

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step, and how long it took. Empty ones are ignored."""
        num_tokens = shape.num_prefill_tokens + shape.num_decode_seqs
        if num_tokens <= 0 or seconds <= 0.0:
            return
        features = (1.0, float(num_tokens), float(shape.num_prefill_pairs), float(shape.num_decode_context_tokens))
        if self._is_known:
            expected_s = _dot(self._found, features)
            if expected_s > 0.0:
                seconds = min(seconds, MOST_SURPRISE * expected_s)
        self.num_steps += 1
        self._seconds += seconds
        least_pairs = LEAST_PAIRS_A_TOKEN * max(shape.num_prefill_tokens, LEAST_PAIRS_A_TOKEN)
        self._knows_pairs |= shape.num_prefill_pairs >= least_pairs
        kept, targets = 1.0 - 1.0 / MEMORY_STEPS, self._targets
        scaled = [feature / seconds for feature in features]  # an error counts in relation to the step
        for index, row in enumerate(self._products):
            one = scaled[index]
            for other in range(4):
                row[other] = kept * row[other] + one * scaled[other]
            targets[index] = kept * targets[index] + one

    def costs(self) -> StepCosts | None:
        """What was learned so far; None before it can be relied on."""
        if self.num_steps < LEAST_STEPS or self._seconds < LEAST_SECONDS:
            return None
        self._solve()
        overhead_s, token_s, pair_s, context_token_s = self._found
        return StepCosts(
            overhead_s=max(overhead_s, LEAST_OVERHEAD_S),
            weights_s=0.0,
            token_s=token_s,
            pair_s=pair_s,
            context_token_s=context_token_s,
        )

    def _solve(self) -> None:
        """Least squares with no number below 0, along one number after the other; begins with what was found before."""
        found, products, targets = self._found, self._products, self._targets
        for _ in range(MOST_SWEEPS):
            is_solved = True
            for index, row in enumerate(products):
                if row[index] > 0.0 and (index != PAIRS or self._knows_pairs):
                    before = found[index]
                    found[index] = max(0.0, before + (targets[index] - _dot(row, found)) / row[index])
                    is_solved &= abs(found[index] - before) <= ENOUGH * before
            if is_solved:
                break
        self._is_known = True


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))
