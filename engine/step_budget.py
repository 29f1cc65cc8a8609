"""How many prompt tokens a step may take beside its decodes, so that it stays under a target time. Pure.

Knows step times, no requests. A step may always take MIN_PREFILL_TOKENS, even where its decodes alone take longer than
the target: prefills go on at a rate that can be told from the step time, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .step_time import StepShape

MIN_PREFILL_TOKENS = 128


class StepBudget:
    """The answer for one target. Sizes are rounded up to a raster first, so that answers can be kept."""

    def __init__(
        self, predict: Callable[[StepShape], float], *, target_s: float, max_tokens: int, raster: int = 16
    ) -> None:
        """`max_tokens` is what a step computes at most. `raster` is that of sequences; contexts have 256 times it."""
        self._predict = predict
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._raster = raster
        self._searched = lru_cache(maxsize=4096)(self._search)

    def prefill_tokens(self, num_decode_seqs: int, num_context_tokens: int, *, prefill_start: int = 0) -> int:
        """Most prompt tokens beside decodes that read `num_context_tokens` together; chunks begin at `prefill_start`.

        Without decodes nobody waits for the step: as many as fit.
        """
        if not num_decode_seqs:
            return self._max_tokens
        raster = self._raster
        return min(
            self._searched(
                _up(num_decode_seqs, raster), _up(num_context_tokens, 256 * raster), _up(prefill_start, 256 * raster)
            ),
            max(0, self._max_tokens - num_decode_seqs),
        )

    def _search(self, num_decode_seqs: int, num_context_tokens: int, prefill_start: int) -> int:
        """The largest number whose step stays under the target; steps take longer the more tokens they have."""

        def is_short(num_tokens: int) -> bool:
            pairs = num_tokens * prefill_start + num_tokens * (num_tokens + 1) // 2
            return self._predict(StepShape(num_tokens, num_decode_seqs, num_context_tokens, pairs)) <= self._target_s

        low, high = MIN_PREFILL_TOKENS, self._max_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_short(middle) else (low, middle - 1)
        return low


def _up(value: int, raster: int) -> int:
    return -(-value // raster) * raster
