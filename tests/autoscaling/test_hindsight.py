"""What sizes known ahead cost and attain: the best for each window, and no better than a fixed fleet for the whole."""

from __future__ import annotations

from dataclasses import replace

from manta.autoscaling.signals import FleetSnapshot, PoolState
from manta.autoscaling.simulator.hindsight import Found, Held, Present, Standing, choices

LATE = {1: [5.0, 6.0, 15.0], 2: [5.0], 3: []}
"""By size of a fixed fleet."""


def test_over_the_whole_time_the_choices_are_the_fixed_fleets() -> None:
    assert choices(LATE, window_s=20.0, end_s=20.0) == [(20.0, 3), (40.0, 1), (60.0, 0)]


def test_each_window_has_the_size_that_is_best_for_it() -> None:
    found = choices(LATE, window_s=10.0, end_s=20.0)
    assert found == [(20.0, 3), (30.0, 2), (40.0, 1), (50.0, 0)]


def test_what_is_no_better_for_more_is_no_choice() -> None:
    assert choices({1: [], 2: []}, window_s=10.0, end_s=20.0) == [(20.0, 0)]


def test_a_last_window_that_is_shorter_costs_less() -> None:
    assert choices({1: []}, window_s=10.0, end_s=15.0) == [(15.0, 0)]


def test_a_standing_fleet_stays_for_its_idle_time_and_is_back_with_the_first_request() -> None:
    policy, found = Standing(size=8, least=2, idle_s=30.0), []
    state = policy.initial()
    for now_s, num_running in ((0.0, 1), (10.0, 0), (30.0, 0), (40.0, 0), (50.0, 1)):
        pool = PoolState(name="engine", num_running=num_running)
        state, decision = policy.decide(state, FleetSnapshot(pools=(pool,)), now_s)
        found.append(decision.targets["engine"])
    assert found == [8, 8, 8, 2, 8]


def test_a_fleet_for_the_present_has_what_is_needed_now_and_keeps_it_for_its_time() -> None:
    policy = Present((0.0, 10.0, 20.0), (1, 4, 1), surge=1.0, keep_s=15.0)
    assert [wanted(policy, now_s) for now_s in (9.0, 10.0, 20.0, 34.0, 35.0)] == [1, 4, 4, 4, 1]


def test_a_fleet_for_the_present_is_larger_while_many_requests_wait() -> None:
    policy = Present((0.0, 10.0), (1, 4), surge=2.5, keep_s=0.0)
    assert [wanted(policy, 12.0, num_waiting=num) for num in (20, 21)] == [4, 10]
    assert wanted(replace(policy, surge=9.0), 12.0, num_waiting=21) == 16


def wanted(policy: Present, now_s: float, *, num_waiting: int = 0) -> int:
    """Of two ready replicas, 16 at most."""
    pool = PoolState(name="engine", num_ready=2, max_replicas=16, num_waiting=num_waiting)
    _, decision = policy.decide(None, FleetSnapshot(pools=(pool,)), now_s)
    return decision.targets["engine"]


def test_the_cheapest_attains_enough_and_the_best_can_be_afforded() -> None:
    few, some, many = Held(1.0, 0.5), Held(2.0, 0.9), Held(4.0, 0.99)
    assert Found.of([few, some, many], least_attainment=0.95, most_gpu_hours=3.0) == Found(many, some)
    assert Found.of([some], least_attainment=0.95, most_gpu_hours=1.0) == Found(None, None)
