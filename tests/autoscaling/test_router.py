"""The real policy on the virtual clock: what it sends where, and what it has learned when."""

from __future__ import annotations

import pytest

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import Fleet
from manta.autoscaling.simulator.handoff import KvLink
from manta.autoscaling.simulator.router import PolicyRouter
from manta.cluster.routing.policy import RoutingSettings
from manta.cluster.routing.replica_view import ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.step_costs import StepCosts
from tests.autoscaling.fleets import BLOCK, request, spec

COSTS = StepCosts(overhead_s=1e-3, weights_s=0.0, token_s=1e-4, pair_s=0.0, context_token_s=1e-6)
SHARES_NOTHING = RoutingSettings(tie_s=0.0)


def view(replica_id: str, role: Role = Role.MIXED) -> ReplicaView:
    return ReplicaView(
        replica_id,
        role=role,
        block_size=BLOCK,
        num_blocks=64,
        max_num_seqs=8,
        tokens_a_step=64,
        max_requests=100,
        costs=COSTS,
        kv_bytes_per_token=1000.0,
    )


def fleet_of(roles: dict[str, Role], *, num_edges: int = 1) -> Fleet:
    fleet = Fleet(EventQueue(), link=KvLink(1000.0, 1e9, 1e-3))
    for replica_id in roles:
        fleet.add_replica(replica_id, spec())
    for edge in range(num_edges):
        views = [view(replica_id, role) for replica_id, role in roles.items()]
        fleet.routers.append(PolicyRouter(views, settings=SHARES_NOTHING, seed=edge))
    return fleet


def test_a_prefix_goes_where_it_is_cached() -> None:
    fleet = fleet_of(dict.fromkeys("abcd", Role.MIXED))
    outcomes = fleet.run([request(f"{i}", 120, 4, at_s=i * 1.0, prefix=i % 2) for i in range(20)])
    places = [
        {o.replica_id for o in outcomes if o.request.block_hashes == outcomes[i].request.block_hashes} for i in (0, 1)
    ]
    assert [len(place) for place in places] == [1, 1]
    assert sum(outcome.num_cached_tokens for outcome in outcomes) == 18 * 112


def test_a_hot_prefix_spreads_when_waiting_takes_longer_than_computing_it_again() -> None:
    fleet = fleet_of(dict.fromkeys("abcd", Role.MIXED))
    outcomes = fleet.run([request(f"{i}", 200, 40, at_s=i * 2e-3, prefix=1) for i in range(60)])
    assert {outcome.replica_id for outcome in outcomes} == set("abcd")


def test_edges_learn_of_each_other_s_requests_from_the_frames() -> None:
    fleet = fleet_of(dict.fromkeys("abcd", Role.MIXED), num_edges=2)
    outcomes = fleet.run([request(f"{i}", 120, 4, at_s=i * 1.0, prefix=1) for i in range(4)])
    assert len({outcome.replica_id for outcome in outcomes}) == 1
    assert [outcome.num_cached_tokens for outcome in outcomes] == [0, 112, 112, 112]


def test_nothing_is_left_when_all_have_ended() -> None:
    fleet = fleet_of(dict.fromkeys("ab", Role.MIXED))
    fleet.run([request(f"{i}", 50, 20, at_s=i * 3e-3) for i in range(40)])
    [router] = fleet.routers
    assert isinstance(router, PolicyRouter)
    assert router.num_under_way == 0
    assert [one.num_own for one in router.views.values()] == [0, 0]
    assert router.num_resyncs == 0


def test_its_estimate_of_a_lone_request_is_what_happens() -> None:
    [outcome] = fleet_of({"a": Role.MIXED}).run([request("a", 60, 4)])
    assert outcome.estimated_ttft_s == pytest.approx(outcome.ttft_s)


def test_long_prompts_take_the_detour_and_short_ones_do_not() -> None:
    fleet = fleet_of({"p": Role.PREFILL, "d": Role.DECODE})
    stream = [request(f"s{i}", 10, 300, at_s=i * 1e-3) for i in range(2)]
    long, short = request("long", 640, 20, at_s=0.1), request("short", 4, 20, at_s=0.2)
    outcomes = {outcome.request.request_id: outcome for outcome in fleet.run([*stream, long, short])}
    assert outcomes["long"].prefill_replica_id == "p"
    assert outcomes["long"].replica_id == "d"
    assert outcomes["short"].prefill_replica_id is None
    assert fleet.handoffs.num_recomputed == 0
