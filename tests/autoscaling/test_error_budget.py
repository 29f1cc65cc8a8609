"""What is saved of the error budget pays for fewer replicas, for requests that wait and for those that are late."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from manta.autoscaling.capacity import ReplicaSize, load
from manta.autoscaling.damping import Damping
from manta.autoscaling.error_budget import ErrorBudget
from manta.autoscaling.forecast import Samples, forecast
from manta.autoscaling.policy import Policy
from manta.autoscaling.policy_settings import PolicySettings
from manta.autoscaling.signals import Counters, FleetSnapshot, PoolState
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided
from tests.autoscaling.policy_runs import COSTS, SLO, WORK

SETTINGS = PolicySettings(slo=SLO, cold_start_s=20.0)
SIZE = ReplicaSize(COSTS, 256, 0)
"""Two hold 59.4 requests/s of 1,000 + 250 tokens, each more another 30."""
SPENT = 0.012
"""Late requests that leave nothing of the budget, and may be chance."""


def ended(num: int, *, late: int = 0) -> Counters:
    return Counters(num_finished=num, num_good=num - late, num_late_ttft=late)


def spent(*looks: tuple[float, int, int]) -> ErrorBudget:
    """After looks at so many seconds, when so many had ended and been late."""
    budget = ErrorBudget().learn(Counters(), 0.0)
    for now_s, num, late in looks:
        budget = budget.learn(ended(num, late=late), now_s)
    return budget


@dataclass
class Fleet:
    """Replicas that are there at once, and answers as a test wants them; 1,000 + 250 tokens each."""

    pool: PoolState
    settings: PolicySettings = SETTINGS
    now_s: float = 0.0
    counters: Counters = field(default_factory=Counters)
    decided: list[Decided] = field(default_factory=list)
    num_starting: int = 0
    """Of the target."""

    def __post_init__(self) -> None:
        self._policy = Policy(self.settings)
        self._state = self._policy.initial()
        self._late = 0.0

    def run(self, seconds: int, rate: float, *, late: float = 0.0, num_waiting: int = 0) -> int:
        """The target after so long at `rate` requests/s, of which a share is late."""
        for _ in range(seconds):
            self.now_s += 1
            num = round(rate * self.now_s) - round(rate * (self.now_s - 1))
            self._late += late * num
            num_late = int(self._late)
            self._late -= num_late
            self.counters = self.counters.plus(
                Counters(num_arrived=num, num_prompt_tokens=1000 * num, num_finished=num, num_output_tokens=250 * num,
                         num_good=num - num_late, num_late_ttft=num_late)
            )  # fmt: skip
            each = load(rate, WORK, SIZE, SLO, Role.MIXED, num_replicas=self.pool.num_ready)
            num_running = round(min(each.num_running, 256) * self.pool.num_ready)
            self.pool = replace(
                self.pool,
                num_ready=self.pool.target - self.num_starting,
                num_starting=self.num_starting,
                num_waiting=num_waiting,
                num_running=num_running,
            )
            snapshot = FleetSnapshot(counters=self.counters, pools=(self.pool,))
            self._state, decision = self._policy.decide(self._state, snapshot, self.now_s)
            target = decision.targets["engine"]
            self.pool = replace(self.pool, target=target, num_ready=target)
            self.decided += decision.decided
        return self.pool.target


def fleet(num_replicas: int, settings: PolicySettings = SETTINGS) -> Fleet:
    pool = PoolState(name="engine", num_ready=num_replicas, target=num_replicas, max_replicas=64, step_costs=COSTS)
    return Fleet(pool, settings)


def seconds_until(found: Fleet, target: int, rate: float, *, late: float = 0.0) -> int:
    """From now on, at that rate."""
    begin_s = found.now_s
    while found.run(1, rate, late=late) != target:
        assert found.now_s - begin_s < 300
    return int(found.now_s - begin_s)


def test_one_in_a_hundred_may_be_late() -> None:
    assert spent((10.0, 1000, 4)).left(SLO) == pytest.approx(6.0, rel=0.01)


def test_what_was_saved_fades_in_half_an_hour() -> None:
    assert spent((10.0, 10_000, 0), (1810.0, 10_000, 0)).left(SLO) == pytest.approx(100 / 2.718, rel=0.01)


def test_requests_that_failed_are_late() -> None:
    budget = ErrorBudget().learn(Counters(), 0.0).learn(Counters(num_finished=100, num_good=100, num_failed=3), 1.0)
    assert budget.left(SLO) < 0


def test_a_wrong_guess_is_paid_for_by_what_a_tenth_of_a_cold_starts_requests_cost() -> None:
    budget = spent((10.0, 1000, 0))
    assert budget.share(SLO, 10.0, 20.0) == pytest.approx(0.5, rel=0.01)
    assert budget.share(SLO, 1.0, 20.0) == 1.0
    assert spent((10.0, 1000, 50)).share(SLO, 10.0, 20.0) == 0.0


def test_replicas_of_the_reserve_go_when_the_budget_is_saved_and_the_log_says_what_pays() -> None:
    found = fleet(3)
    assert found.run(600, 57.0) == 2
    assert [one.reason for one in found.decided] == ["quiet"]
    assert found.decided[0].sentence.endswith("requests may still be late, which pays for trying")


def test_replicas_of_the_reserve_stay_while_the_budget_is_spent() -> None:
    assert fleet(3).run(600, 57.0, late=SPENT) == 3


def test_more_may_come_than_the_model_says_is_held_by_what_makes_few_late_until_another_replica_starts() -> None:
    assert fleet(3).run(900, 60.0) == 2
    assert fleet(3, replace(SETTINGS, cold_start_s=120.0)).run(900, 60.0) == 3


def test_a_replica_of_a_large_fleet_is_not_worth_a_try() -> None:
    assert fleet(9).run(900, 231.0) == 9


def test_a_try_that_was_regretted_is_not_repeated_for_half_an_hour() -> None:
    found = fleet(3)
    found.run(600, 57.0)
    seconds_until(found, 3, 57.0, late=0.5)
    assert found.run(1700, 57.0) == 3
    assert found.run(600, 57.0) == 2


def test_a_regret_is_known_for_half_an_hour() -> None:
    regretted = Damping().fell(100.0).rose(160.0, quiet_s=120.0)
    assert regretted.is_regretted(1900.0)
    assert not regretted.is_regretted(2000.0)
    assert not Damping().rose(160.0, quiet_s=120.0).is_regretted(170.0)


def test_lateness_that_the_budget_outlasts_asks_for_nothing() -> None:
    found = fleet(3)
    found.run(600, 66.0)
    assert found.run(60, 66.0, late=0.03) == 3


def test_lateness_that_spends_the_budget_before_another_replica_came_asks_for_one() -> None:
    found = fleet(3)
    found.run(600, 66.0)
    assert seconds_until(found, 4, 66.0, late=0.15) < 60
    assert found.decided[-1].reason == "breach"


def test_while_the_budget_is_saved_the_forecast_must_ask_for_more_for_a_quarter_of_a_cold_start() -> None:
    settings = replace(SETTINGS, headroom=1.0)
    saved, spent = fleet(2, settings), fleet(2, settings)
    saved.run(600, 50.0)
    spent.run(600, 50.0, late=SPENT)
    assert seconds_until(saved, 3, 66.0) >= seconds_until(spent, 3, 66.0, late=SPENT) + 5


@pytest.mark.parametrize(("late", "target"), [(0.0, 2), (SPENT, 3)], ids=["saved", "spent"])
def test_a_few_that_wait_ask_for_a_replica_only_when_the_budget_is_spent(late: float, target: int) -> None:
    found = fleet(2)
    found.run(600, 55.0, late=late)
    assert found.run(1, 55.0, late=late, num_waiting=155) == target


def test_a_backlog_is_expected_to_grow_until_the_replicas_that_start_are_there_and_no_longer() -> None:
    """Two of four replicas start, for 20 s; the other two fall behind by 20 requests a second."""
    found = fleet(4)
    found.run(100, 80.0, late=SPENT)
    found.num_starting = 2
    assert found.run(1, 80.0, late=SPENT, num_waiting=30) == 5
    found = fleet(4)
    found.run(100, 80.0, late=SPENT)
    found.num_starting = 2
    found.run(15, 80.0, late=SPENT)
    assert found.run(1, 80.0, late=SPENT, num_waiting=30) == 4


def test_what_was_late_before_all_replicas_were_there_keeps_none_of_them() -> None:
    found = fleet(8, replace(SETTINGS, quiet_s=30.0))
    found.run(100, 200.0)
    found.num_starting = 4
    found.run(20, 200.0, late=0.9)
    found.num_starting = 0
    found.run(10, 57.0)
    begin_s = found.now_s
    while found.run(1, 57.0) == 8:
        assert found.now_s - begin_s < 45


def work_off_a_backlog(found: Fleet) -> int:
    """Of two replicas that hold what comes otherwise: others start for it, and it is gone when they are there. Returns
    how many there are then."""
    assert found.run(1, 40.0, late=0.9, num_waiting=2000) > 5
    found.num_starting = found.pool.target - 2
    found.run(20, 40.0, late=0.9, num_waiting=2000)
    found.num_starting = 0
    return found.run(1, 40.0)


def test_replicas_that_came_for_a_backlog_go_when_it_has_been_gone_for_as_long_as_one_may_last() -> None:
    found = fleet(2)
    found.run(130, 40.0)
    num = work_off_a_backlog(found)
    assert found.run(8, 40.0) == num
    assert found.run(2, 40.0) == 2
    assert found.decided[-1].sentence.startswith("2 are enough, what waited is worked off: ")


def test_replicas_that_start_for_a_backlog_are_not_sent_back_when_it_seems_gone() -> None:
    found = fleet(2)
    found.run(130, 40.0)
    num = found.run(1, 40.0, late=0.9, num_waiting=2000)
    found.num_starting = num - 2
    assert found.run(18, 40.0) == num


def test_where_a_backlog_has_come_back_replicas_stay_while_lateness_is_remembered() -> None:
    found = fleet(2)
    found.run(130, 40.0)
    work_off_a_backlog(found)
    found.run(30, 40.0)
    num = work_off_a_backlog(found)
    assert found.run(40, 40.0) == num
    assert found.run(5, 40.0) == 2


def test_a_burst_that_is_over_before_anybody_is_late_is_none() -> None:
    samples = Samples()
    for second in range(120):
        samples = samples.add(float(second), 10 * second + 30 * max(second - 115, 0))
    assert forecast(samples, horizon_s=40.0).is_burst
    assert not forecast(samples, horizon_s=40.0, patience_s=30.0).is_burst
