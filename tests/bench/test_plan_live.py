"""The small case that is planned, simulated and served: what is known of it without serving."""

from __future__ import annotations

import random

import pytest

from manta.autoscaling.planner.fleet import simulate
from manta.bench.plan_live import FIGURES, SmallCase, live_figures, planned
from manta.bench.stats import RequestRecord


def record(due_s: float, ttft_s: float, tpot_s: float) -> RequestRecord:
    first_s = due_s + ttft_s
    return RequestRecord(due_s, 10, 3, arrivals_s=[first_s, first_s + 2 * tpot_s], num_output_tokens=3)


def test_the_case_needs_two_replicas_and_leaves_room() -> None:
    tree, demand = planned(SmallCase())
    assert tree["feasible"]
    assert tree["best"]["num_gpus"] == 2
    assert tree["best"]["utilization"] <= 0.8
    simulated = simulate(tree, demand, random.Random(0))
    for name in FIGURES:
        assert tree["best"][name] == pytest.approx(simulated[name], rel=0.15), name


def test_the_first_requests_do_not_count() -> None:
    records = [record(0.0, 9.0, 9.0), *(record(float(n), 0.1, 0.02) for n in range(1, 10))]
    assert live_figures(records) == pytest.approx(
        {"ttft_p50_s": 0.1, "ttft_p95_s": 0.1, "tpot_p50_s": 0.02, "tpot_p95_s": 0.02}
    )
