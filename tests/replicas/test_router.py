"""The edge's router over real channels to engines in this process: choice, bounds, and streams that survive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manta.engine.errors import ContextLengthExceeded, EngineFailed, Overloaded, Unavailable
from manta.engine.request import EngineRequest, FinishReason, RefusalReason, RequestDelta, SamplingParams
from manta.engine.startup import start_engine
from manta.replicas.edge.router import ChannelRouter
from tests.replicas.edge.local_server import sim_config, write_byte_model
from tests.replicas.engines import INFO, FakeCore, token_at
from tests.replicas.fleet import become_true, fleet


def request(
    request_id: str = "r", *, prompt: list[int] | None = None, max_tokens: int = 40, **fields: Any
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, **fields)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt or [1, 2, 3], params=params)


async def collect(
    router: ChannelRouter, one: EngineRequest, *, after: Callable[[int], None] = lambda num_tokens: None
) -> list[RequestDelta]:
    """All deltas; `after` is told the number of tokens after each."""
    deltas: list[RequestDelta] = []

    def take(delta: RequestDelta) -> bool:
        deltas.append(delta)
        after(len(tokens_of(deltas)))
        return True

    await router.run(one, take)
    return deltas


def tokens_of(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_streams_end_where_they_should_and_leave_nothing() -> None:
    async with fleet() as one:
        core = FakeCore()
        one.start("a", core)
        await one.ready("a")
        outputs = await asyncio.gather(*(collect(one.router, request(f"r{i}", prompt=[i + 1])) for i in range(8)))
        for i, deltas in enumerate(outputs):
            assert tokens_of(deltas) == [token_at([i + 1], position) for position in range(40)]
            assert {delta.request_id for delta in deltas} == {f"r{i}"}
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert not one.held
        assert core.cancelled == []


async def test_the_replica_with_the_least_work_is_chosen() -> None:
    async with fleet() as one:
        cores = [FakeCore(step_s=0.01), FakeCore(step_s=0.01)]
        for name, core in zip("ab", cores, strict=True):
            one.start(name, core)
        await one.ready("a", "b")
        await asyncio.gather(*(collect(one.router, request(f"r{i}")) for i in range(8)))
        assert [len(core.added) for core in cores] == [4, 4]


async def test_a_stream_goes_on_elsewhere_when_its_engine_dies() -> None:
    async with fleet() as one:
        first, second = FakeCore(step_s=0.005), FakeCore(step_s=0.005)
        one.start("a", first)
        await one.ready("a")

        def kill(num_tokens: int) -> None:
            if num_tokens == 7:
                one.start("b", second)
                one.router.set_members(["a", "b"])
                one.engines["a"].close()

        deltas = await collect(one.router, request(), after=kill)
        assert tokens_of(deltas) == [token_at([1, 2, 3], position) for position in range(40)]
        assert (first.added, second.added) == (["r"], ["r.1"])
        assert b'manta_requests_moved_total{edge="edge"} 1.0' in await one.router.render_metrics()


async def test_a_resumed_stream_of_the_simulated_engine_is_what_it_would_have_been(tmp_path: Path) -> None:
    config = sim_config(write_byte_model(tmp_path / "bytes"), device="sim:2ms")
    fields = {"temperature": 0.8, "logprobs": 1, "prompt_logprobs": 0}
    async with fleet() as one:
        for name in "ab":
            core = start_engine(config)
            one.start(name, core, core.info)
        await one.ready("a", "b")
        undisturbed = await collect(one.router, request(max_tokens=120, **fields))
        killed: list[str] = []

        def kill(num_tokens: int) -> None:
            if num_tokens == 50:
                (replica_id,) = one.held
                killed.append(replica_id)
                one.engines[replica_id].close()

        moved = await collect(one.router, request(max_tokens=120, **fields), after=kill)
        assert killed
        assert len(tokens_of(moved)) == 120
        assert tokens_of(moved) == tokens_of(undisturbed)
        logprobs = [entry for delta in moved for entry in delta.logprobs or ()]
        assert [entry.token_id for entry in logprobs] == tokens_of(moved)
        assert [delta.prompt_logprobs is None for delta in moved] == [False] + [True] * (len(moved) - 1)
        assert [delta.num_cached_tokens is None for delta in moved] == [False] + [True] * (len(moved) - 1)


async def test_a_stream_waits_for_its_only_replica_to_come_back() -> None:
    async with fleet() as one:
        one.start("a", FakeCore(step_s=0.005))
        await one.ready("a")

        def restart(num_tokens: int) -> None:
            if num_tokens == 5:
                one.engines.pop("a").close()
                asyncio.get_running_loop().call_later(0.3, one.start, "a", FakeCore())

        deltas = await collect(one.router, request(), after=restart)
        assert tokens_of(deltas) == [token_at([1, 2, 3], position) for position in range(40)]


async def test_a_request_that_meets_two_deaths_without_progress_kills_no_third() -> None:
    async with fleet() as one:
        cores = {name: FakeCore() for name in "abc"}
        for name, core in cores.items():
            core.may_step.clear()
            one.start(name, core)
        await one.ready(*cores)
        running = asyncio.create_task(collect(one.router, request()))
        for _ in range(2):
            await become_true(lambda: any(core.has_work for name, core in cores.items() if name in one.engines))
            (name,) = [name for name, core in cores.items() if core.has_work and name in one.engines]
            cores[name].may_step.set()
            cores[name].requests.clear()  # dies before it has said anything
            one.engines.pop(name).close()
        with pytest.raises(EngineFailed, match="two replicas in a row"):
            await running
        (last,) = one.engines
        assert cores[last].added == []
        cores[last].may_step.set()
        assert not one.held


async def test_a_third_death_is_survived_when_tokens_came_in_between() -> None:
    async with fleet() as one:
        for name in "abcd":
            one.start(name, FakeCore(step_s=0.003))
        await one.ready(*"abcd")

        def kill(num_tokens: int) -> None:
            if num_tokens in (5, 10, 15):
                (replica_id,) = one.held
                one.engines[replica_id].close()

        deltas = await collect(one.router, request(), after=kill)
        assert tokens_of(deltas) == [token_at([1, 2, 3], position) for position in range(40)]
        assert sum(one.engines[name].is_closed for name in "abcd") == 3


async def test_beyond_the_bound_requests_are_refused_quickly() -> None:
    info = msgspec.structs.replace(INFO, max_num_seqs=2, max_num_waiting=100)
    async with fleet(max_queued_requests=1) as one:
        one.start("a", FakeCore(step_s=0.01), info)
        await one.ready("a")
        running = [asyncio.create_task(collect(one.router, request(f"r{i}", max_tokens=2000))) for i in range(3)]
        await become_true(lambda: len(one.held) == 3)
        waits_s = []
        for i in range(9):
            start_s = time.monotonic()
            with pytest.raises(Overloaded) as refused:
                await collect(one.router, request(f"too many {i}"))
            waits_s.append(time.monotonic() - start_s)
            assert refused.value.retry_after_s > 0
        assert statistics.median(waits_s) < 0.05
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

        await become_true(lambda: one.engines["a"].server.num_requests == 0)
        async with asyncio.timeout(5):  # the edge learns by the next frame that there is room again
            for i in itertools.count():
                with contextlib.suppress(Overloaded):
                    assert len(await collect(one.router, request(f"again {i}"))) == 40
                    return
                await asyncio.sleep(0.01)


async def test_a_stream_that_has_begun_waits_for_room_instead_of_being_refused() -> None:
    info = msgspec.structs.replace(INFO, max_num_seqs=1, max_num_waiting=0)
    async with fleet() as one:
        for name in "ab":
            one.start(name, FakeCore(step_s=0.01), info)
        await one.ready("a", "b")
        other = asyncio.create_task(collect(one.router, request("other", max_tokens=60)))
        await become_true(lambda: len(one.held) == 1)
        (busy,) = one.held

        def kill(num_tokens: int) -> None:
            if num_tokens == 5:
                one.engines["b" if busy == "a" else "a"].close()

        deltas = await collect(one.router, request("moves"), after=kill)
        assert tokens_of(deltas) == [token_at([1, 2, 3], position) for position in range(40)]
        assert len(await other) == 60


class MuteCore(FakeCore):
    """Takes requests and never gets to a token."""

    def step(self) -> list[RequestDelta]:
        time.sleep(0.005)
        return []


async def test_a_request_that_was_taken_waits_for_room_elsewhere_also_before_its_first_token() -> None:
    async with fleet() as one:
        one.start("a", MuteCore())
        await one.ready("a")
        answer = asyncio.create_task(collect(one.router, request("moves")))
        await become_true(lambda: one.held == ["a"])
        full = FakeCore()
        full.refuses = RefusalReason.OVERLOADED  # as after another edge's requests, of which this one does not know yet
        one.start("b", full)
        await one.ready("a", "b")
        one.engines["a"].close()
        await become_true(lambda: one.held == ["b"])
        await asyncio.sleep(0.2)
        assert not answer.done()
        full.refuses = None
        assert tokens_of(await answer) == [token_at([1, 2, 3], position) for position in range(40)]


async def test_requests_wait_bounded_while_no_replica_is_ready() -> None:
    async with fleet(max_queued_requests=2) as one:
        waiting = [asyncio.create_task(collect(one.router, request(f"r{i}"))) for i in range(2)]
        await asyncio.sleep(0)
        assert one.router.info is None
        with pytest.raises(Overloaded):
            await collect(one.router, request("third"))
        assert b'manta_edge_requests_waiting{edge="edge"} 2.0' in await one.router.render_metrics()
        one.start("a", FakeCore())
        await one.ready("a")
        assert [len(deltas) for deltas in await asyncio.gather(*waiting)] == [40, 40]
        assert one.router.info == INFO


async def test_the_wait_for_a_replica_ends() -> None:
    async with fleet(max_wait_s=0.1) as one:
        start_s = time.monotonic()
        with pytest.raises(Unavailable) as refused:
            await collect(one.router, request())
        assert 0.1 <= time.monotonic() - start_s < 1.0
        assert refused.value.retry_after_s > 0


async def test_a_cancelled_task_cancels_the_work() -> None:
    core = FakeCore(step_s=0.005)
    async with fleet() as one:
        one.start("a", core)
        await one.ready("a")
        deltas: list[RequestDelta] = []
        task = asyncio.create_task(one.router.run(request(max_tokens=4000), lambda delta: deltas.append(delta) is None))
        await become_true(lambda: len(deltas) > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        num_taken = len(deltas)
        await become_true(lambda: core.cancelled == ["r"], within_s=1)
        assert not one.held
        assert len(deltas) == num_taken


async def test_a_stream_of_which_no_more_is_wanted_is_cancelled() -> None:
    core = FakeCore(step_s=0.005)
    async with fleet() as one:
        one.start("a", core)
        await one.ready("a")
        deltas: list[RequestDelta] = []

        def take(delta: RequestDelta) -> bool:
            deltas.append(delta)
            return len(deltas) < 3

        await one.router.run(request(max_tokens=4000), take)
        await become_true(lambda: core.cancelled == ["r"], within_s=1)
        assert len(deltas) == 3
        assert not one.held


async def test_what_a_stream_s_taker_raises_ends_that_stream_only() -> None:
    core = FakeCore(step_s=0.005)
    async with fleet() as one:
        one.start("a", core)
        await one.ready("a")

        def fail(num_tokens: int) -> None:
            if num_tokens == 5:
                raise EngineFailed("told to fail")

        good = asyncio.create_task(collect(one.router, request("good")))
        with pytest.raises(EngineFailed, match="told to fail"):
            await collect(one.router, request("bad", max_tokens=4000), after=fail)
        assert len(await good) == 40
        await become_true(lambda: core.cancelled == ["bad"], within_s=1)


async def test_a_refusal_becomes_the_error_that_it_means() -> None:
    core = FakeCore()
    core.refuses = RefusalReason.TOO_LONG
    async with fleet() as one:
        one.start("a", core)
        await one.ready("a")
        with pytest.raises(ContextLengthExceeded, match="told to refuse"):
            await collect(one.router, request())


async def test_a_replica_that_leaves_the_membership_finishes_its_streams_and_gets_no_new_one() -> None:
    async with fleet() as one:
        old, new = FakeCore(step_s=0.01), FakeCore()
        one.start("old", old)
        await one.ready("old")
        left: list[bool] = []

        def leave(num_tokens: int) -> None:
            if num_tokens == 5:
                one.start("new", new)
                one.router.set_members(["new"])
                left.append(True)

        running = asyncio.create_task(collect(one.router, request("stays"), after=leave))
        await become_true(lambda: bool(left))
        (draining,) = [status for status in one.router.replicas() if status.replica_id == "old"]
        assert draining.draining
        assert not draining.ready
        await collect(one.router, request("comes"))
        assert new.added == ["comes"]
        assert len(await running) == 40
        await become_true(lambda: [status.replica_id for status in one.router.replicas()] == ["new"])
        await become_true(lambda: one.engines["old"].server.num_edges == 0)


async def test_what_is_left_on_a_leaving_replica_after_the_grace_moves_and_short_work_ends_there() -> None:
    async with fleet(drain_grace_s=0.5) as one:
        old, new = FakeCore(step_s=0.01), FakeCore(step_s=0.001)
        one.start("old", old)
        await one.ready("old")
        long = asyncio.create_task(collect(one.router, request("long", max_tokens=2000)))
        short = asyncio.create_task(collect(one.router, request("short", max_tokens=20)))
        await become_true(lambda: len(one.held) == 2)
        one.start("new", new)
        one.router.set_members(["new"])
        assert len(tokens_of(await short)) == 20
        assert new.added == []
        await become_true(lambda: new.added == ["long.1"], within_s=2.0)
        # The replica is free of it at once, so that Serve can stop it.
        await become_true(lambda: old.cancelled == ["long"] and one.held == ["new"])
        await become_true(lambda: [status.replica_id for status in one.router.replicas()] == ["new"])
        assert tokens_of(await long) == [token_at([1, 2, 3], position) for position in range(2000)]


async def test_streams_stay_on_a_leaving_replica_while_no_other_has_room() -> None:
    info = msgspec.structs.replace(INFO, max_num_seqs=1, max_num_waiting=0)
    async with fleet(drain_grace_s=0.0) as one:
        old, new = FakeCore(step_s=0.005), FakeCore(step_s=0.005)
        one.start("old", old)
        await one.ready("old")
        streams = [asyncio.create_task(collect(one.router, request(name, max_tokens=600))) for name in "ab"]
        await become_true(lambda: len(old.requests) == 2)
        one.start("new", new, info)
        one.router.set_members(["new"])
        await become_true(lambda: len(new.added) == 1)
        seen = new.snapshot().num_generated_tokens
        await become_true(lambda: new.snapshot().num_generated_tokens > seen + 60)
        assert len(old.requests) == 1
        for stream in streams:
            assert tokens_of(await stream) == [token_at([1, 2, 3], position) for position in range(600)]


async def test_the_death_of_a_leaving_replica_is_not_counted_against_its_requests() -> None:
    async with fleet(drain_grace_s=60.0) as one:
        cores = {name: FakeCore() for name in "abc"}
        for core in cores.values():
            core.may_step.clear()
        one.start("a", cores["a"])
        await one.ready("a")
        running = asyncio.create_task(collect(one.router, request()))
        for gone, following in zip("ab", "bc", strict=True):
            await become_true(lambda gone=gone: cores[gone].has_work)
            one.start(following, cores[following])
            one.router.set_members([following])
            cores[gone].requests.clear()
            cores[gone].may_step.set()
            one.engines.pop(gone).close()
        cores["c"].may_step.set()
        assert tokens_of(await running) == [token_at([1, 2, 3], position) for position in range(40)]


@pytest.mark.parametrize("is_busy", [True, False], ids=["with streams", "idle"])
async def test_a_replica_that_is_a_member_again_takes_work_again(is_busy: bool) -> None:
    """As when Serve's controller starts anew and tells of the replicas one after the other."""
    async with fleet(drain_grace_s=0.2) as one:
        cores = {name: FakeCore(step_s=0.005) for name in "ab"}
        for name, core in cores.items():
            one.start(name, core)
        await one.ready("a", "b")
        running = [
            asyncio.create_task(collect(one.router, request(f"r{i}", max_tokens=400))) for i in range(2 * is_busy)
        ]
        await become_true(lambda: len(one.held) == len(running))
        one.router.set_members(["a"])
        await become_true(lambda: one.engines["b"].loop._is_draining)
        await one.ready("a", "b")
        await become_true(lambda: not one.engines["b"].loop._is_draining)
        added = len(cores["b"].added)
        await asyncio.gather(*(collect(one.router, request(f"new{i}")) for i in range(4)))
        assert len(cores["b"].added) >= added + 1
        for stream in running:
            assert tokens_of(await stream) == [token_at([1, 2, 3], position) for position in range(400)]


async def test_a_stream_that_waits_in_vain_for_a_replica_ends_with_what_clients_may_retry() -> None:
    async with fleet(max_wait_s=0.3) as one:
        one.start("a", FakeCore(step_s=0.005))
        await one.ready("a")
        before = time.monotonic()

        def kill(num_tokens: int) -> None:
            if num_tokens == 5:
                one.engines.pop("a").close()

        with pytest.raises(Unavailable, match=r"within 0\.3 s"):
            await collect(one.router, request(), after=kill)
        assert time.monotonic() - before < 3.0


async def test_metrics_keep_the_counters_of_dead_replicas_and_drop_their_gauges() -> None:
    async with fleet() as one:
        one.start("a", FakeCore())
        await one.ready("a")
        await collect(one.router, request("first", max_tokens=30))
        await become_true(lambda: one.router.replicas()[0].snapshot is not None)
        one.router.set_members([])
        await become_true(lambda: not one.router.replicas())
        one.start("b", FakeCore())
        await one.ready("b")
        await collect(one.router, request("second", max_tokens=12))
        text = (await one.router.render_metrics()).decode()
        assert 'manta_generation_tokens_total{pool="engine"} 42.0' in text
        assert 'manta_requests_running{pool="engine",replica="0"} 0.0' in text
        assert 'replica="1"' not in text
