"""Requests that go over a prefill replica, with engines in this process: every end of an attempt, and what it leaves.

The engines are fakes that note what they are asked for; nothing is handed over in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from manta.cluster.routing.roles import Role
from manta.engine.errors import Overloaded
from manta.engine.kv_transfer.messages import KvPeer, KvShard, SendKv, TakeKv
from manta.engine.request import FinishReason, RefusalReason, RequestDelta
from tests.replicas.engines import INFO, FakeCore, token_at
from tests.replicas.fleet import Fleet, become_true, fleet
from tests.replicas.test_router import collect, request, tokens_of

PROMPT = [1, 2, 3]


def kv(name: str, **changes: Any) -> KvPeer:
    peer = KvPeer(
        control_url=f"tcp://{name}", rank_urls=[f"tcp://{name}0"], shards=[KvShard((0, 2), (0, 2))], model="fake",
        block_size=16, head_dim=8, dtype="float32", key=b"k" * 32,
    )  # fmt: skip
    return msgspec.structs.replace(peer, **changes)


class Pair:
    """A fleet with one prefill and one decode replica."""

    def __init__(self, one: Fleet) -> None:
        self.fleet = one
        self.prefill, self.decode = FakeCore(step_s=0.003), FakeCore(step_s=0.003)

    async def ready(self, *, decode_kv: KvPeer | None = None, **info: Any) -> None:
        self.start("p", self.prefill, Role.PREFILL)
        self.start("d", self.decode, Role.DECODE, kv=decode_kv or kv("d"), **info)
        await self.fleet.ready("p", "d")

    def start(self, name: str, core: FakeCore, role: Role, **info: Any) -> None:
        self.fleet.start(name, core, msgspec.structs.replace(INFO, **{"kv": kv(name), **info}), role=role)

    async def outcomes(self) -> dict[str, float]:
        lines = (await self.fleet.router.render_metrics()).decode().splitlines()
        found = [line.split() for line in lines if line.startswith("manta_handoffs_total{")]
        return {name.split('outcome="')[1].split('"')[0]: float(value) for name, value in found}

    async def assert_nothing_left(self) -> None:
        await become_true(lambda: not self.decode.expected and not self.prefill.requests and not self.decode.requests)
        assert not self.fleet.held


@asynccontextmanager
async def pair(**limits: Any) -> AsyncIterator[Pair]:
    async with fleet(detour_from_tokens=1, **limits) as one:
        yield Pair(one)


def all_tokens(num_tokens: int = 40) -> list[int]:
    return [token_at(PROMPT, position) for position in range(num_tokens)]


async def test_the_first_token_comes_from_one_replica_and_the_others_from_the_other() -> None:
    async with pair() as one:
        await one.ready()
        deltas = await collect(one.fleet.router, request())
        assert tokens_of(deltas) == all_tokens()
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert {delta.request_id for delta in deltas} == {"r"}
        assert (one.prefill.added, one.decode.added) == (["r"], ["r.1"])
        send, take = one.prefill.handoffs["r"], one.decode.handoffs["r.1"]
        assert isinstance(send, SendKv)
        assert send.to == kv("d")
        assert take == TakeKv(send.ticket)
        assert (one.decode.taken, one.decode.released) == ([send.ticket], [])
        assert await one.outcomes() == {"handed_over": 1}
        await one.assert_nothing_left()


async def test_the_prefill_replica_is_held_until_the_other_one_goes_on() -> None:
    async with pair() as one:
        await one.ready()
        one.decode.may_step.clear()
        answer = asyncio.create_task(collect(one.fleet.router, request()))
        await become_true(lambda: one.decode.has_work)
        assert not one.prefill.has_work
        assert sorted(one.fleet.held) == ["d", "p"]
        one.decode.may_step.set()
        await become_true(lambda: one.fleet.held == ["d"])
        assert tokens_of(await answer) == all_tokens()


async def test_a_request_for_one_token_takes_no_detour() -> None:
    async with pair() as one:
        await one.ready()
        assert tokens_of(await collect(one.fleet.router, request(max_tokens=1))) == all_tokens(1)
        assert await one.outcomes() == {}
        assert not one.decode.expected


class StoppingCore(FakeCore):
    """Its first token is one that stops."""

    def step(self) -> list[RequestDelta]:
        deltas = super().step()
        for delta in deltas:
            delta.finish_reason, delta.stop_token_id = FinishReason.STOP, delta.token_ids[-1]
            self.requests.pop(delta.request_id, None)
        return deltas


async def test_an_answer_that_stops_with_its_first_token_is_released_at_the_decode_replica() -> None:
    async with pair() as one:
        one.prefill = StoppingCore()
        await one.ready()
        (delta,) = await collect(one.fleet.router, request())
        assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, token_at(PROMPT, 0))
        await become_true(lambda: len(one.decode.released) == 1)
        assert one.decode.added == []
        assert await one.outcomes() == {"one_token": 1}
        await one.assert_nothing_left()


async def test_a_stop_that_min_tokens_forbids_is_none() -> None:
    async with pair() as one:
        one.prefill = StoppingCore()
        await one.ready()
        deltas = await collect(one.fleet.router, request(min_tokens=7))
        assert tokens_of(deltas) == all_tokens()
        assert deltas[0].finish_reason is None
        assert deltas[0].stop_token_id is None


async def test_when_no_more_than_the_first_token_is_wanted_it_ends_there() -> None:
    async with pair() as one:
        await one.ready()
        await one.fleet.router.run(request(), lambda delta: False)
        await become_true(lambda: len(one.decode.released) == 1)
        assert one.decode.added == []
        await one.assert_nothing_left()


@pytest.mark.parametrize("when", ["before the first token", "after it"])
async def test_a_client_that_leaves_has_both_sides_freed(when: str) -> None:
    async with pair() as one:
        await one.ready()
        waits = one.prefill if when == "before the first token" else one.decode
        waits.may_step.clear()
        task = asyncio.create_task(one.fleet.router.run(request(), lambda delta: True))
        await become_true(lambda: waits.has_work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waits.may_step.set()
        await one.assert_nothing_left()
        # What was taken by its request goes with it.
        await become_true(lambda: len(one.decode.released) == 1 or len(one.decode.taken) == 1)


async def test_a_prefill_replica_that_dies_before_the_first_token_is_done_without() -> None:
    async with pair() as one:
        await one.ready()
        one.prefill.may_step.clear()
        answer = asyncio.create_task(collect(one.fleet.router, request()))
        await become_true(lambda: one.prefill.has_work)
        one.prefill.requests.clear()
        one.prefill.may_step.set()
        one.fleet.engines.pop("p").close()
        assert tokens_of(await answer) == all_tokens()
        assert one.decode.added == ["r.1"]
        assert one.decode.handoffs == {}
        assert len(one.decode.released) == 1
        assert (await one.outcomes())["prefill_lost"] == 1


async def test_a_prefill_replica_that_dies_after_the_first_token_changes_nothing() -> None:
    async with pair() as one:
        await one.ready()
        one.decode.may_step.clear()
        answer = asyncio.create_task(collect(one.fleet.router, request()))
        await become_true(lambda: one.decode.has_work)
        one.fleet.engines.pop("p").close()
        one.decode.may_step.set()
        assert tokens_of(await answer) == all_tokens()
        assert await one.outcomes() == {"handed_over": 1}


async def test_a_decode_replica_that_dies_before_the_first_token_costs_a_new_choice() -> None:
    async with pair() as one:
        await one.ready()
        one.prefill.may_step.clear()
        answer = asyncio.create_task(collect(one.fleet.router, request()))
        await become_true(lambda: one.prefill.has_work)
        one.fleet.engines.pop("d").close()
        await become_true(lambda: [status.ready for status in one.fleet.router.replicas()].count(True) == 1)
        one.prefill.may_step.set()
        # Nobody else decodes: the prefill replica does it all.
        assert tokens_of(await answer) == all_tokens()
        assert one.prefill.added[0] == "r"
        assert one.prefill.added[-1] != "r"
        assert (await one.outcomes())["decode_lost"] == 1


async def test_a_decode_replica_that_dies_in_the_answer_is_replaced_by_another() -> None:
    async with pair() as one:
        await one.ready()
        other = FakeCore(step_s=0.003)

        def kill(num_tokens: int) -> None:
            if num_tokens == 7:
                one.start("d2", other, Role.DECODE)
                one.fleet.router.set_members(["p", "d", "d2"])
            elif sum(status.ready for status in one.fleet.router.replicas()) == 3:
                one.fleet.engines["d"].close()

        deltas = await collect(one.fleet.router, request(max_tokens=1500), after=kill)
        assert tokens_of(deltas) == all_tokens(1500)
        assert len(other.added) == 1
        assert other.handoffs == {}


async def test_a_prefill_replica_that_refuses_is_passed_by() -> None:
    async with pair() as one:
        one.prefill.refuses = RefusalReason.OVERLOADED
        await one.ready()
        assert tokens_of(await collect(one.fleet.router, request())) == all_tokens()
        assert one.decode.added == ["r.1"]
        assert one.decode.handoffs == {}
        assert await one.outcomes() == {"prefill_refused": 1}
        await one.assert_nothing_left()


async def test_a_prefill_replica_that_drains_is_not_asked_again() -> None:
    async with pair() as one:
        one.prefill.refuses = RefusalReason.DRAINING
        await one.ready()
        assert tokens_of(await collect(one.fleet.router, request())) == all_tokens()
        assert await one.outcomes() == {"prefill_refused": 1}
        await one.assert_nothing_left()


async def test_a_new_request_that_both_refuse_is_refused() -> None:
    async with pair() as one:
        one.prefill.refuses = one.decode.refuses = RefusalReason.OVERLOADED
        await one.ready()
        with pytest.raises(Overloaded):
            await collect(one.fleet.router, request())
        await one.assert_nothing_left()


async def test_a_decode_replica_that_is_full_after_the_first_token_is_waited_for() -> None:
    async with pair() as one:
        await one.ready()
        one.decode.refuses = RefusalReason.OVERLOADED
        answer = asyncio.create_task(collect(one.fleet.router, request()))
        await become_true(lambda: len(one.decode.released) >= 1)
        await asyncio.sleep(0.2)
        assert not answer.done()
        one.decode.refuses = None
        assert tokens_of(await answer) == all_tokens()
        assert (await one.outcomes())["decode_lost"] == 1


async def test_a_prefill_replica_that_leaves_hands_over_what_it_has() -> None:
    async with pair(drain_grace_s=0.1) as one:
        await one.ready()
        one.prefill.may_step.clear()
        answer = asyncio.create_task(collect(one.fleet.router, request()))
        await become_true(lambda: one.prefill.has_work)
        one.fleet.router.set_members(["d"])
        await become_true(lambda: one.decode.has_work)
        one.prefill.may_step.set()
        assert tokens_of(await answer) == all_tokens()
        assert (await one.outcomes())["prefill_left"] == 1
        await one.assert_nothing_left()


async def test_replicas_that_do_not_fit_together_are_not_paired() -> None:
    async with pair() as one:
        await one.ready(decode_kv=kv("d", block_size=64))
        assert tokens_of(await collect(one.fleet.router, request())) == all_tokens()
        assert one.decode.added == ["r"]
        assert one.prefill.added == []
        assert not one.decode.expected


async def test_an_edge_that_dies_leaves_no_ticket_behind() -> None:
    async with pair() as one:
        await one.ready()
        one.prefill.may_step.clear()
        task = asyncio.create_task(one.fleet.router.run(request(), lambda delta: True))
        await become_true(lambda: len(one.decode.expected) == 1)
        for link in one.fleet.router._links:
            assert link.channel is not None
            link.channel.release = lambda ticket: None  # as an edge that cannot say anything any more
        await one.fleet.router.close()
        one.prefill.may_step.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await become_true(lambda: not one.decode.expected)
