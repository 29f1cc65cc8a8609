"""Elastic fleets: cold starts cost time and GPUs, drains lose nothing, failures and zero replicas are survived."""

from __future__ import annotations

import pytest

from manta.autoscaling.policy import Decision, Policy
from manta.autoscaling.policy_settings import PolicySettings
from manta.autoscaling.role_changes import RoleChange
from manta.autoscaling.signals import FleetSnapshot
from manta.autoscaling.simulator.elastic import Failure
from manta.autoscaling.simulator.figures import reversals, scaling_figures
from manta.autoscaling.simulator.policies import FixedPeak
from manta.cluster.routing.roles import Role

from .quick_fleets import SLO, evenly, pool, run_fleet


class Says:
    """Targets by time."""

    def __init__(self, *changes: tuple[float, dict[str, int]], role_at_s: float | None = None) -> None:
        self._changes, self._role_at_s = changes, role_at_s
        self.seen: list[FleetSnapshot] = []

    def initial(self) -> bool:
        return False

    def decide(self, state: bool, snapshot: FleetSnapshot, now_s: float) -> tuple[bool, Decision]:
        self.seen.append(snapshot)
        targets = [targets for time_s, targets in self._changes if time_s <= now_s]
        has_changed = self._role_at_s is not None and now_s >= self._role_at_s
        changes = (RoleChange("prefill", Role.DECODE),) if has_changed and not state else ()
        return has_changed, Decision(targets=targets[-1] if targets else {}, role_changes=changes)


def test_a_fixed_fleet_costs_its_gpus_all_the_time() -> None:
    run, _ = run_fleet(evenly(100, every_s=0.1), FixedPeak({"engine": 2}), num_initial={"engine": 2})
    assert run.gpu_s == pytest.approx(2 * run.end_s)
    assert scaling_figures(run, SLO).slo_attainment == 1.0


def test_a_replica_costs_from_the_beginning_of_its_start_and_serves_when_that_is_over() -> None:
    policy = Says((2.0, {"engine": 2}))
    run, _ = run_fleet(evenly(100, every_s=0.1), policy, delay_s=0.5)
    ready = [sample.time_s for sample in run.samples if sample.num_ready == 2]
    assert ready[0] == 8.0  # decided at 2, begun at 2.5, ready at 7.5, seen at 8
    assert run.gpu_s == pytest.approx(run.end_s + run.end_s - 2.5)
    assert run.startups == [{"weights": 4.0, "graphs": 1.0}]


def test_a_drain_ends_what_runs_and_costs_until_then() -> None:
    requests = evenly(2, every_s=0.001, output=1000)
    policy = Says((0.0, {"engine": 2}), (0.1, {"engine": 1}))
    run, _ = run_fleet(requests, policy, num_initial={"engine": 2}, period_s=0.1, delay_s=0.0)
    assert [one.num_moves for one in run.served] == [0, 0]
    assert {one.replica for one in run.served} == {0, 1}
    assert run.gpu_s > 1.9


def test_what_outlasts_the_grace_goes_on_elsewhere_without_losing_tokens() -> None:
    requests = evenly(2, every_s=0.001, output=1000)
    policy = Says((0.0, {"engine": 2}), (0.1, {"engine": 1}))
    run, _ = run_fleet(requests, policy, num_initial={"engine": 2}, period_s=0.1, delay_s=0.0, drain_grace_s=0.2)
    moved = [one for one in run.served if one.num_moves]
    assert len(moved) == 1
    assert moved[0].finished_s is not None
    assert moved[0].first_s == pytest.approx(0.0, abs=0.1)


def test_requests_of_a_replica_that_dies_go_on_at_another() -> None:
    requests = evenly(40, every_s=0.05, output=100)
    run, _ = run_fleet(
        requests, FixedPeak({"engine": 2}), num_initial={"engine": 2}, failures=(Failure(0.5),), period_s=1.0
    )
    assert any(one.num_moves for one in run.served)
    assert all(one.finished_s is not None for one in run.served)
    assert run.num_starts == 1


def test_requests_wait_at_the_edge_while_there_is_no_replica_and_are_served() -> None:
    settings = PolicySettings(slo=SLO, cold_start_s=5.0)
    run, _ = run_fleet(
        evenly(5, every_s=0.1), Policy(settings), pools=[pool(min_replicas=0)], num_initial={"engine": 0}
    )
    assert all(one.finished_s is not None for one in run.served)
    assert run.served[0].ttft_s == pytest.approx(5.5, abs=0.1)
    assert run.decided[0].reason == "from_zero"


def test_more_than_the_edge_may_hold_are_refused() -> None:
    run, _ = run_fleet(
        evenly(5, every_s=0.1), Says((1.0, {"engine": 1})), pools=[pool(min_replicas=0)], num_initial={"engine": 0},
        max_held=3,
    )  # fmt: skip
    assert [one.is_failed for one in run.served] == [False, False, False, True, True]
    assert scaling_figures(run, SLO).num_failed == 2


def test_who_waited_too_long_at_the_edge_is_refused() -> None:
    run, _ = run_fleet(
        evenly(1, every_s=0.1), Says(), pools=[pool(min_replicas=0)], num_initial={"engine": 0}, max_hold_s=7.0
    )
    assert run.served[0].is_failed
    assert run.end_s < 12.0


def test_a_policy_sees_sums_that_only_rise_and_what_is_there() -> None:
    policy = Says()
    run_fleet(evenly(100, every_s=0.1), policy)
    last = policy.seen[-1]
    assert last.counters.num_arrived == 91
    assert last.counters.num_prompt_tokens == 91 * 32
    assert last.pools[0].num_ready == 1
    arrived = [snapshot.counters.num_arrived for snapshot in policy.seen]
    assert arrived == sorted(arrived)


def test_prompts_and_answers_run_on_the_replicas_of_their_roles() -> None:
    pools = [pool("prefill", Role.PREFILL), pool("decode", Role.DECODE)]
    fixed = {"prefill": 1, "decode": 1}
    run, _ = run_fleet(evenly(50, every_s=0.05), FixedPeak(fixed), pools=pools, num_initial=fixed)
    assert all(one.finished_s is not None and one.tpot_s is not None for one in run.served)
    assert {one.replica for one in run.served} == {1}


def test_a_replica_that_changes_its_role_starts_nothing() -> None:
    pools = [pool("prefill", Role.PREFILL), pool("decode", Role.DECODE)]
    initial = {"prefill": 2, "decode": 1}
    policy = Says((0.0, initial), role_at_s=1.0)
    run, _ = run_fleet(evenly(100, every_s=0.05), policy, pools=pools, num_initial=initial)
    assert (run.num_role_changes, run.num_starts) == (1, 0)
    assert policy.seen[-1].pools[0].num_lent == 1
    assert all(one.finished_s is not None for one in run.served)


def test_a_change_of_direction_is_a_reversal() -> None:
    changes = [(0.0, 2), (1.0, 3), (2.0, 5), (3.0, 4), (4.0, 3), (5.0, 6)]
    assert reversals(changes) == 2


def test_the_policy_follows_a_load_that_one_replica_does_not_hold_and_goes_back() -> None:
    requests = (
        evenly(60, every_s=0.5) + evenly(12_000, every_s=0.005, from_s=30.0) + evenly(120, every_s=0.5, from_s=90.0)
    )
    settings = PolicySettings(slo=SLO, cold_start_s=5.0, quiet_s=20.0)
    run, _ = run_fleet(requests, Policy(settings))
    targets = [target for _, target in run.targets["engine"]]
    assert max(targets) > 1
    assert targets[-1] < max(targets)
    assert all(one.finished_s is not None for one in run.served)
