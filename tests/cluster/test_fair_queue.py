"""Start-time fair queueing over tenants: literal orders, and shares over random arrivals."""

from __future__ import annotations

import random

import pytest

from manta.cluster.routing.fair_queue import FairQueue


def served(queue: FairQueue) -> str:
    names = ""
    while len(queue):
        names += queue.pop()[0]
    return names


def test_one_tenant_is_served_in_the_order_of_arrival():
    queue = FairQueue()
    for number, cost in enumerate((5.0, 1.0, 3.0)):
        queue.push(str(number), tenant="a", weight=1.0, cost=cost)
    assert served(queue) == "012"


def test_a_tenant_that_sends_much_does_not_delay_one_that_sends_little():
    queue = FairQueue()
    for number in range(6):
        queue.push(f"a{number}", tenant="a", weight=1.0, cost=10.0)
    queue.push("b0", tenant="b", weight=1.0, cost=10.0)
    queue.push("b1", tenant="b", weight=1.0, cost=10.0)
    assert served(queue) == "ababaaaa"


def test_tenants_get_shares_by_weight_in_costs_and_not_in_requests():
    queue = FairQueue()
    for number in range(12):
        queue.push(f"a{number}", tenant="a", weight=2.0, cost=10.0)
        queue.push(f"b{number}", tenant="b", weight=1.0, cost=5.0)
    first = served(queue)[:9]
    assert (10 * first.count("a"), 5 * first.count("b")) == (50, 20)


def test_who_was_silent_saves_nothing_up():
    queue = FairQueue()
    for number in range(4):
        queue.push(f"a{number}", tenant="a", weight=1.0, cost=10.0)
        assert queue.pop() == f"a{number}"
    for number in range(3):
        queue.push(f"a{number}", tenant="a", weight=1.0, cost=10.0)
        queue.push(f"b{number}", tenant="b", weight=1.0, cost=10.0)
    assert served(queue) == "bababa"  # and not "bbbaaa"


def test_lower_priorities_come_first_whatever_was_served_before():
    queue = FairQueue()
    queue.push("x", tenant="a", weight=1.0, cost=1.0, priority=1)
    queue.push("y", tenant="a", weight=1.0, cost=100.0, priority=0)
    queue.push("z", tenant="a", weight=1.0, cost=100.0, priority=0)
    assert (queue.first, queue.last) == ("y", "x")
    assert served(queue) == "yzx"


def test_an_entry_that_is_taken_out_is_not_charged():
    queue = FairQueue()
    queue.push("a0", tenant="a", weight=1.0, cost=100.0)
    queue.push("b0", tenant="b", weight=1.0, cost=10.0)
    assert queue.remove("a0", weight=1.0)
    assert not queue.remove("a0", weight=1.0)
    queue.push("a1", tenant="a", weight=1.0, cost=10.0)
    queue.push("a2", tenant="a", weight=1.0, cost=10.0)
    assert served(queue) == "baa"
    assert "a0" not in queue


def test_what_took_more_than_it_was_queued_with_delays_its_tenant_s_next():
    queue = FairQueue()
    queue.push("a0", tenant="a", weight=1.0, cost=10.0)
    queue.pop()
    queue.settle("a", 25.0, weight=1.0)
    for number in range(4):
        queue.push(f"b{number}", tenant="b", weight=1.0, cost=10.0)
    queue.push("a1", tenant="a", weight=1.0, cost=10.0)
    assert served(queue) == "bbbba"


def test_the_cost_ahead_of_a_newcomer_counts_those_that_come_before_it():
    queue = FairQueue()
    for number in range(3):
        queue.push(f"a{number}", tenant="a", weight=1.0, cost=10.0)
    assert queue.cost_ahead("a") == 30.0
    assert queue.cost_ahead("b") == 10.0  # level with the first, which came earlier
    assert queue.cost_ahead("b", priority=-1) == 0.0
    assert queue.cost_ahead("b", priority=1) == 30.0
    assert queue.comes_last("a")
    assert not queue.comes_last("b")


@pytest.mark.parametrize("seed", range(4))
def test_backlogged_tenants_differ_by_no_more_than_a_request_each(seed: int):
    """The bound of the paper (theorem 1): while both are backlogged, what they got over their weights differs by
    at most a largest request over weight of each."""
    rng, queue = random.Random(seed), FairQueue()
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    costs: dict[str, float] = {}
    waiting = dict.fromkeys(weights, 0)
    got = dict.fromkeys(weights, 0.0)
    for number in range(3000):
        for tenant, weight in weights.items():
            while waiting[tenant] < 3:
                request_id = f"{tenant}{number}.{waiting[tenant]}"
                costs[request_id] = rng.uniform(1.0, 20.0)
                queue.push(request_id, tenant=tenant, weight=weight, cost=costs[request_id])
                waiting[tenant] += 1
        request_id = queue.pop()
        got[request_id[0]] += costs[request_id] / weights[request_id[0]]
        waiting[request_id[0]] -= 1
        for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
            assert abs(got[one] - got[other]) <= 20.0 / weights[one] + 20.0 / weights[other]


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_loses_nobody_and_serves_by_priority(seed: int):
    rng, queue = random.Random(seed), FairQueue()
    queued: dict[str, int] = {}
    for number in range(2000):
        action = rng.random()
        if action < 0.5:
            priority = rng.randint(-1, 1)
            queue.push(str(number), tenant=rng.choice("ab"), weight=1.0, cost=rng.randint(1, 9), priority=priority)
            queued[str(number)] = priority
        elif action < 0.6 and queued:
            request_id = rng.choice(sorted(queued))
            assert queue.remove(request_id, weight=1.0)
            del queued[request_id]
        elif action < 0.7:
            queue.settle(rng.choice("ab"), rng.uniform(-5, 5), weight=1.0, priority=rng.randint(-1, 1))
        elif queued:
            request_id = queue.pop()
            assert queued.pop(request_id) <= min(queued.values(), default=9)
        assert len(queue) == len(queued)
        assert (queue.first in queued) == bool(queued)
