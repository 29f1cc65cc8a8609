"""What counts as good, late, refused and failed in an overload."""

from __future__ import annotations

import pytest

from manta.bench.overload import Outcome, Sizes
from manta.bench.stats import RequestRecord


def record(*, ttft_s: float | None = None, error: str | None = None, finished_s: float | None = 5.0) -> RequestRecord:
    arrivals = [] if ttft_s is None else [ttft_s, ttft_s + 1]
    return RequestRecord(0.0, 8, 2, arrivals, num_output_tokens=2, finished_s=finished_s, error=error)


def test_good_is_what_was_answered_whole_and_in_time() -> None:
    records = [record(ttft_s=0.5), record(ttft_s=0.9), record(ttft_s=1.5), record(ttft_s=0.2, error="truncated")]
    records += [record(error="http_429", finished_s=0.01), record(error="http_429", finished_s=0.03)]
    outcome = Outcome.of(records, deadline_s=1.0, duration_s=2.0)
    assert (outcome.offered_per_s, outcome.good_per_s) == (3.0, 1.0)
    assert (outcome.num_late, outcome.num_refused, outcome.num_failed) == (1, 2, 1)
    assert outcome.refusals_s.median == pytest.approx(0.02)


def test_capacity_is_what_all_slots_complete() -> None:
    assert Sizes(step_ms=50, num_replicas=4, max_num_seqs=8, output_len=31).capacity_per_s == 20.0
