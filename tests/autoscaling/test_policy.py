"""The policy over fleets made of arithmetic: up before a breach, down after quiet, never back and forth, and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from manta.autoscaling.damping import Damping
from manta.autoscaling.outlook import is_breach
from manta.autoscaling.policy import Policy, PolicyState
from manta.autoscaling.policy_settings import PolicySettings
from manta.autoscaling.role_changes import RoleChange
from manta.autoscaling.signals import Counters, FleetSnapshot, PoolState
from manta.cluster.routing.roles import Role
from tests.autoscaling.policy_runs import COSTS, SLO, Run, run

SETTINGS = PolicySettings(slo=SLO, cold_start_s=20.0)


def reasons(done: Run) -> list[str]:
    return [one.reason for one in done.decided]


@pytest.mark.parametrize("rate", [3, 100, 300])
def test_a_steady_load_changes_direction_at_most_once_in_an_hour(rate: int) -> None:
    done = run(lambda second: rate, 3600)
    assert done.num_reversals <= 1
    assert len(set(done.targets[600:])) <= 2


def test_replicas_follow_a_spike_at_once_and_stay_until_it_has_been_quiet() -> None:
    settings = PolicySettings(slo=SLO, cold_start_s=20.0, burst_window=1.0)
    done = run(lambda second: 500 if 120 <= second < 300 else 10, 900, settings=settings)
    assert done.targets[119] == 1
    assert done.targets[121] >= 5
    assert done.targets[130] >= 18
    assert min(done.targets[130:415]) >= 18
    assert done.targets[-1] == 1
    assert "burst" in reasons(done)
    assert reasons(done)[-1] == "quiet"


def test_what_came_for_a_first_spike_goes_after_half_the_quiet_window() -> None:
    done = run(lambda second: 500 if 120 <= second < 300 else 10, 900)
    assert min(done.targets[130:358]) >= 18
    assert done.targets[400] <= 2  # of two, one is half: needed, so that the last one stops a little later
    assert done.targets[-1] == 1
    assert done.num_reversals <= 1


def test_what_came_for_a_spike_that_came_back_stays_for_the_whole_quiet_window() -> None:
    done = run(lambda second: 500 if 120 <= second < 300 or 600 <= second < 700 else 10, 1200)
    assert min(done.targets[640:815]) >= 18


def test_what_came_for_a_short_burst_stays_for_the_whole_quiet_window() -> None:
    done = run(lambda second: 500 if 120 <= second < 150 else 10, 600)
    assert min(done.targets[140:265]) >= 15
    assert done.targets[-1] == 1


def test_what_came_for_a_load_that_grew_stays_for_the_whole_quiet_window() -> None:
    done = run(lambda second: 100 + second / 2 if second < 300 else 60, 800, start=4)
    rises = [one.reason for one in done.decided if one.after > one.before]
    assert rises[-1] == "forecast"
    assert min(done.targets[280:420]) == done.targets[280] >= 10
    assert done.targets[-1] <= 3


def test_a_ramp_is_met_before_it_comes() -> None:
    """At one more request/s every second, replicas that are ready hold what comes."""
    done = run(lambda second: 20 + second, 300, start=2)
    assert done.num_reversals == 0
    for second in range(60, 300, 20):
        assert done.ready[second] >= math.ceil((20 + second) / 29)


def test_replicas_stop_only_after_the_whole_quiet_window() -> None:
    done = run(lambda second: 100, 400, start=8)
    changes = [second for second in range(1, 400) if done.targets[second] != done.targets[second - 1]]
    assert changes[0] == 120
    assert done.targets[-1] in (4, 5)


def test_nothing_stops_while_requests_are_late() -> None:
    policy, state = Policy(SETTINGS), PolicyState()
    pool = PoolState(name="engine", num_ready=8, target=8, max_replicas=16, step_costs=COSTS)
    targets = set()
    for second in range(300):
        late = Counters(num_arrived=5 * second, num_prompt_tokens=500 * second, num_finished=5 * second,
                        num_output_tokens=50 * second, num_late_ttft=5 * second)  # fmt: skip
        state, decision = policy.decide(state, FleetSnapshot(counters=late, pools=(pool,)), float(second))
        targets.add(decision.targets["engine"])
    assert targets == {8}


def test_late_requests_ask_for_more_although_the_model_sees_enough() -> None:
    policy, state = Policy(SETTINGS), PolicyState()
    pool = PoolState(name="engine", num_ready=4, target=4, max_replicas=16, num_waiting=3, step_costs=COSTS)
    found = []
    for second in range(60):
        late = Counters(num_arrived=50 * second, num_prompt_tokens=50_000 * second, num_finished=50 * second,
                        num_output_tokens=5000 * second, num_late_ttft=50 * second)  # fmt: skip
        state, decision = policy.decide(state, FleetSnapshot(counters=late, pools=(pool,)), float(second))
        found += decision.decided
    assert [(one.before, one.after, one.reason) for one in found][:1] == [(4, 5, "breach")]
    assert "0.0% of the last requests" in found[0].sentence


def steadily(pool: PoolState, *, rate: int, num_late: int = 0, seconds: int = 300, settings=SETTINGS) -> set[int]:
    """Targets under a steady load, from half a minute on, while of each 100 answers some are late."""
    policy, state, targets = Policy(settings), PolicyState(), set()
    for second in range(seconds):
        num = rate * second
        counters = Counters(num_arrived=num, num_prompt_tokens=1000 * num, num_finished=num,
                            num_output_tokens=250 * num, num_good=num - num * num_late // 100,
                            num_late_ttft=num * num_late // 100)  # fmt: skip
        state, decision = policy.decide(state, FleetSnapshot(counters=counters, pools=(pool,)), float(second))
        if second >= 30:
            targets.add(decision.targets["engine"])
    return targets


def test_what_is_there_and_holds_the_objective_gets_no_reserve_beside_it() -> None:
    settings = replace(SETTINGS, headroom=1.5)
    pool = PoolState(name="engine", num_ready=3, target=3, max_replicas=16, num_running=60, step_costs=COSTS)
    assert steadily(pool, rate=60, num_late=1, settings=settings) == {3}
    assert max(steadily(pool, rate=60, num_late=5, settings=settings)) > 3


def test_lateness_that_may_be_chance_is_no_breach() -> None:
    few = Counters(num_finished=100, num_good=98, num_late_ttft=2)
    many = Counters(num_finished=2000, num_good=1960, num_late_ttft=40)
    assert not is_breach(few, SETTINGS)
    assert is_breach(many, SETTINGS)


def test_a_backlog_that_is_worked_off_before_another_replica_could_come_asks_for_none() -> None:
    pool = PoolState(name="engine", num_ready=4, target=4, max_replicas=16, num_running=40, step_costs=COSTS)
    policy, state, targets = Policy(SETTINGS), PolicyState(), []
    for second in range(60):
        num = 20 * second
        counters = Counters(num_arrived=num, num_prompt_tokens=1000 * num, num_finished=num,
                            num_output_tokens=250 * num, num_good=num)  # fmt: skip
        now = replace(pool, num_waiting={40: 150, 50: 5000}.get(second, 0))
        state, decision = policy.decide(state, FleetSnapshot(counters=counters, pools=(now,)), float(second))
        targets.append(decision.targets["engine"])
    assert targets[40] == 4
    assert targets[50] > 4


def test_an_idle_pool_goes_to_zero_and_the_first_request_wakes_it() -> None:
    settings = replace(SETTINGS, to_zero_s=60.0)
    done = run(lambda second: 5 if second < 30 or second > 200 else 0, 300, settings=settings, least=0)
    assert done.targets[30] == 1
    assert done.targets[95] == 0
    assert done.targets[-1] >= 1
    assert reasons(done)[:2] == ["to_zero", "from_zero"]


def test_a_pool_that_may_not_go_to_zero_keeps_its_least() -> None:
    assert min(run(lambda second: 0, 600, start=3, least=2).targets) == 2


def test_the_gpu_budget_holds_growth_back_and_says_so_once() -> None:
    done = run(lambda second: 500, 300, budget=6)
    assert max(done.targets) == 6
    assert reasons(done).count("budget") == 1
    assert "are needed and the GPU budget allows 6" in done.decided[0].sentence


def test_the_most_replicas_are_kept_to_and_what_is_missing_is_said_once() -> None:
    done = run(lambda second: 500, 300, most=6)
    assert max(done.targets) == 6
    assert "max_replicas is 6" in done.decided[0].sentence


def test_limits_that_changed_are_followed_at_once() -> None:
    policy = Policy(SETTINGS)
    pool = PoolState(name="engine", num_ready=2, target=2, min_replicas=3, max_replicas=8, step_costs=COSTS)
    _, decision = policy.decide(policy.initial(), FleetSnapshot(pools=(pool,)), 0.0)
    assert decision.targets == {"engine": 3}
    assert decision.decided[0].reason == "min"
    _, decision = policy.decide(policy.initial(), FleetSnapshot(pools=(replace(pool, target=9, num_ready=9),)), 0.0)
    assert decision.targets == {"engine": 8}
    assert decision.decided[0].reason == "max"


@pytest.mark.parametrize("num_draining", [0, 1])
def test_a_lost_replica_is_noticed_though_it_is_seen_as_being_stopped_already(num_draining: int) -> None:
    policy = Policy(SETTINGS)
    pool = PoolState(name="engine", num_ready=2, target=2, min_replicas=1, max_replicas=8, step_costs=COSTS)
    state, _ = policy.decide(policy.initial(), FleetSnapshot(pools=(pool,)), 0.0)
    state, _ = policy.decide(state, FleetSnapshot(pools=(pool,)), 1.0)
    lost = replace(pool, num_ready=1, num_starting=1, num_draining=num_draining)
    state, decision = policy.decide(state, FleetSnapshot(pools=(lost,)), 2.0)
    assert [one.reason for one in decision.decided] == ["replace_failed"]
    _, decision = policy.decide(state, FleetSnapshot(pools=(lost,)), 3.0)
    assert decision.decided == ()


def test_a_replica_that_a_lower_target_stops_is_not_called_lost() -> None:
    policy = Policy(SETTINGS)
    pool = PoolState(name="engine", num_ready=2, target=2, min_replicas=1, max_replicas=8, step_costs=COSTS)
    state, _ = policy.decide(policy.initial(), FleetSnapshot(pools=(pool,)), 0.0)
    state, _ = policy.decide(state, FleetSnapshot(pools=(pool,)), 1.0)
    stopping = replace(pool, num_ready=1, target=1, num_draining=1)
    _, decision = policy.decide(state, FleetSnapshot(pools=(stopping,)), 2.0)
    assert decision.decided == ()


def test_a_replica_that_fails_is_noticed_and_changes_no_target() -> None:
    done = run(lambda second: 100, 100, start=4, fails_at_s=60)
    assert set(done.targets) == {4}
    assert reasons(done) == ["replace_failed"]
    assert done.decided[0].time_s == 60.0


def test_the_same_state_and_snapshot_give_the_same_decision() -> None:
    policy = Policy(SETTINGS)
    pool = PoolState(name="engine", num_ready=1, target=1, max_replicas=8, step_costs=COSTS)
    state, _ = policy.decide(policy.initial(), FleetSnapshot(pools=(pool,)), 0.0)
    snapshot = FleetSnapshot(counters=Counters(num_arrived=400, num_prompt_tokens=400_000), pools=(pool,))
    assert policy.decide(state, snapshot, 2.0) == policy.decide(state, snapshot, 2.0)


def test_without_a_step_time_model_the_load_that_replicas_hold_decides() -> None:
    policy, state, targets = Policy(SETTINGS), PolicyState(), {}
    pool = PoolState(name="engine", num_ready=2, target=2, max_replicas=16, max_num_seqs=32, num_running=48)
    for second in range(120):
        counters = Counters(num_arrived=10 * second, num_prompt_tokens=1000 * second, num_finished=10 * second,
                            num_output_tokens=1000 * second, num_good=10 * second)  # fmt: skip
        state, decision = policy.decide(state, FleetSnapshot(counters=counters, pools=(pool,)), float(second))
        targets = decision.targets
    assert targets == {"engine": 4}  # 48 sequences and a tenth more, at 16 of 32 in each


def pair(prefill: PoolState, decode: PoolState, *, rate: int, prompt: int, output: int, seconds: int = 150) -> list:
    """Decisions over a prefill and a decode pool whose replicas do not change."""
    policy, state, found = Policy(SETTINGS), PolicyState(), []
    for second in range(seconds):
        num = rate * second
        counters = Counters(num_arrived=num, num_prompt_tokens=prompt * num, num_finished=num,
                            num_output_tokens=output * num, num_good=num)  # fmt: skip
        snapshot = FleetSnapshot(counters=counters, pools=(prefill, decode))
        state, decision = policy.decide(state, snapshot, float(second))
        found.append(decision)
    return found


def test_what_prefill_lacks_and_decode_has_beyond_need_changes_sides_before_anything_starts() -> None:
    prefill = PoolState(name="prefill", role=Role.PREFILL, num_ready=1, target=1, max_replicas=8, step_costs=COSTS)
    decode = PoolState(name="decode", role=Role.DECODE, num_ready=5, target=5, max_replicas=8, step_costs=COSTS)
    found = pair(prefill, decode, rate=40, prompt=2000, output=20)
    changed = [decision for decision in found if decision.role_changes]
    assert changed[0].role_changes[0].pool == "decode"
    assert changed[0].role_changes[0].role is Role.PREFILL
    assert changed[0].targets["prefill"] == 1
    assert changed[0].decided[0].reason == "role_change"


def test_replicas_that_were_lent_come_back_first() -> None:
    prefill = PoolState(name="prefill", role=Role.PREFILL, num_ready=4, num_lent=2, target=4, max_replicas=8,
                        step_costs=COSTS)  # fmt: skip
    decode = PoolState(name="decode", role=Role.DECODE, num_ready=4, target=4, max_replicas=8, step_costs=COSTS)
    changed = [one for one in pair(prefill, decode, rate=90, prompt=2000, output=10) if one.role_changes]
    assert changed[0].role_changes[0] == RoleChange("prefill", Role.PREFILL, 2)


def test_bursts_that_come_back_find_their_replicas_after_a_while() -> None:
    """A burst of a minute every five: the quiet window grows from two minutes, until replicas stay in between."""
    done = run(lambda second: 150 if second % 300 < 60 else 5, 3600)
    assert min(done.targets[60:600]) == 1
    assert min(done.targets[1800:3300]) >= 5
    assert done.num_reversals <= 8


def test_a_short_window_holds_only_while_it_is_asked_for() -> None:
    damping = Damping().need(5, 0.0, quiet_s=120.0)
    assert damping.need(1, 70.0, quiet_s=120.0).most == 5
    assert damping.need(1, 70.0, quiet_s=120.0, least=0.5).most == 1
    assert damping.need(1, 50.0, quiet_s=120.0, least=0.5).most == 5


@pytest.mark.parametrize(("least", "window_s"), [(1.0, 240.0), (0.5, 120.0)])
def test_a_regretted_fall_doubles_the_window_whatever_is_asked_for_then(least: float, window_s: float) -> None:
    regretted = Damping().fell(0.0).rose(50.0, quiet_s=120.0, least=least).need(5, 50.0, quiet_s=120.0, least=0.5)
    assert regretted.need(1, 49.0 + window_s, quiet_s=120.0, least=0.5).most == 5
    assert regretted.need(1, 51.0 + window_s, quiet_s=120.0, least=0.5).most == 1
