"""What an engine's requests and steps were like, as counts in fixed buckets. Knows no clock and no metric's name.

All of it is counted a step or a request at a time, never a token at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from manta.engine.request import EngineRequest, RequestDelta
from manta.engine.stats import StepStats
from manta.engine.step_costs import StepCosts

from .metrics_table import LATENCY_S, SEQUENCE_BUCKETS, TOKEN_BUCKETS, TOKEN_TIME_S
from .step_histogram import BOUNDS_S


class Counts(msgspec.Struct):
    """A histogram without its bounds. The counts only rise; those of another's join them with `merge`."""

    counts: list[int]
    """One for each bound, then that of what is above the last."""
    total: float = 0.0
    """Sum of all values."""

    def add(self, value: float, bounds: Sequence[float], times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(bounds, value)] += times
        self.total += value * times

    def merge(self, other: Counts) -> None:
        """Add what another one counted in the same bounds."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


BOUNDS: dict[str, tuple[float, ...]] = {
    "predicted_s": BOUNDS_S,
    "itl_s": BOUNDS_S,
    "batch_tokens": TOKEN_BUCKETS,
    "batch_sequences": SEQUENCE_BUCKETS,
    "queue_s": LATENCY_S,
    "ttft_s": LATENCY_S,
    "tpot_s": TOKEN_TIME_S,
    "e2e_s": LATENCY_S,
}
"""Upper bounds of the buckets of each of EngineTimes' fields."""


def _empty(name: str) -> Counts:
    return msgspec.field(default_factory=lambda: Counts([0] * (len(BOUNDS[name]) + 1)))


class EngineTimes(msgspec.Struct, kw_only=True):
    """Since the engine started; they only rise. Seconds unless named otherwise."""

    predicted_s: Counts = _empty("predicted_s")
    """Of each step that follows on another, what the step-time model says of it."""
    itl_s: Counts = _empty("itl_s")
    """Each gap between two tokens of a sequence: the step's time, once for each sequence that went on in it."""
    batch_tokens: Counts = _empty("batch_tokens")
    batch_sequences: Counts = _empty("batch_sequences")
    """Decodes in a step."""
    queue_s: Counts = _empty("queue_s")
    """Submission to the first step that computes something of it."""
    ttft_s: Counts = _empty("ttft_s")
    """Submission to first token."""
    tpot_s: Counts = _empty("tpot_s")
    """Mean gap of a sequence's tokens after the first, of those that finished."""
    e2e_s: Counts = _empty("e2e_s")
    """Submission to last token, of those that finished."""

    def add(self, name: str, value: float, times: int = 1) -> None:
        """Count a value so many times, in the field of that name."""
        getattr(self, name).add(value, BOUNDS[name], times)

    def merge(self, other: EngineTimes) -> None:
        """Add what another engine counted."""
        for name in self.__struct_fields__:
            getattr(self, name).merge(getattr(other, name))


class EngineWatch:
    """Fills in EngineTimes for the step loop, which tells it what happens and when (monotonic seconds)."""

    def __init__(self) -> None:
        self.times = EngineTimes()
        self._submitted: dict[str, _Submitted] = {}
        """What the engine has and has not finished."""
        self._before_first: set[str] = set()
        """Those of them without a token yet."""
        self._last: StepStats | None = None

    def submitted(self, request: EngineRequest, now_s: float) -> None:
        """The engine took a request."""
        self._submitted[request.request_id] = _Submitted(now_s, len(request.output_token_ids))
        self._before_first.add(request.request_id)

    def started(self, request_id: str, now_s: float) -> None:
        """A step computes something of it for the first time."""
        if (one := self._submitted.get(request_id)) is not None:
            self.times.add("queue_s", now_s - one.at_s)

    def ended(self, request_id: str, num_output_tokens: int) -> None:
        """It has all its tokens; so many, with those that it had when it came. Its last delta comes after this."""
        if (one := self._submitted.get(request_id)) is not None:
            one.num_tokens = num_output_tokens - one.num_before

    def cancelled(self, request_id: str) -> None:
        """Nothing more comes of it. May be told of one that is over."""
        self._before_first.discard(request_id)
        self._submitted.pop(request_id, None)

    def step_finished(self, stats: StepStats) -> None:
        """What the step was that `stepped` tells of next."""
        self._last = stats
        self.times.add("batch_tokens", stats.num_prefill_tokens + stats.num_decode_seqs)
        self.times.add("batch_sequences", stats.num_decode_seqs)

    def stepped(
        self, deltas: Sequence[RequestDelta], now_s: float, *, gap_s: float | None, costs: StepCosts | None
    ) -> None:
        """A step gave these deltas. `gap_s` is the time since the step before it ended, None after a pause."""
        num_going_on = len(deltas)
        if self._before_first:
            first = [one.request_id for one in deltas if one.request_id in self._before_first]
            self._before_first.difference_update(first)
            num_going_on -= len(first)
            for request_id in first:
                one = self._submitted[request_id]
                one.first_s = now_s
                if not one.num_before:  # one that moved here, or whose prompt another replica computed, had it before
                    self.times.add("ttft_s", now_s - one.at_s)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finished(delta.request_id, now_s)
        if gap_s is not None:
            if num_going_on:
                self.times.add("itl_s", gap_s, num_going_on)
            if costs is not None and (last := self._last) is not None:
                num_tokens = last.num_prefill_tokens + last.num_decode_seqs
                predicted_s = costs.step_s(num_tokens, last.num_prefill_pairs, last.num_context_tokens)
                self.times.add("predicted_s", predicted_s)
        self._last = None

    def _finished(self, request_id: str, now_s: float) -> None:
        one = self._submitted.pop(request_id, None)
        if one is None or one.first_s is None:
            return
        self.times.add("e2e_s", now_s - one.at_s)
        if one.num_tokens > 1:
            self.times.add("tpot_s", (now_s - one.first_s) / (one.num_tokens - 1))


@dataclass(slots=True)
class _Submitted:
    """A request at the engine."""

    at_s: float
    num_before: int
    """Output tokens that it had when it came."""
    first_s: float | None = None
    num_tokens: int = 0
    """Generated here, once it has them all."""
