"""Workloads that are made up: their rates, their shapes, and traces at other rates."""

from __future__ import annotations

import random

import pytest

from manta.autoscaling.simulator.arrivals import (
    Diurnal,
    Lengths,
    Spike,
    Steady,
    Table,
    arrivals,
    lognormal,
    made_requests,
    superposed,
)
from manta.engine.errors import ConfigError

from .fleets import request


def test_a_steady_process_has_its_rate() -> None:
    times_s = list(arrivals(Steady(20.0), duration_s=500.0, rng=random.Random(0)))
    assert len(times_s) == pytest.approx(10_000, rel=0.03)
    assert times_s == sorted(times_s)


def test_a_spike_has_fifty_times_the_rate() -> None:
    times_s = list(arrivals(Spike(2.0, 50.0, 100.0, 50.0), duration_s=300.0, rng=random.Random(0)))
    within = sum(100.0 <= time_s < 150.0 for time_s in times_s)
    assert within == pytest.approx(5000, rel=0.05)
    assert len(times_s) - within == pytest.approx(500, rel=0.15)


def test_a_day_begins_at_its_least() -> None:
    day = Diurnal(1.0, 9.0, day_s=100.0)
    assert [round(day.at(time_s), 6) for time_s in (0.0, 25.0, 50.0, 100.0)] == [1.0, 5.0, 9.0, 1.0]


def test_a_table_keeps_its_shape_when_it_is_scaled() -> None:
    table = Table((0.0, 600.0, 1200.0), (10.0, 30.0, 20.0)).scaled(mean=4.0, faster=10.0)
    assert [table.at(time_s) for time_s in (0.0, 59.0, 60.0, 500.0)] == [2.0, 2.0, 6.0, 4.0]


def test_bursts_keep_the_mean_rate() -> None:
    rng = random.Random(1)
    table = Table.bursty(10.0, duration_s=10_000.0, burst_factor=8.0, burst_s=20.0, calm_s=100.0, rng=rng)
    times_s = list(arrivals(table, duration_s=10_000.0, rng=rng))
    assert len(times_s) / 10_000 == pytest.approx(10.0, rel=0.2)
    assert max(table.rates) == pytest.approx(8.0 * min(table.rates))


def test_lengths_are_clipped() -> None:
    draw, rng = lognormal(100.0, 2.0, low=50, high=200), random.Random(0)
    drawn = [draw(rng) for _ in range(200)]
    assert (min(drawn), max(drawn)) == (50, 200)


def test_a_workload_without_requests_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        made_requests(iter(()), lambda rng: Lengths(1, 1), rng=random.Random(0))


def test_a_trace_at_twice_its_rate_has_each_request_twice_with_prefixes_of_their_own() -> None:
    trace = [request(f"r{index}", 32, 4, at_s=float(index), prefix=1) for index in range(10)]
    doubled = superposed(trace, 2.0, shift_s=0.5, rng=random.Random(0))
    assert len(doubled) == 20
    assert [one.arrival_s for one in doubled] == sorted(one.arrival_s for one in doubled)
    assert len({one.request_id for one in doubled}) == 20
    assert len({one.block_hashes for one in doubled}) == 2


def test_a_trace_at_half_its_rate_is_thinned() -> None:
    trace = [request(f"r{index}", 32, 4, at_s=float(index)) for index in range(1000)]
    assert len(superposed(trace, 0.5, shift_s=0.5, rng=random.Random(0))) == pytest.approx(500, rel=0.1)
