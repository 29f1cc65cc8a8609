"""The discrete-event core: times computed by hand, stretches equal to steps, what edges know and when."""

from __future__ import annotations

import random

import pytest

from manta.autoscaling.simulator.events import AFTERWARDS, ARRIVES, STEP_ENDS, EventQueue
from manta.autoscaling.simulator.fleet import FRAME_DELAY_S, Route
from manta.autoscaling.simulator.replica import Replica
from manta.autoscaling.simulator.workload import SimRequest, Zeros
from tests.autoscaling.fleets import InTurn, fleet_of, request, spec


def test_a_lone_request_takes_its_prefill_and_its_decodes() -> None:
    fleet = fleet_of(1)
    [outcome] = fleet.run([request("a", 40, 4, at_s=1.0)])
    assert outcome.ttft_s == pytest.approx(1e-3 + 40e-4)
    assert outcome.finished_s == pytest.approx(1.0 + 5e-3 + 3e-3 + (41 + 42 + 43) * 1e-6)
    assert outcome.tpot_s == pytest.approx((3e-3 + 126e-6) / 3)
    assert fleet.replicas["r0"].log.num_steps == 4


def test_a_long_prompt_is_computed_in_chunks() -> None:
    [outcome] = fleet_of(1).run([request("a", 100, 1)])
    assert outcome.ttft_s == pytest.approx(2e-3 + 100e-4)
    assert outcome.tpot_s is None


def test_a_request_that_comes_while_a_step_runs_waits_for_the_one_that_is_planned_already() -> None:
    # Steps of a: a prefill of 5 ms, then decodes of 1 ms; b comes in the prefill, the first decode is planned by then.
    a, b = fleet_of(1).run([request("a", 40, 10), request("b", 20, 1, at_s=2e-3)])
    assert a.ttft_s == pytest.approx(5e-3)
    decodes_s = 1e-3 + 41e-6
    assert b.first_token_s == pytest.approx(5e-3 + decodes_s + 1e-3 + 20e-4 + 42e-6)


def test_requests_of_one_moment_begin_in_one_step() -> None:
    a, b = fleet_of(1).run([request("a", 20, 1), request("b", 30, 1)])
    assert a.first_token_s == b.first_token_s == pytest.approx(1e-3 + 50e-4)


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    a, b = fleet_of(1).run([request("a", 48, 1, prefix=7), request("b", 56, 1, prefix=7, at_s=1.0)])
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 48)
    assert b.ttft_s == pytest.approx(1e-3 + 8e-4)


def mixed_load(seed: int, count: int = 60) -> list[SimRequest]:
    rng = random.Random(seed)
    at_s = 0.0
    requests = []
    for index in range(count):
        at_s += rng.expovariate(60.0)
        prefix = rng.choice([None, 1, 2])
        requests.append(request(f"{index}", rng.randint(1, 150), rng.randint(1, 90), at_s=at_s, prefix=prefix))
    return requests


@pytest.mark.parametrize("num_blocks", [24, 64], ids=["short of blocks", "with room"])
@pytest.mark.parametrize("seed", range(5))
def test_a_stretch_of_steps_in_one_event_equals_stepping(seed: int, num_blocks: int) -> None:
    found = []
    for takes_stretches in (False, True):
        fleet = fleet_of(2, takes_stretches=takes_stretches, num_blocks=num_blocks)
        outcomes = fleet.run(mixed_load(seed))
        router = fleet.routers[0]
        assert isinstance(router, InTurn)
        for replica in fleet.replicas.values():
            replica.scheduler.check()
            assert replica.is_idle
        logs = [replica.log for replica in fleet.replicas.values()]
        times = [(o.first_token_s, o.finished_s, o.num_cached_tokens, o.replica_id) for o in outcomes]
        caches = [replica.scheduler.cache.all_events() for replica in fleet.replicas.values()]
        found.append((times, router.frames, caches, [(log.num_steps, log.busy_s, log.gaps) for log in logs]))
        num_events = sum(log.num_events for log in logs)
        num_preemptions = sum(replica.scheduler.num_preemptions for replica in fleet.replicas.values())
        assert (num_preemptions > 0) == (num_blocks == 24)
        assert (num_events < found[0][3][0][0] + found[0][3][1][0]) == takes_stretches
    stepped, stretched = found
    assert stretched == stepped


def test_an_edge_knows_a_step_s_news_a_little_later() -> None:
    fleet = fleet_of(1)
    fleet.run([request("a", 40, 1), request("b", 40, 1, at_s=1.0)])
    router = fleet.routers[0]
    assert isinstance(router, InTurn)
    at_s, frame = router.frames[0]
    assert at_s == pytest.approx(5e-3 + FRAME_DELAY_S)
    assert [delta.request_id for delta in frame.deltas] == ["a"]
    assert frame.cache_events is not None
    assert len(frame.cache_events.stored) == 2


class OneAtATime:
    """Lets a replica have one request only."""

    def __init__(self) -> None:
        self.num_there = 0

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        if self.num_there:
            return None
        self.num_there += 1
        return Route("r0")

    def learn(self, frame: object, now_s: float) -> None:
        self.num_there -= sum(delta.finish_reason is not None for delta in frame.deltas)  # type: ignore[attr-defined]


def test_a_request_without_room_anywhere_waits_at_its_edge_until_a_frame_says_that_there_is() -> None:
    fleet = fleet_of(1)
    fleet.routers[0] = OneAtATime()
    a, b, c = fleet.run([request(name, 40, 1) for name in "abc"])
    assert a.routed_s == 0.0
    assert b.routed_s == pytest.approx(5e-3 + FRAME_DELAY_S)
    assert c.routed_s == pytest.approx(2 * (5e-3 + FRAME_DELAY_S))
    assert fleet.num_held == 0


def test_a_request_that_a_replica_refuses_has_an_outcome_that_says_so() -> None:
    [outcome] = fleet_of(1).run([request("a", 64 * 16, 16)])
    assert outcome.finished_s is None
    assert outcome.refused is not None
    assert "maximum context length" in outcome.refused


def test_a_request_that_is_cancelled_in_a_stretch_leaves_the_others_as_stepping_would() -> None:
    ends = []
    for takes_stretches in (False, True):
        fleet = fleet_of(1, takes_stretches=takes_stretches)
        replica = fleet.replicas["r0"]

        def cancel(replica: Replica = replica) -> None:
            assert replica.cancel("b")

        fleet.events.at(0.0204, cancel)
        a, b = fleet.run([request("a", 30, 60), request("b", 30, 60)])
        assert b.finished_s is None
        assert replica.is_idle
        replica.scheduler.check()
        ends.append(a.finished_s)
    assert ends[0] == ends[1]


def test_what_happens_at_one_moment_has_an_order() -> None:
    events, done = EventQueue(), []
    for order in (AFTERWARDS, ARRIVES, STEP_ENDS):
        events.at(1.0, lambda order=order: done.append(order), order=order)
    events.at(2.0, lambda: done.append(99))
    events.run(until_s=1.5)
    assert done == [STEP_ENDS, ARRIVES, AFTERWARDS]
    assert events.now_s == 1.0


def test_a_replica_added_on_the_way_takes_requests() -> None:
    fleet = fleet_of(1)

    def add() -> None:
        fleet.add_replica("late", spec())

    fleet.events.at(0.5, add)
    outcomes = fleet.run([request("a", 40, 1), request("b", 40, 1, at_s=1.0), request("c", 40, 1, at_s=2.0)])
    assert [outcome.replica_id for outcome in outcomes] == ["r0", "late", "r0"]


def test_zeros_are_a_list_of_which_only_the_length_is_kept() -> None:
    two = [0, 0]
    zeros = Zeros(5) + two
    assert (len(zeros), list(zeros), zeros[3], zeros[-1]) == (7, [0] * 7, 0, 0)
    assert (zeros[2:4], zeros[:], zeros[5:99]) == (Zeros(2), Zeros(7), Zeros(2))
    zeros.append(0)
    zeros.extend([0, 0])
    assert len(zeros) == 10
    assert not Zeros(0)
    with pytest.raises(IndexError):
        zeros[10]


def test_the_first_frame_after_a_request_was_sent_does_not_count_it_and_the_second_does() -> None:
    fleet = fleet_of(1)
    fleet.run([request("a", 40, 10), request("b", 20, 10, at_s=2e-3)])
    router = fleet.routers[0]
    assert isinstance(router, InTurn)
    counted = [frame.snapshot.num_running + frame.snapshot.num_waiting for _, frame in router.frames]
    assert counted[:2] == [1, 2]


def test_edges_hear_of_replicas_that_are_idle_or_only_decode() -> None:
    fleet = fleet_of(2)
    fleet.run([request("long", 16, 400), request("late", 16, 2, at_s=0.3), request("later", 16, 2, at_s=10.0)])
    [router] = fleet.routers
    assert isinstance(router, InTurn)
    heard = {frame.replica_id: at_s for at_s, frame in router.frames if 10.0 - 0.5 <= at_s <= 10.0}
    assert heard == {"r0": 10.0, "r1": 10.0}


def test_a_replica_that_only_decodes_says_how_far_it_is() -> None:
    fleet = fleet_of(1, num_blocks=512, block_size=1024)
    fleet.run([request("long", 16, 900), request("late", 16, 2, at_s=0.8)])
    [router] = fleet.routers
    assert isinstance(router, InTurn)
    [beat] = [frame for at_s, frame in router.frames if at_s == 0.8]
    assert beat.snapshot.num_context_tokens > 400
