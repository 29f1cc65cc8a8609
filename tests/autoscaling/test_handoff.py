"""Requests whose prompt one simulated replica computes and another decodes: times by hand, blocks, bytes."""

from __future__ import annotations

import pytest

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import FRAME_DELAY_S, Fleet, Route
from manta.autoscaling.simulator.handoff import KvLink
from manta.autoscaling.simulator.replica import Frame
from manta.autoscaling.simulator.workload import Outcome, SimRequest
from tests.autoscaling.fleets import request, spec

JOINS_S = 1e-3 + 1e-4
"""The first step where it decodes: the token that came with the KV is computed as one of a prompt."""
LINK = KvLink(bytes_per_token=1000.0, bytes_per_s=1e6, latency_s=2e-3)
"""A token's KV takes 1 ms."""


class Detour:
    """Computes every prompt on p and decodes on d."""

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        return Route("d", "p")

    def learn(self, frame: Frame, now_s: float) -> None:
        pass


def pools(link: KvLink = LINK, **changes: object) -> Fleet:
    fleet = Fleet(EventQueue(), link=link)
    fleet.add_replica("p", spec())
    fleet.add_replica("d", spec(**changes))
    fleet.routers.append(Detour())
    return fleet


def run(fleet: Fleet, requests: list[SimRequest]) -> list[Outcome]:
    outcomes = fleet.run(requests)
    for replica in fleet.replicas.values():
        assert replica.is_idle
        replica.scheduler.check()
        assert replica.scheduler.cache.pool.num_used == 0
        assert replica.scheduler.set_aside.num_blocks == 0
    return outcomes


def test_the_first_token_comes_from_the_one_and_the_others_from_the_other_when_the_kv_is_there() -> None:
    fleet = pools()
    [outcome] = run(fleet, [request("a", 40, 3)])
    first_s = 1e-3 + 40e-4
    assert outcome.first_token_s == pytest.approx(first_s)
    moved_s = 40e-3 + 2e-3  # layer by layer from the beginning, then the latency
    assert outcome.finished_s == pytest.approx(moved_s + JOINS_S + 1e-3 + 42e-6)
    assert (outcome.replica_id, outcome.prefill_replica_id) == ("d", "p")
    assert fleet.replicas["d"].scheduler.num_generated_tokens == 2
    assert (fleet.handoffs.num_sent, fleet.handoffs.num_recomputed, fleet.handoffs.num_bytes) == (1, 0, 40_000.0)


def test_chunks_move_while_later_ones_are_computed() -> None:
    slow = KvLink(bytes_per_token=1000.0, bytes_per_s=1e7, latency_s=0.0, tail=0.5)  # 0.1 ms a token, as computing it
    [outcome] = run(pools(slow), [request("a", 160, 2)])
    first_s = 3e-3 + 160e-4
    assert outcome.first_token_s == pytest.approx(first_s)
    assert outcome.finished_s == pytest.approx(first_s + 3.2e-3 + JOINS_S)  # half of the last 64 tokens


def test_a_way_is_used_by_one_request_after_the_other() -> None:
    a, b = run(pools(), [request("a", 40, 2), request("b", 40, 2)])
    assert a.finished_s == pytest.approx(42e-3 + JOINS_S)
    assert b.finished_s is not None
    assert b.finished_s > 80e-3


def test_what_is_cached_where_it_decodes_is_not_sent_again() -> None:
    fleet = pools()
    _, b = run(fleet, [request("a", 48, 2, prefix=7), request("b", 56, 2, prefix=7, at_s=1.0)])
    assert b.num_cached_tokens == 48  # where its prompt was computed
    assert fleet.handoffs.num_bytes == (48 + 8) * 1000.0


def test_an_answer_of_one_token_goes_nowhere() -> None:
    fleet = pools()
    [outcome] = run(fleet, [request("a", 40, 1)])
    assert outcome.finished_s == outcome.first_token_s
    assert fleet.replicas["d"].scheduler.num_generated_tokens == 0
    assert fleet.handoffs.num_sent == 0


def test_without_room_where_it_decodes_the_prompt_is_computed_again() -> None:
    fleet = pools(num_blocks=4)
    a, b = run(fleet, [request("a", 40, 12), request("b", 40, 12, at_s=1e-3)])
    assert fleet.handoffs.num_recomputed == 1
    assert a.finished_s is not None
    assert b.finished_s is not None
    assert b.first_token_s is not None
    assert b.finished_s > b.first_token_s + FRAME_DELAY_S
    assert fleet.replicas["d"].scheduler.num_generated_tokens == 22
