"""Replicas are held for bursts that come back, as many as would have kept the objective, and say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manta.autoscaling.floor import Floor
from manta.autoscaling.policy_settings import PolicySettings
from manta.cluster.scaling import ReasonCode
from tests.autoscaling.policy_runs import SLO, Run, run

SETTINGS = PolicySettings(slo=SLO, cold_start_s=20.0, quiet_s=60.0)
LASTS_S, EVERY_S = 10, 200
"""Bursts are over before a replica starts, and come back after those that did have stopped."""


class Load:
    """Requests second by second, each replica good for ten a second."""

    def __init__(self) -> None:
        self.floor, self.now_s, self.counted = Floor(), 0.0, 0

    def come(self, seconds: int, rate: int, *, followed: int = 1, is_burst: bool = True) -> int:
        """The floor after so long, while following the load asks for `followed`."""
        for _ in range(seconds):
            self.now_s += 1
            self.counted += rate
            self.floor = self.floor.learn(
                self.counted, followed, self.now_s,
                rate_each=10.0, most=20, is_burst=is_burst, cold_start_s=20.0, settings=SETTINGS,
            )  # fmt: skip
        return self.floor.num_replicas(SLO)

    def burst(self, rate: int, *, is_burst: bool = True) -> int:
        self.come(LASTS_S, rate, is_burst=is_burst)
        return self.come(EVERY_S - LASTS_S, 1)


def test_one_burst_is_no_reason_to_hold_replicas() -> None:
    assert Load().burst(60) == 0


def test_a_burst_that_came_back_is_held_with_what_may_wait_within_the_limit() -> None:
    """Ten seconds at 60/s, of which one second's may wait: 55/s is held in time, by six replicas."""
    load = Load()
    load.burst(60)
    assert load.burst(60) == 6


def test_the_highest_of_many_bursts_is_not_provided_for_until_it_comes_again() -> None:
    load = Load()
    load.burst(60)
    load.burst(120)
    assert load.burst(60) == 6
    assert load.burst(120) == 11


def test_as_many_late_as_the_objective_allows_need_no_replica() -> None:
    """Of some 90,000 requests that are remembered 900 may be late, and of a burst some 650 are."""
    load = Load()
    load.come(3000, 60, followed=10, is_burst=False)
    load.burst(60)
    assert load.burst(60) == 0


def test_a_rise_that_replicas_can_follow_is_none_of_the_floors() -> None:
    load = Load()
    for _ in range(4):
        load.come(200, 1)
        load.come(400, 60, followed=7, is_burst=False)
    assert load.floor.num_replicas(SLO) == 0


def test_replicas_that_follow_are_reckoned_with_for_a_quiet_window_after_a_start() -> None:
    """Bursts 30 s apart find those that came for the one before."""
    load = Load()
    load.come(LASTS_S, 60, followed=6)
    load.come(30, 1)
    load.come(LASTS_S, 60, followed=6)
    assert load.come(30, 1) == 0


def test_what_following_asked_for_at_first_is_there_from_the_beginning() -> None:
    load = Load()
    load.come(2, 60, followed=7)
    assert not any(load.floor.waiting)


def test_what_came_back_is_forgotten_after_hours() -> None:
    load = Load()
    load.burst(60)
    load.burst(60)
    load.now_s += 4 * 3600
    assert load.come(1, 1) == 0


def test_fleets_that_nobody_was_late_with_are_not_remembered() -> None:
    load = Load()
    load.burst(60)
    assert len(load.floor.late) == 5


def test_without_a_limit_for_the_first_token_nobody_is_late() -> None:
    floor, settings = Floor(), replace(SETTINGS, slo=replace(SLO, ttft_s=None))
    for second in range(100):
        floor = floor.learn(
            100 * second, 1, float(second),
            rate_each=10.0, most=20, is_burst=True, cold_start_s=20.0, settings=settings,
        )  # fmt: skip
    assert floor.num_replicas(SLO) == 0


@pytest.fixture(scope="module")
def recurring() -> Run:
    """Bursts from 190 s and from 390 s on."""
    return run(lambda second: 200.0 if second % EVERY_S >= EVERY_S - LASTS_S else 10.0, 560, settings=SETTINGS)


def test_the_policy_holds_replicas_after_the_second_burst_as_not_after_the_first(recurring: Run) -> None:
    assert recurring.targets[350] == 1
    assert recurring.targets[-1] == 6


def test_the_log_says_what_is_held_for_bursts(recurring: Run) -> None:
    last = recurring.decided[-1]
    assert last.reason == ReasonCode.RECURRING
    assert last.sentence.startswith("6 are held for bursts that come back and are over before a replica starts: 5 ")
