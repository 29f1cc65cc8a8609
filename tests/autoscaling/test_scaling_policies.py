"""The policies to compare with do what Serve, KEDA with HPA, and somebody who knows the future would do."""

from __future__ import annotations

import pytest

from manta.autoscaling.signals import FleetSnapshot, PoolState
from manta.autoscaling.simulator.compare import Scenario, compare, is_better
from manta.autoscaling.simulator.elastic import ElasticSettings
from manta.autoscaling.simulator.figures import scaling_figures
from manta.autoscaling.simulator.policies import FixedPeak, OraclePlan, QueueDepth, ScalingPolicy, ServeStock
from manta.autoscaling.simulator.workload import SimRequest

from .quick_fleets import SLO, evenly, pool, run_fleet


def snapshot(
    *, target: int, running: int = 0, waiting: int = 0, held: int = 0, budget: float | None = None
) -> FleetSnapshot:
    state = PoolState(
        name="engine", target=target, num_ready=target, max_replicas=20, num_running=running, num_waiting=waiting
    )
    return FleetSnapshot(pools=(state,), num_held=held, gpu_budget=budget)


def targets(policy: ScalingPolicy, given: list[tuple[float, FleetSnapshot]]) -> list[int]:
    state, found = policy.initial(), []
    for now_s, seen in given:
        state, decision = policy.decide(state, seen, now_s)
        found.append(decision.targets["engine"])
    return found


def test_stock_serve_goes_up_after_its_delay() -> None:
    policy = ServeStock(10, upscale_delay_s=30)
    seen = [(float(second), snapshot(target=2, running=50)) for second in range(0, 40, 10)]
    assert targets(policy, seen) == [2, 2, 2, 5]


def test_stock_serve_goes_down_after_ten_minutes() -> None:
    policy = ServeStock(10)
    seen = [(float(second), snapshot(target=5, running=20)) for second in range(0, 601, 100)]
    assert targets(policy, seen) == [5, 5, 5, 5, 5, 5, 2]


def test_stock_serve_forgets_a_wish_that_passed() -> None:
    policy = ServeStock(10, look_back_s=5, upscale_delay_s=30)
    busy, calm = snapshot(target=2, running=50), snapshot(target=2, running=20)
    seen = [(0.0, busy), (20.0, calm), (40.0, busy), (60.0, busy), (70.0, busy)]
    assert targets(policy, seen) == [2, 2, 2, 2, 5]


def test_queue_depth_grows_by_no_more_than_the_double_or_four() -> None:
    seen = [(0.0, snapshot(target=1, waiting=100)), (15.0, snapshot(target=5, waiting=100))]
    assert targets(QueueDepth(5), seen) == [5, 10]


def test_queue_depth_leaves_what_is_within_a_tenth() -> None:
    assert targets(QueueDepth(10, counts_running=True), [(0.0, snapshot(target=5, running=54))]) == [5]


def test_queue_depth_goes_down_to_the_most_of_five_minutes() -> None:
    quiet = snapshot(target=4)
    seen = [(0.0, snapshot(target=4, waiting=20)), (150.0, quiet), (315.0, quiet)]
    assert targets(QueueDepth(5), seen) == [4, 4, 1]


def test_targets_stay_within_the_budget() -> None:
    assert targets(QueueDepth(5), [(0.0, snapshot(target=1, waiting=100, budget=3.0))]) == [3]


def test_an_oracle_is_early_by_the_cold_start_and_keeps_replicas_through_short_lulls() -> None:
    plan = OraclePlan(10.0, (5.0, 5.0, 5.0, 25.0, 5.0, 25.0, 5.0, 5.0, 5.0))
    times_s, counts = plan.counts(1.0, ahead_s=10.0, keep_s=20.0)
    assert times_s[:3] == [0.0, 10.0, 20.0]
    assert counts == [1, 1, 3, 3, 3, 3, 1, 1, 1]


def test_the_best_holds_the_objective_with_the_fewest_gpu_hours() -> None:
    cheap, _ = run_fleet(evenly(50, every_s=0.1), FixedPeak({"engine": 1}))
    dear, _ = run_fleet(evenly(50, every_s=0.1), FixedPeak({"engine": 3}), num_initial={"engine": 3})
    one, three = scaling_figures(cheap, SLO), scaling_figures(dear, SLO)
    assert is_better(one, three, 0.99)
    assert not is_better(three, one, 0.99)


@pytest.fixture
def burst() -> list[SimRequest]:
    return evenly(40, every_s=0.5) + evenly(800, every_s=0.025, from_s=20.0) + evenly(60, every_s=0.5, from_s=40.0)


def test_all_policies_are_compared_at_the_best_of_their_parameters(burst: list[SimRequest]) -> None:
    said: list[str] = []
    scenario = Scenario(burst, (pool(),), ElasticSettings(slo=SLO), FixedPeak({"engine": 2}))
    found = compare(scenario, say=said.append)
    assert set(found.best) == {"oracle", "manta", "fixed_peak", "serve_stock", "queue_depth"}
    assert len(said) == len(found.tried)
    assert found.best["oracle"].figures.slo_attainment >= 0.99
    assert found.best["oracle"].figures.gpu_hours <= found.best["fixed_peak"].figures.gpu_hours
