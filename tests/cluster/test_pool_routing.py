"""Routing over prefill and decode replicas: detours that must be taken or cannot be, and what is left of a pool."""

from __future__ import annotations

from typing import Any

import pytest

from manta.cluster.routing.policy import Decision, NoRoom, NoRoomReason, RouteRequest, RoutingSettings, decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.step_costs import StepCosts

COSTS = StepCosts(overhead_s=0.005, weights_s=0.005, token_s=2e-5, pair_s=0.0, context_token_s=1e-8)
ALWAYS = RoutingSettings(detour_from_tokens=100, ramp_s=0.0)


@pytest.fixture(params=[COSTS, None], ids=["known speed", "unknown speed"])
def costs(request: pytest.FixtureRequest) -> StepCosts | None:
    return request.param


def view(name: str, role: Role, costs: StepCosts | None, *, max_requests: int = 8) -> ReplicaView:
    return ReplicaView(
        name, role=role, block_size=16, num_blocks=1000, max_num_seqs=8, tokens_a_step=512, costs=costs,
        max_requests=max_requests,
    )  # fmt: skip


def ask(views: list[ReplicaView], *, settings: RoutingSettings = ALWAYS, **fields: Any) -> Decision | NoRoom:
    request = RouteRequest(
        **{"request_id": "r", "num_prompt_tokens": 1000, "block_hashes": (), "expected_output_tokens": 64, **fields}
    )
    return decide(request, views, PrefixIndex(max_blocks=1000), now_s=100.0, settings=settings, tie=0.0)


def chosen(decision: Decision | NoRoom) -> tuple[str, str | None]:
    assert isinstance(decision, Decision), decision
    return decision.replica_id, decision.prefill_replica_id


def test_a_prompt_of_so_many_tokens_goes_over_a_prefill_replica(costs: StepCosts | None) -> None:
    views = [view("p", Role.PREFILL, costs), view("d", Role.DECODE, costs)]
    assert chosen(ask(views)) == ("d", "p")
    assert chosen(ask(views, num_prompt_tokens=100)) == ("d", "p")
    assert chosen(ask(views, num_prompt_tokens=99)) == ("d", None)


def test_of_several_the_less_loaded_ones_are_paired(costs: StepCosts | None) -> None:
    views = [view(name, role, costs) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))]
    busy = [view(name, role, costs) for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))]
    for one in busy:
        for i in range(3):
            one.sent(f"r{i}", 2000, 2000, 100.0)
    assert chosen(ask([*busy, *views])) == ("d", "p")


def test_an_idle_decode_replica_does_a_short_prompt_by_itself_when_nothing_must_be() -> None:
    views = [view("p", Role.PREFILL, COSTS), view("d", Role.DECODE, COSTS)]
    assert chosen(ask(views, settings=RoutingSettings(ramp_s=0.0))) == ("d", None)


def test_what_cannot_take_a_detour_takes_none(costs: StepCosts | None) -> None:
    views = [view("p", Role.PREFILL, costs), view("d", Role.DECODE, costs)]
    assert chosen(ask(views, may_detour=False)) == ("d", None)


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_without_a_prefill_replica_the_others_do_it_all(costs: StepCosts | None, role: Role) -> None:
    assert chosen(ask([view("d", role, costs)])) == ("d", None)


def test_without_any_other_a_prefill_replica_does_it_all(costs: StepCosts | None) -> None:
    assert chosen(ask([view("p", Role.PREFILL, costs)])) == ("p", None)


def test_a_prefill_replica_does_not_step_in_for_decode_replicas_that_are_full(costs: StepCosts | None) -> None:
    full = view("d", Role.DECODE, costs, max_requests=1)
    full.sent("other", 10, 10, 100.0)
    answer = ask([view("p", Role.PREFILL, costs), full])
    assert isinstance(answer, NoRoom)
    assert answer.reason is NoRoomReason.FULL


def test_prefill_replicas_that_are_full_are_passed_by(costs: StepCosts | None) -> None:
    full = view("p", Role.PREFILL, costs, max_requests=1)
    full.sent("other", 10, 10, 100.0)
    assert chosen(ask([full, view("d", Role.DECODE, costs)])) == ("d", None)


def test_a_mixed_replica_is_taken_alone(costs: StepCosts | None) -> None:
    assert chosen(ask([view("p", Role.PREFILL, costs), view("m", Role.MIXED, costs)])) == ("m", None)
