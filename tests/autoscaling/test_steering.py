"""Reports, counts and memory around the policy; budgets that models share; what a replica can take."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from manta.autoscaling.budget import Ask, ModelAsk, own_budget, share
from manta.autoscaling.capacity import ReplicaSize, Work, held_rate, load, need
from manta.autoscaling.forecast import Bursts, Forecast, Samples, forecast
from manta.autoscaling.policy_settings import PolicySettings
from manta.autoscaling.signals import EdgeSums
from manta.autoscaling.slo import Slo
from manta.autoscaling.steering import Memory, PoolCounts, PoolLimits, Steering, SteeringSettings
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Counters, EdgeSignals, PoolSignals
from tests.autoscaling.policy_runs import COSTS, SLO, WORK

SETTINGS = SteeringSettings(
    model="llama", pools=(PoolLimits(name="engine", min_replicas=0, max_replicas=8),), policy=PolicySettings(slo=SLO)
)
SIZE = ReplicaSize(COSTS, 256, 400_000)
BOUNDED = ReplicaSize(COSTS, 256, 400_000, tpot_target_s=0.016)


def report(edge: str, now_s: float, *, arrived: int = 0, held: int = 0, ready: int = 1) -> EdgeSignals:
    pool = PoolSignals(name="engine", num_ready=ready, max_num_seqs=256, tokens_a_step=8192, step_costs=COSTS)
    return EdgeSignals(
        edge_id=edge,
        now_s=now_s,
        counters=Counters(num_arrived=arrived, num_prompt_tokens=1000 * arrived),
        num_held=held,
        pools=(pool,),
    )


def test_edges_are_added_up_and_lost_or_late_reports_cost_nothing() -> None:
    sums = EdgeSums()
    sums.learn(report("a", 1.0, arrived=500), 1.0)
    sums.learn(report("b", 1.0, arrived=100), 1.0)
    sums.learn(report("a", 9.0, arrived=540), 9.0)
    sums.learn(report("a", 5.0, arrived=520), 9.1)
    sums.learn(report("b", 9.0, arrived=130), 9.2)
    assert sums.total.num_arrived == 70


def test_what_a_silent_edge_held_expires_and_its_counters_stay() -> None:
    sums = EdgeSums()
    sums.learn(report("a", 1.0, arrived=5, held=3), 1.0)
    sums.learn(report("a", 2.0, arrived=9, held=3), 2.0)
    assert sums.num_held(11.0) == 3
    assert sums.num_held(12.5) == 0
    assert sums.total.num_arrived == 4


def test_the_first_held_request_at_zero_is_urgent() -> None:
    steering = Steering(SETTINGS)
    steering.step({"engine": PoolCounts(0, 0, 0, 0)}, 0.0, wall_s=100.0)
    assert not steering.learn(report("a", 1.0, ready=0), 1.0)
    assert steering.learn(report("a", 2.0, held=1, ready=0), 2.0)
    decision = steering.step({"engine": PoolCounts(0, 0, 0, 0)}, 2.0, wall_s=102.0)
    assert decision.targets == {"engine": 1}
    assert steering.status(102.0).decided[-1].time_s == 102.0


def test_the_time_of_starts_is_measured_from_decision_to_ready() -> None:
    steering = Steering(SETTINGS)
    steering.step({"engine": PoolCounts(0, 0, 0, 0)}, 0.0, wall_s=0.0)
    steering.learn(report("a", 1.0, held=1, ready=0), 1.0)
    steering.step({"engine": PoolCounts(0, 0, 0, 0)}, 1.0, wall_s=1.0)
    steering.step({"engine": PoolCounts(1, 0, 1, 0)}, 2.0, wall_s=2.0)
    assert steering.cold_start_s is None
    steering.learn(report("a", 8.0, ready=1), 8.0)
    steering.step({"engine": PoolCounts(1, 1, 0, 0)}, 8.0, wall_s=8.0)
    assert steering.cold_start_s == 7.0


def test_decisions_are_kept_over_a_restart() -> None:
    steering = Steering(SETTINGS)
    steering.step({"engine": PoolCounts(0, 0, 0, 0)}, 0.0, wall_s=0.0)
    assert steering.take_memory() is None
    steering.learn(report("a", 1.0, held=1, ready=0), 1.0)
    steering.step({"engine": PoolCounts(0, 0, 0, 0)}, 1.0, wall_s=1.0)
    kept = steering.take_memory()
    assert kept is not None
    again = Steering(SETTINGS, msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=Memory))
    assert again.status(2.0).decided == steering.status(2.0).decided
    assert again.status(2.0).num_decided == {"engine": {"from_zero": 1}}


def test_a_budget_goes_to_whoever_has_the_smallest_part_of_what_he_needs() -> None:
    assert share([Ask(name="a", least=1, wanted=8), Ask(name="b", least=1, wanted=4)], 20) == {"a": 8, "b": 4}
    assert share([Ask(name="a", least=1, wanted=8), Ask(name="b", least=1, wanted=4)], 6) == {"a": 4, "b": 2}
    assert share([Ask(name="a", least=1, wanted=4, gpus=4), Ask(name="b", least=1, wanted=4)], 8) == {"a": 1, "b": 4}


def test_models_never_use_more_than_the_budget_together() -> None:
    small = ModelAsk(name="small", least=1, wanted=2, held=2)
    large = ModelAsk(name="large", least=1, wanted=20, held=3)
    assert own_budget(large, [small], 8) == 6
    assert own_budget(small, [large], 8) == 1  # it has the larger part of what it wants, and gives way
    assert own_budget(large, [ModelAsk(name="small", least=1, wanted=2, held=6)], 8) == 2  # until the other lets go


def test_a_replica_takes_more_the_later_a_first_token_may_come() -> None:
    needs = [need(200, WORK, SIZE, Slo(ttft_s=ttft_s), Role.MIXED).num_replicas for ttft_s in (0.06, 0.1, 1.0)]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > needs[-1]


def test_room_in_the_kv_cache_can_be_the_limit() -> None:
    long = Work(num_new_tokens=100.0, num_prompt_tokens=30_000.0, num_output_tokens=1000.0)
    found = need(5, long, SIZE, Slo(), Role.DECODE)
    assert found.limit == "kv_room"
    assert found.load.num_kv_tokens <= 0.85 * 400_000


def test_where_the_engine_bounds_its_steps_prompts_wait_and_time_per_token_is_no_limit() -> None:
    """Of prompts ten times as long as answers, the steps alone would ask for half as many replicas again."""
    prompts = Work(num_new_tokens=4000.0, num_prompt_tokens=4000.0, num_output_tokens=100.0)
    slo = Slo(ttft_s=2.0, tpot_s=0.02)
    free, bounded = need(60, prompts, SIZE, slo, Role.MIXED), need(60, prompts, BOUNDED, slo, Role.MIXED)
    assert (free.limit, bounded.limit) == ("tpot", "ttft")
    assert bounded.num_replicas < free.num_replicas


def test_a_bound_above_the_objective_does_not_hold_it() -> None:
    loose = replace(SIZE, tpot_target_s=0.04)
    assert need(60, WORK, loose, Slo(tpot_s=0.006), Role.MIXED).limit == "tpot"


def test_prompts_are_computed_more_slowly_the_shorter_the_steps_are_held() -> None:
    found = [
        load(20, WORK, replace(SIZE, tpot_target_s=target_s), SLO, Role.MIXED, num_replicas=1).ttft_s
        for target_s in (0.04, 0.02, 0.01)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_an_objective_that_an_idle_replica_misses_asks_for_no_fleet_without_end() -> None:
    found = need(10, WORK, SIZE, Slo(ttft_s=0.001), Role.MIXED)
    assert (found.num_replicas, found.limit) == (1, "ttft")


def test_the_load_of_a_replica_follows_littles_law() -> None:
    found = load(30, WORK, SIZE, SLO, Role.MIXED, num_replicas=2)
    assert found.num_running == pytest.approx(15 * 250 * found.step_s)


def test_the_rate_that_replicas_hold_needs_just_as_many() -> None:
    rate = held_rate(WORK, BOUNDED, SLO, Role.MIXED, num_replicas=3)
    assert need(rate, WORK, BOUNDED, SLO, Role.MIXED).num_replicas == 3
    assert need(1.02 * rate, WORK, BOUNDED, SLO, Role.MIXED).num_replicas == 4


def test_a_rate_that_has_not_changed_is_known_the_better_the_longer_it_lasts() -> None:
    """Half a minute by chance a fifth above the rest moves the level by a twentieth."""
    samples, count = Samples(), 0
    for second in range(200):
        count += 5 if second < 170 else 6
        samples = samples.add(float(second), count)
    assert forecast(samples, horizon_s=30.0).level == pytest.approx(5.25, rel=0.02)


def test_a_jump_is_expected_to_stay_and_not_to_go_on_rising() -> None:
    samples, bursts, count, found = Samples(), Bursts(), 0, Forecast()
    for second in range(135):
        count += 10 if second < 110 else 100
        samples = samples.add(float(second), count)
        found = forecast(samples, bursts, horizon_s=40.0)
        bursts = bursts.learn(found, float(second), horizon_s=40.0)
        assert found.expected <= 101


def test_what_a_rate_gained_by_a_jump_is_no_trend() -> None:
    """100 a second after the jump, for 15 s by chance 110: only what came since says something of a trend."""
    samples, bursts, count, found = Samples(), Bursts(), 0, Forecast()
    for second in range(180):
        count += 10 if second < 100 else 110 if second >= 165 else 100
        samples = samples.add(float(second), count)
        found = forecast(samples, bursts, horizon_s=40.0)
        bursts = bursts.learn(found, float(second), horizon_s=40.0)
    assert found.expected < 115
    assert forecast(samples, horizon_s=40.0).expected > 120


def test_bursts_that_were_over_before_a_replica_came_count_for_less_the_next_time() -> None:
    samples, bursts, count, asked = Samples(), Bursts(), 0, {0: 0.0, 8: 0.0}
    for second in range(3000):
        count += 100 if second % 300 >= 290 else 5
        samples = samples.add(float(second), count)
        found = forecast(samples, bursts, horizon_s=40.0)
        bursts = bursts.learn(found, float(second), horizon_s=40.0)
        if second // 300 in asked:
            asked[second // 300] = max(asked[second // 300], found.expected)
    assert asked[0] == pytest.approx(100)
    assert asked[8] < 50


def test_a_step_up_is_a_burst_and_no_trend_that_goes_on() -> None:
    samples, count, found = Samples(), 0, Forecast()
    for second in range(200):
        count += 10 if second < 100 else 100
        samples = samples.add(float(second), count)
        found = forecast(samples, horizon_s=30.0)
        if second in (50, 99, 150):
            assert not found.is_burst
        if 101 <= second <= 104:
            assert found.is_burst
    assert found.expected == pytest.approx(100)


def test_a_ramp_is_carried_on_to_the_moment_a_replica_is_ready() -> None:
    samples, count = Samples(), 0
    for second in range(120):
        count += 20 + second
        samples = samples.add(float(second), count)
    assert forecast(samples, horizon_s=30.0).expected == pytest.approx(169, rel=0.1)
