"""An edge's door and queue: rates, bounds, deadlines, priorities and who gives way."""

from __future__ import annotations

from typing import Any

import pytest

from manta.cluster.routing.admission import Admission, AdmissionSettings, Offer, RefusalCause, Tenant

A, B = Tenant(name="a"), Tenant(name="b")


def admission(*tenants: Tenant, **settings: Any) -> Admission:
    return Admission(tenants or (A, B), AdmissionSettings(**settings), now_s=0.0)


def offer(request_id: str, tenant: str = "a", num_tokens: int = 100, **fields: Any) -> Offer:
    return Offer(request_id=request_id, tenant=tenant, num_tokens=num_tokens, **fields)


def let_in(door: Admission, *offers: Offer, now_s: float = 0.0) -> None:
    for one in offers:
        assert door.offer(one, now_s) == []


def order(door: Admission, now_s: float = 0.0) -> list[str]:
    found = []
    while (first := door.first()) is not None:
        assert door.start(now_s) is first
        found.append(first.request_id)
    return found


def test_waiting_requests_of_two_tenants_take_turns():
    door = admission()
    let_in(door, *(offer(f"a{number}") for number in range(3)), *(offer(f"b{number}", "b") for number in range(2)))
    assert door.num_waiting == 5
    assert order(door) == ["a0", "b0", "a1", "b1", "a2"]
    assert (door.num_waiting, door.num_started) == (0, 5)


def test_a_priority_of_a_request_goes_before_that_of_its_tenant():
    door = admission(A, Tenant(name="low", priority=5))
    let_in(door, offer("x", "low"), offer("y", "low", priority=-1), offer("z"))
    assert order(door) == ["y", "z", "x"]


def test_a_full_queue_refuses_who_would_be_served_last_anyway():
    door = admission(max_queued=2)
    let_in(door, offer("a0"), offer("a1"))
    [refused] = door.offer(offer("a2"), 0.0)
    assert (refused.request_id, refused.cause) == ("a2", RefusalCause.QUEUE)
    assert refused.estimated_wait_s > 0
    assert door.num_waiting == 2


def test_in_a_full_queue_the_last_gives_way_to_who_would_be_served_before_it():
    door = admission(max_queued=2)
    let_in(door, offer("a0"), offer("a1"))
    [refused] = door.offer(offer("b0", "b"), 0.0)
    assert (refused.request_id, refused.cause) == ("a1", RefusalCause.QUEUE)
    assert order(door) == ["a0", "b0"]


def test_a_tenant_has_a_bound_of_its_own():
    door = admission(Tenant(name="a", max_queued=1), B)
    let_in(door, offer("a0"), offer("b0", "b"))
    [refused] = door.offer(offer("a1"), 0.0)
    assert refused.cause is RefusalCause.TENANT_QUEUE
    door.start(0.0)
    let_in(door, offer("a2"))


def test_tokens_beyond_a_tenant_s_rate_are_refused_with_the_time_until_they_are_there():
    door = admission(Tenant(name="a", tokens_per_s=10, burst_tokens=100), B)
    let_in(door, offer("a0", num_tokens=80))
    [refused] = door.offer(offer("a1", num_tokens=50), 0.0)
    assert (refused.cause, refused.estimated_wait_s) == (RefusalCause.RATE, 3.0)
    let_in(door, offer("b0", "b", num_tokens=10**6))
    let_in(door, offer("a1", num_tokens=50), now_s=3.0)


def test_what_was_not_used_is_given_back():
    door = admission(Tenant(name="a", tokens_per_s=10, burst_tokens=100))
    let_in(door, offer("a0", num_tokens=100))
    assert door.withdraw("a0", 0.0)
    assert not door.withdraw("a0", 0.0)
    let_in(door, offer("a1", num_tokens=100))
    door.start(0.0)
    door.ended("a1", 30, 0.0)
    door.ended("a1", 30, 0.0)
    let_in(door, offer("a2", num_tokens=70))
    assert door.offer(offer("a3", num_tokens=1), 0.0)[0].cause is RefusalCause.RATE


def test_what_took_more_than_expected_counts_against_its_tenant():
    door = admission(Tenant(name="a", tokens_per_s=10, burst_tokens=100))
    let_in(door, offer("a0", num_tokens=50))
    door.start(0.0)
    door.ended("a0", 120, 0.0)
    assert door.offer(offer("a1", num_tokens=10), 0.0)[0].estimated_wait_s == 3.0


def test_an_edge_s_share_of_a_rate_follows_the_demand():
    door = admission(Tenant(name="a", tokens_per_s=100, burst_tokens=100))
    door.set_share("a", 0.25, 0.0)
    let_in(door, offer("a0", num_tokens=25))
    assert door.offer(offer("a1", num_tokens=25), 0.0)[0].estimated_wait_s == 1.0
    assert door.demand("a", 0.0) == 5.0  # 50 tokens over 10 s, refused ones included


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_estimated_wait():
    door = admission()
    [refused] = door.offer(offer("a0", deadline_s=12.0), 10.0, first_token_s=2.5)
    assert (refused.cause, refused.estimated_wait_s) == (RefusalCause.DEADLINE, 2.5)
    assert door.offer(offer("a0", deadline_s=12.5), 10.0, first_token_s=2.5) == []


def test_a_tenant_s_deadline_holds_for_requests_that_have_none():
    door = admission(Tenant(name="a", deadline_s=2.0))
    assert door.offer(offer("a0"), 10.0, first_token_s=2.5)[0].cause is RefusalCause.DEADLINE
    assert door.offer(offer("a1", deadline_s=20.0), 10.0, first_token_s=2.5) == []


def drained() -> Admission:
    """A queue that emptied at 100 tokens a second while requests waited."""
    door = admission()
    let_in(door, *(offer(f"a{number}") for number in range(20)))
    for second in range(10):
        door.start(float(second))
    return door


def test_the_wait_is_what_is_ahead_over_how_fast_the_queue_empties():
    door = drained()
    assert door.num_waiting == 10
    assert door.queue_s("a") == pytest.approx(10.0)
    assert door.queue_s("a", priority=1) == pytest.approx(10.0)
    assert door.queue_s("b") == 0.0  # its turn is next


def test_requests_that_would_wait_beyond_their_deadline_or_for_too_long_are_refused():
    door = drained()
    assert door.offer(offer("a", deadline_s=18.0), 9.0)[0].cause is RefusalCause.DEADLINE
    door = drained()
    assert door.offer(offer("a"), 9.0, first_token_s=51.0)[0].cause is RefusalCause.WAIT


def test_those_that_waited_in_vain_are_taken_out():
    door = admission(max_wait_s=30.0)
    let_in(door, offer("soon", deadline_s=5.0), offer("late", deadline_s=9.0), offer("any"))
    assert door.overdue(4.0, first_token_s=1.0) == []
    [refused] = door.overdue(4.5, first_token_s=1.0)
    assert (refused.request_id, refused.cause) == ("soon", RefusalCause.DEADLINE)
    assert [one.request_id for one in door.overdue(31.0)] == ["late", "any"]
    assert door.num_waiting == 0
