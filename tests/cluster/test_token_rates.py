"""Tokens a second: a bucket, a meter, and how a limit is divided over edges."""

from __future__ import annotations

import pytest

from manta.cluster.routing.token_rates import DemandMeter, TokenBucket, divide


def test_a_bucket_gives_its_burst_at_once_and_its_rate_after_that():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    assert bucket.wait_s(100, 0.0) == 0.0
    bucket.take(100, 0.0)
    assert bucket.wait_s(30, 0.0) == 3.0
    assert bucket.wait_s(30, 3.0) == 0.0
    assert bucket.level(1000.0) == 100.0


def test_what_is_larger_than_the_burst_waits_for_a_full_bucket_and_leaves_a_debt():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    assert bucket.wait_s(250, 0.0) == 0.0
    bucket.take(250, 0.0)
    assert bucket.level(0.0) == -150.0
    assert bucket.wait_s(10, 0.0) == 16.0


def test_what_is_given_back_never_exceeds_the_burst():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    bucket.take(50, 0.0)
    bucket.take(-500, 0.0)
    assert bucket.level(0.0) == 100.0


def test_a_resized_bucket_keeps_its_part_and_its_debt():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    bucket.take(50, 0.0)
    bucket.resize(5.0, 40.0, 0.0)
    assert bucket.level(0.0) == 20.0
    bucket.take(60, 0.0)
    bucket.resize(10.0, 80.0, 0.0)
    assert bucket.level(1.0) == -30.0


def test_demand_is_what_was_asked_for_lately():
    meter = DemandMeter()
    assert meter.tokens_per_s(0.0) == 0.0
    for second in range(100):
        meter.add(50, float(second))
    assert meter.tokens_per_s(99.0) == pytest.approx(50.0, rel=0.06)
    assert meter.tokens_per_s(99.0 + 50.0) < 0.5


def test_a_limit_is_divided_by_demand_with_something_for_everybody():
    assert divide({}) == {}
    assert divide({"x": 0.0, "y": 0.0}) == {"x": 0.5, "y": 0.5}
    shares = divide({"x": 300.0, "y": 100.0, "z": 0.0, "w": 0.0})
    assert shares == pytest.approx({"x": 0.7, "y": 0.25, "z": 0.025, "w": 0.025})
    assert sum(shares.values()) == pytest.approx(1.0)
