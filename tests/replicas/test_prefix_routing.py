"""Routing by cached prefixes over real channels to simulated engines in this process: what edges know and do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manta.cluster.routing.admission import Tenant
from manta.engine.errors import Overloaded
from manta.engine.prefix_cache import BlockHasher, CacheEvents
from manta.engine.request import EngineRequest, RequestDelta, SamplingParams
from manta.engine.startup import start_engine
from manta.replicas.channel_client import ChannelClient
from manta.replicas.edge.client import RequestTerms, RouteNote
from manta.replicas.edge.router import ChannelRouter, RouterLimits
from manta.replicas.metrics import EdgeMetrics
from manta.replicas.protocol import Frame
from tests.replicas.edge.local_server import sim_config, write_byte_model
from tests.replicas.fleet import KEYS, Fleet, become_true, fleet
from tests.replicas.test_metrics import samples

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


def start(one: Fleet, folder: Path, *names: str, **fields: Any) -> None:
    """Engines whose steps take 64 tokens and 2 ms, so that a long prompt takes a while."""
    config = sim_config(folder, **{"device": "sim:2ms", "max_num_batched_tokens": 64, **fields})
    for name in names:
        core = start_engine(config, hash_key=KEYS.for_engines.block_hashes)
        one.start(name, core, core.info)


def request(
    router: ChannelRouter, name: str, prompt: list[int], *, salt: str | None = None, **fields: Any
) -> EngineRequest:
    """As an edge makes it, its blocks hashed."""
    assert router.info is not None
    assert router.info.hash_domain is not None
    hashes: list[bytes] = []
    hasher = BlockHasher(BLOCK, domain=router.info.hash_domain, key=KEYS.for_engines.block_hashes)
    hasher.extend(hashes, prompt, salt=salt)
    params = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, **fields})
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, block_hashes=hashes, cache_salt=salt)


async def answer(router: ChannelRouter, one: EngineRequest, terms: RequestTerms = RequestTerms()) -> tuple[str, int]:
    """Where it went, and how many of its tokens were cached there."""
    deltas: list[RequestDelta] = []
    note = RouteNote()
    await router.run(one, lambda delta: deltas.append(delta) is None, terms, note)
    assert note.replica_id is not None
    return note.replica_id, deltas[0].num_cached_tokens or 0


def prompt(number: int, *, num_blocks: int = 20) -> list[int]:
    return [number % 200 + 10] * (BLOCK * num_blocks) + [7]


@asynccontextmanager
async def second_edge(one: Fleet, **limits: Any) -> AsyncIterator[ChannelRouter]:
    """Another edge of the same replicas, which knows nothing yet."""
    metrics = EdgeMetrics("second")
    router = ChannelRouter(one, edge_id="second", keys=KEYS, limits=RouterLimits(**limits), metrics=metrics)
    router.set_members(one.engines)
    await become_true(lambda: sum(status.ready for status in router.replicas()) == len(one.engines))
    try:
        yield router
    finally:
        await router.close()


async def knows(router: ChannelRouter, num_blocks: int) -> None:
    await become_true(lambda: router._chooser.num_index_blocks == num_blocks)


async def test_a_prompt_goes_where_its_prefix_is_cached(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"abcd")
        await one.ready(*"abcd")
        homes = [await answer(one.router, request(one.router, f"first{i}", prompt(i))) for i in range(8)]
        assert [num_cached for _, num_cached in homes] == [0] * 8
        again = [await answer(one.router, request(one.router, f"again{i}", prompt(i))) for i in range(8)]
        assert again == [(replica_id, 20 * BLOCK) for replica_id, _ in homes]


async def test_a_prefix_counts_as_cached_where_it_was_just_sent_before_any_event_says_so(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"ab", device="sim:20ms")
        await one.ready(*"ab")
        router = one.router
        await asyncio.gather(*(answer(router, request(router, f"w{i}", [i + 1] * 8)) for i in range(8)))  # warmed up
        first = asyncio.create_task(answer(router, request(router, "r0", prompt(1, num_blocks=40))))
        await become_true(lambda: one.held != [])
        (home,) = one.held
        view = router._chooser._views[home]
        await become_true(lambda: 0 < view.snapshot.num_prefill_tokens <= 300)
        second = asyncio.create_task(answer(router, request(router, "r1", prompt(1, num_blocks=40))))
        await become_true(lambda: router.explain("r1") is not None)
        found = router.explain("r1")
        assert found is not None
        decision = found["sequences"][0]["decisions"][0]
        assert (decision["replica_id"], decision["estimate"]["num_cached_tokens"]) == (home, 40 * BLOCK)
        assert [replica_id for replica_id, _ in await asyncio.gather(first, second)] == [home, home]


async def test_another_edge_learns_what_is_cached_from_the_replicas(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"ab")
        await one.ready(*"ab")
        homes = [await answer(one.router, request(one.router, f"first{i}", prompt(i))) for i in range(6)]
        async with second_edge(one) as other:
            await knows(other, 6 * 20)
            again = [await answer(other, request(other, f"again{i}", prompt(i))) for i in range(6)]
            assert again == [(replica_id, 20 * BLOCK) for replica_id, _ in homes]
            await answer(other, request(other, "new", prompt(50)))
            await knows(one.router, 7 * 20)


async def test_the_edge_of_a_large_cache_is_told_in_parts_that_add_up(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, "a", max_num_batched_tokens=2048, device="sim:1ms")
        await one.ready("a")
        feed_sizes: list[int] = []
        for i in range(60):
            await answer(one.router, request(one.router, f"r{i}", [i + 1] * (BLOCK * 60) + [i], max_tokens=1))
        address = await one.locate("a")

        def note_size(frame: Frame) -> None:
            if frame.cache_events is not None:
                feed_sizes.append(len(frame.cache_events.stored))

        client = ChannelClient(address, edge_id="late", keys=KEYS, wants_cache_events=True, on_frame=note_size)
        await client.connect(5.0)
        await become_true(lambda: sum(feed_sizes) == 60 * 60)
        assert max(feed_sizes) == 2048
        client.close()


async def test_a_gap_in_the_events_has_everything_told_again(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, "a")
        await one.ready("a")
        home, _ = await answer(one.router, request(one.router, "r", prompt(1)))
        await knows(one.router, 20)
        chooser, link = one.router._chooser, one.router._links[home]
        chooser._index.remove_replica(home)
        chooser._index.add_replica(home)
        chooser.heard(link, Frame(sequence=0, cache_events=CacheEvents(sequence=999)))
        chooser.heard(link, Frame(sequence=0, cache_events=CacheEvents(sequence=1000)))
        await become_true(lambda: not chooser._resyncing)
        await become_true(lambda: chooser._index.num_blocks_of(home) == 20)
        text = await one.router.render_metrics()
        assert samples(text)["manta_prefix_index_resyncs_total", frozenset({("edge", "edge")})] == 1


async def test_who_does_not_route_by_prefix_is_told_nothing(folder: Path) -> None:
    frames: list[Frame] = []
    async with fleet(routes_by_prefix=False) as one:
        start(one, folder, "a")
        await one.ready("a")
        address = await one.locate("a")
        watcher = ChannelClient(address, edge_id="w", keys=KEYS, is_watcher=True, on_frame=frames.append)
        await watcher.connect(5.0)
        await answer(one.router, request(one.router, "r", prompt(1)))
        async with second_edge(one) as other:
            await knows(other, 20)
        assert all(frame.cache_events is None for frame in frames)
        assert not one.router._chooser._index._replicas["a"].next_sequence
        watcher.close()


async def test_salts_keep_tenants_apart_at_the_router_and_in_the_engine(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"ab")
        await one.ready(*"ab")
        router = one.router
        home, cold = await answer(router, request(router, "r0", prompt(1), salt="a"))
        assert cold == 0
        assert await answer(router, request(router, "r1", prompt(1), salt="a")) == (home, 20 * BLOCK)
        assert (await answer(router, request(router, "r2", prompt(1), salt="b")))[1] == 0
        assert (await answer(router, request(router, "r3", prompt(1))))[1] == 0
        found = router.explain("r2")
        assert found is not None
        candidates = found["sequences"][0]["decisions"][0]["candidates"]
        assert [candidate["terms"]["num_cached_tokens"] for candidate in candidates] == [0, 0]


async def test_hashes_of_another_key_are_not_believed_by_the_engine(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, "a")
        await one.ready("a")
        foreign = request(one.router, "foreign", prompt(1))
        foreign.block_hashes = [bytes(16)] * len(foreign.block_hashes)
        await answer(one.router, foreign)
        assert await answer(one.router, request(one.router, "own", prompt(1))) == ("a", 20 * BLOCK)


async def test_the_decision_and_what_came_of_it_are_remembered(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"ab")
        await one.ready(*"ab")
        note = RouteNote()
        await one.router.run(request(one.router, "cmpl-1-0", prompt(1)), lambda delta: True, RequestTerms(), note)
        found = one.router.explain("cmpl-1")
        assert found is not None
        decision = found["sequences"][0]["decisions"][0]
        assert (decision["outcome"], decision["num_cached_tokens"]) == ("finished", 0)
        assert decision["estimate"]["first_token_s"] == pytest.approx(note.estimated_s, abs=0.01)
        assert 0.01 < decision["actual_s"] <= (note.actual_s or 0.0)
        assert {candidate["replica_id"] for candidate in decision["candidates"]} == {"a", "b"}


async def test_a_stream_that_moves_keeps_its_cached_tokens_and_explains_both_stays(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"ab")
        await one.ready(*"ab")
        home, _ = await answer(one.router, request(one.router, "warm", prompt(1)))
        deltas: list[RequestDelta] = []

        def kill(delta: RequestDelta) -> bool:
            deltas.append(delta)
            if len(deltas) == 10:
                one.engines[home].close()
            return True

        await one.router.run(request(one.router, "cmpl-1-0", prompt(1), max_tokens=40), kill)
        assert [delta.num_cached_tokens for delta in deltas] == [20 * BLOCK] + [None] * 39
        found = one.router.explain("cmpl-1")
        assert found is not None
        first, second = found["sequences"][0]["decisions"]
        assert first["replica_id"] == home
        assert "moved after" in first["outcome"]
        assert second["replica_id"] != home
        assert second["outcome"] == "finished"


async def test_a_deadline_that_cannot_be_met_is_refused_before_the_engine_hears_of_it(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, "a", device="sim:20ms")
        await one.ready("a")
        loop_s = asyncio.get_running_loop().time  # the clock of time.monotonic()
        with pytest.raises(Overloaded) as refused:
            await answer(
                one.router, request(one.router, "cmpl-1-0", prompt(1)), RequestTerms(deadline_s=loop_s() + 0.03)
            )
        assert refused.value.code == "deadline_exceeded"
        assert refused.value.estimated_wait_s == pytest.approx(0.12, abs=0.05)  # 321 tokens in steps of 64
        assert one.engines["a"].server.num_requests == 0
        assert one.router.explain("cmpl-1") is not None
        terms = RequestTerms(deadline_s=loop_s() + 5.0)
        assert await answer(one.router, request(one.router, "patient", prompt(1)), terms) == ("a", 0)


async def test_counts_return_to_zero_however_requests_end(folder: Path) -> None:
    """P23: refused, abandoned, finished, and on a replica that dies."""
    async with fleet(max_queued_requests=4) as one:
        start(one, folder, *"ab", max_num_seqs=4)
        await one.ready(*"ab")
        router = one.router

        async def client(number: int) -> None:
            num_deltas = 0

            def take(delta: RequestDelta) -> bool:
                nonlocal num_deltas
                num_deltas += 1
                return number % 3 != 0 or num_deltas < 4

            await router.run(request(router, f"r{number}", prompt(number, num_blocks=4), max_tokens=200), take)

        tasks = [asyncio.create_task(client(number)) for number in range(40)]
        await become_true(lambda: len(router._attempts) >= 8)
        for task in tasks[1::7]:
            task.cancel()
        one.engines["a"].close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        ends = [type(result).__name__ for result in results]
        assert {"NoneType", "Overloaded", "CancelledError"} <= set(ends), ends
        assert router._attempts == set()
        (view,) = router._chooser._views.values()
        assert (view.num_own, one.held) == (0, [])
        await become_true(lambda: one.engines["b"].server.num_requests == 0)
        shown = samples(await router.render_metrics())
        edge = ("edge", "edge")
        assert shown["manta_edge_requests_in_flight", frozenset({edge})] == 0
        assert shown["manta_edge_requests_waiting", frozenset({edge})] == 0
        await become_true(lambda: view.num_requests == 0)


async def test_with_tenants_requests_wait_in_the_edge_and_get_their_shares(folder: Path) -> None:
    tenants = (Tenant(name="heavy", weight=1.0), Tenant(name="light", weight=1.0))
    async with fleet(tenants=tenants, max_queued_requests=200) as one:
        start(one, folder, "a", max_num_seqs=4, device="sim:5ms")
        await one.ready("a")
        ended: list[str] = []

        async def client(tenant: str, number: int) -> None:
            own = request(one.router, f"{tenant}{number}", prompt(number, num_blocks=1), max_tokens=20)
            await one.router.run(own, lambda delta: True, RequestTerms(tenant=tenant))
            ended.append(tenant)

        tasks = [asyncio.create_task(client("heavy", number)) for number in range(60)]
        await become_true(lambda: sum(one.router._gate.num_waiting.values()) > 30)
        tasks += [asyncio.create_task(client("light", number)) for number in range(10)]
        await asyncio.gather(*tasks)
        # Those who came last did not wait for all that was there before them.
        assert ended.index("light") < 30
        assert ended[:60].count("light") == 10


async def test_a_cold_replica_is_warmed_up_and_not_flooded(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, "a", device="sim:20ms")
        await one.ready("a")
        await asyncio.gather(*(answer(one.router, request(one.router, f"w{i}", [i + 1] * 8)) for i in range(40)))
        start(one, folder, "b", device="sim:20ms")
        await one.ready("a", "b")
        router = one.router
        burst = [
            asyncio.create_task(answer(router, request(router, f"r{i}", prompt(i, num_blocks=1), max_tokens=30)))
            for i in range(24)
        ]
        await become_true(lambda: len(one.held) == 24)
        assert 1 <= one.held.count("b") <= 4
        await asyncio.gather(*burst)
        assert await answer(router, request(router, "last", prompt(99))) in {("a", 0), ("b", 0)}


async def test_a_replica_that_has_worked_before_is_not_warmed_up_again_by_a_new_edge(folder: Path) -> None:
    async with fleet() as one:
        start(one, folder, *"ab", device="sim:20ms")
        await one.ready(*"ab")
        await asyncio.gather(*(answer(one.router, request(one.router, f"w{i}", [i + 1] * 8)) for i in range(4)))
        async with second_edge(one) as other:
            burst = [
                asyncio.create_task(answer(other, request(other, f"r{i}", prompt(i, num_blocks=1), max_tokens=20)))
                for i in range(16)
            ]
            await become_true(lambda: len(one.held) == 16)
            assert sorted(one.held.count(name) for name in "ab") == [8, 8]
            await asyncio.gather(*burst)
