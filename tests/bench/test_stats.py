"""Percentiles, single requests, whole runs, SLOs and the knee, on literal numbers."""

from __future__ import annotations

import math

import pytest

from manta.bench.load import Knee, find_knee
from manta.bench.stats import LoadResult, RequestRecord, Slo, Summary, percentile, summarize
from manta.engine.errors import ConfigError


def record(due_s: float, *arrivals_s: float, tokens: int, prompt: int = 10, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        due_s,
        prompt,
        tokens,
        arrivals_s=list(arrivals_s),
        num_output_tokens=tokens,
        finished_s=arrivals_s[-1] if arrivals_s else None,
        error=error,
    )


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([10.0, 20.0], 90) == pytest.approx(19.0)
    assert percentile([5.0], 99) == 5.0
    assert math.isnan(percentile([], 50))
    summary = Summary.of(float(value) for value in range(101))
    assert (summary.count, summary.median, summary.p90, summary.p95, summary.p99) == (101, 50.0, 90.0, 95.0, 99.0)
    assert summary.figures("x", "ms", 2.0) == {
        "x_median_ms": 100.0, "x_p90_ms": 180.0, "x_p95_ms": 190.0, "x_p99_ms": 198.0,
    }  # fmt: skip
    assert Summary.of([]).figures("x") == {}


def test_one_request() -> None:
    one = record(1.0, 1.5, 1.7, 2.1, tokens=4)  # one arrival carried two tokens
    assert one.ttft_s == 0.5
    assert one.tpot_s == pytest.approx(0.2)
    assert one.gaps_s == pytest.approx([0.2, 0.4])
    assert one.e2e_s == pytest.approx(1.1)
    assert one.queue_s is None
    one.started_s = 1.25
    assert one.queue_s == 0.25
    assert record(0.0, 1.0, tokens=1).tpot_s is None
    assert RequestRecord(0.0, 1, 1).ttft_s is None


def test_a_run() -> None:
    slo = Slo(ttft_s=0.6)
    records = [
        record(0.0, 0.5, 1.0, tokens=2),
        record(1.0, 2.0, 4.0, tokens=6),
        record(1.0, tokens=5, error="http_429"),
        RequestRecord(2.0, 10, 5),
    ]
    result = summarize(records, slo)
    assert result.duration_s == 4.0
    assert (result.requests_per_s, result.output_tokens_per_s, result.total_tokens_per_s) == (0.5, 2.0, 7.0)
    assert result.goodput_per_s == 0.25
    assert result.errors == {"http_429": 1, "unfinished": 1}
    assert result.ttft.median == 0.75
    figures = result.figures("at_1_")
    assert figures["at_1_ttft_median_ms"] == 750.0
    assert figures["at_1_errors"] == 2.0
    assert "at_1_queue_median_ms" not in figures
    assert summarize(records).goodput_per_s is None


def test_slo() -> None:
    slo = Slo.parse("ttft=0.9, tpot=0.045")
    assert slo == Slo(ttft_s=0.9, tpot_s=0.045)
    assert slo.is_met(record(0.0, 0.9, 0.945, tokens=2))
    assert not slo.is_met(record(0.0, 0.9, 0.95, tokens=2))
    assert not slo.is_met(record(0.0, 0.5, 0.51, tokens=2, error="truncated"))
    assert slo.is_met_at_p95(summarize([record(0.0, 0.5, 0.51, tokens=2)]))
    assert not slo.is_met_at_p95(summarize([record(0.0, 0.5, 0.51, tokens=2), RequestRecord(0.0, 1, 1)]))
    for text in ("", "ttft", "ttft=x", "speed=1", "ttft=0"):
        with pytest.raises(ConfigError, match="--slo"):
            Slo.parse(text)


@pytest.mark.parametrize("start", [0.1, 1.0, 6.0, 100.0])
async def test_the_knee_of_a_queue_is_found_from_either_side(start: float) -> None:
    """A server of 10 requests a second whose latency is 1 / (10 - rate): 0.25 s is reached at a rate of 6."""
    measured: list[float] = []

    async def measure(rate: float) -> LoadResult:
        measured.append(rate)
        latency_s = 1 / (10 - rate) if rate < 10 else 1000.0
        return summarize([record(0.0, latency_s, tokens=1)])

    knee = await find_knee(measure, Slo(ttft_s=0.25).is_met_at_p95, start=start)
    assert knee.good is not None
    assert knee.bad is not None
    assert knee.good <= 6.0 < knee.bad
    assert knee.bad - knee.good <= 0.1 * knee.good
    assert len(measured) < 16


async def test_a_knee_that_is_out_of_reach_is_absent() -> None:
    async def measure(rate: float) -> LoadResult:
        return summarize([record(0.0, 1.0, tokens=1)])

    assert await find_knee(measure, lambda result: True, start=1.0, max_doublings=3) == Knee(8.0, None)
    never = await find_knee(measure, lambda result: False, start=1.0)
    assert never.good is None
    assert never.bad == 1 / 64
