"""The edge's gate: whose turn it is, who waits and for how long, and that nothing is left of whoever gave up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from manta.cluster.routing.admission import Offer, Tenant
from manta.cluster.routing.decision import NoRoom, NoRoomReason, RouteRequest, RoutingSettings
from manta.cluster.routing.policy import decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.engine.errors import Overloaded, Unavailable
from manta.replicas.edge.gate import Gate

NO_REPLICA = decide(
    RouteRequest(request_id="r", num_prompt_tokens=1, block_hashes=(), expected_output_tokens=1),
    [],
    PrefixIndex(max_blocks=1),
    now_s=0.0,
    settings=RoutingSettings(),
    tie=0.0,
)


def no_room(reason: NoRoomReason, wait_s: float = 1.0) -> NoRoom:
    assert isinstance(NO_REPLICA, NoRoom)
    return NoRoom(reason, wait_s, NO_REPLICA._considered)


class Room:
    """A replica with so many places, behind a gate that has a clock of its own."""

    def __init__(self, places: int, *tenants: Tenant, full: NoRoomReason = NoRoomReason.FULL, **fields: Any) -> None:
        self.places = places
        self.full = no_room(full)
        self.begun: list[str] = []
        self.undone: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.now_s = 0.0
        self.gate: Gate[str] = Gate(
            tenants,
            **{"max_queued": 8, "max_wait_s": 60.0, **fields},
            undo=self.undone.append,
            on_refused=lambda tenant, reason: self.refused.append((tenant, reason)),
            clock=lambda: self.now_s,
        )

    def begin(self, name: str) -> Callable[[], str | NoRoom]:
        def begin() -> str | NoRoom:
            if len(self.begun) >= self.places:
                return self.full
            self.begun.append(name)
            return name

        return begin

    def enter(self, name: str, *, tenant: str = "default", num_tokens: int = 100, **fields: Any) -> asyncio.Task[str]:
        offer = Offer(request_id=name, tenant=tenant, num_tokens=num_tokens, **fields)
        return asyncio.create_task(self.gate.enter(offer, self.begin(name)))

    async def more_room(self, places: int) -> None:
        self.places += places
        self.gate.serve()
        await turn()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


A, B = Tenant(name="a", weight=3.0), Tenant(name="b", weight=1.0)


async def test_a_sequence_begins_at_once_while_there_is_room() -> None:
    room = Room(1)
    assert await room.enter("r") == "r"
    assert not room.gate.has_waiting


async def test_without_tenants_nobody_waits_for_full_replicas() -> None:
    room = Room(0)
    room.full = no_room(NoRoomReason.FULL, wait_s=7.5)
    with pytest.raises(Overloaded) as refused:
        await room.enter("r")
    assert (refused.value.retry_after_s, refused.value.estimated_wait_s, refused.value.code) == (7.5, 7.5, "overloaded")
    assert room.refused == [("default", "full")]
    assert not room.gate.has_waiting


async def test_sequences_wait_bounded_while_no_replica_is_ready() -> None:
    room = Room(0, full=NoRoomReason.NO_REPLICA, max_queued=2)
    waiting = [room.enter("first"), room.enter("second")]
    await turn()
    with pytest.raises(Overloaded):
        await room.enter("third")
    assert dict(room.gate.num_waiting) == {"default": 2}
    await room.more_room(2)
    assert await asyncio.gather(*waiting) == ["first", "second"]
    assert room.refused == [("default", "queue")]


async def test_with_no_queue_what_finds_room_begins_and_what_does_not_is_refused() -> None:
    room = Room(1, full=NoRoomReason.NO_REPLICA, max_queued=0)
    assert await room.enter("r") == "r"
    with pytest.raises(Overloaded):
        await room.enter("s")


async def test_tenants_get_turns_by_their_weights() -> None:
    room = Room(0, A, B, max_queued=100)
    tasks = [room.enter(f"{name}{i}", tenant=name) for i in range(12) for name in "ab"]
    await turn()
    await room.more_room(8)
    assert sorted(name[0] for name in room.begun) == ["a"] * 6 + ["b"] * 2
    await room.more_room(100)
    await asyncio.gather(*tasks)


async def test_the_more_urgent_go_first() -> None:
    room = Room(0, A, max_queued=100)
    tasks = [room.enter("later", priority=5), room.enter("soon", priority=-1), room.enter("then", priority=0)]
    await turn()
    await room.more_room(3)
    assert room.begun == ["soon", "then", "later"]
    await asyncio.gather(*tasks)


async def test_what_an_engine_has_had_goes_on_before_all_new_ones() -> None:
    room = Room(0, A, max_queued=100)
    new = room.enter("new")
    moves = asyncio.create_task(room.gate.enter_again(room.begin("moves")))
    await turn()
    assert room.gate.num_waiting_to_move == 1
    await room.more_room(1)
    assert room.begun == ["moves"]
    await room.more_room(1)
    assert await asyncio.gather(moves, new) == ["moves", "new"]


async def test_a_tenant_s_rate_is_his_limit_and_others_do_not_feel_it() -> None:
    limited = Tenant(name="limited", tokens_per_s=10.0, burst_tokens=250.0)
    room = Room(100, limited, B)
    assert await room.enter("r0", tenant="limited") == "r0"
    assert await room.enter("r1", tenant="limited") == "r1"
    with pytest.raises(Overloaded) as refused:
        await room.enter("r2", tenant="limited")
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.estimated_wait_s == pytest.approx(5.0)
    assert await room.enter("r3", tenant="b") == "r3"
    room.now_s = 5.1
    assert await room.enter("r4", tenant="limited") == "r4"


async def test_a_sequence_that_took_fewer_tokens_than_expected_gives_the_rest_back() -> None:
    limited = Tenant(name="limited", tokens_per_s=1.0, burst_tokens=100.0)
    room = Room(100, limited)
    await room.enter("r0", tenant="limited")
    room.gate.ended("r0", 20)
    assert await room.enter("r1", tenant="limited", num_tokens=80) == "r1"


async def test_a_limit_is_divided_over_edges_evenly_until_they_know_each_other_s_demand() -> None:
    limited = Tenant(name="limited", tokens_per_s=100.0, burst_tokens=1000.0)
    room = Room(100, limited, num_edges=2)
    await room.enter("r0", tenant="limited", num_tokens=500)
    with pytest.raises(Overloaded):
        await room.enter("r1", tenant="limited", num_tokens=500)
    room.gate.divide_limits("this", {"other": {"limited": 0.0}})
    room.now_s = 6.0  # 95 tokens a second: all demand is here
    assert await room.enter("r2", tenant="limited", num_tokens=500) == "r2"
    room.gate.divide_limits("this", {"other": {"limited": 1e9}})
    room.now_s = 12.0
    with pytest.raises(Overloaded):
        await room.enter("r3", tenant="limited", num_tokens=500)


async def test_what_cannot_come_in_time_is_refused_at_once_with_the_wait() -> None:
    room = Room(0, full=NoRoomReason.DEADLINE)
    room.full = no_room(NoRoomReason.DEADLINE, wait_s=4.0)
    with pytest.raises(Overloaded) as refused:
        await room.enter("r", deadline_s=1.0)
    assert (refused.value.code, refused.value.estimated_wait_s) == ("deadline_exceeded", 4.0)
    assert room.refused == [("default", "deadline")]


async def test_nobody_waits_for_full_replicas_beyond_his_deadline() -> None:
    room = Room(0, A)
    room.full = no_room(NoRoomReason.FULL, wait_s=4.0)
    with pytest.raises(Overloaded) as refused:
        await room.enter("hurried", deadline_s=2.0)
    assert refused.value.code == "deadline_exceeded"
    patient = room.enter("patient", deadline_s=20.0)
    await turn()
    await room.more_room(1)
    assert await patient == "patient"


async def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    room = Room(0, full=NoRoomReason.NO_REPLICA)
    with pytest.raises(Overloaded) as refused:
        await room.enter("r", deadline_s=0.02)
    assert refused.value.code == "deadline_exceeded"
    assert not room.gate.has_waiting


async def test_the_wait_for_a_replica_ends_with_what_clients_may_retry() -> None:
    room = Room(0, full=NoRoomReason.NO_REPLICA, max_wait_s=0.02)
    with pytest.raises(Unavailable):
        await room.enter("r")
    with pytest.raises(Unavailable):
        await room.gate.enter_again(room.begin("moves"))
    assert not room.gate.has_waiting


async def test_a_caller_that_gives_up_leaves_the_queue() -> None:
    room = Room(0, A)
    gives_up, stays = room.enter("gives up"), room.enter("stays")
    await turn()
    gives_up.cancel()
    await asyncio.wait((gives_up,))
    await room.more_room(1)
    assert await stays == "stays"
    assert room.begun == ["stays"]
    assert not room.gate.has_waiting


async def test_what_was_begun_for_a_caller_that_is_gone_is_undone() -> None:
    room = Room(0, A)
    new = room.enter("new")
    moves = asyncio.create_task(room.gate.enter_again(room.begin("moves")))
    await turn()
    room.places = 2
    room.gate.serve()  # begun, but their tasks have not gone on yet
    new.cancel()
    moves.cancel()
    await asyncio.wait((new, moves))
    assert sorted(room.begun) == sorted(room.undone) == ["moves", "new"]


async def test_what_fails_to_begin_fails_for_its_caller_only() -> None:
    room = Room(1)

    def fail() -> str:
        raise RuntimeError("told to fail")

    with pytest.raises(RuntimeError, match="told to fail"):
        await room.gate.enter(Offer(request_id="bad", tenant="default", num_tokens=1), fail)
    assert await room.enter("good") == "good"
