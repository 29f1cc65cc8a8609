"""Simulated engines that really hand over, in this process: the answer is that of a single replica, in every part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manta.cluster.routing.roles import Role
from manta.engine.core import EngineCore
from manta.engine.request import FinishReason, RequestDelta
from manta.engine.startup import start_engine
from tests.replicas.edge.local_server import sim_config, write_byte_model
from tests.replicas.fleet import Fleet, become_true, fleet
from tests.replicas.test_router import collect, request, tokens_of

PROMPT = [(7 * i) % 250 + 2 for i in range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@asynccontextmanager
async def pools(model: Path, *names: str, **limits: Any) -> AsyncIterator[tuple[Fleet, dict[str, EngineCore]]]:
    """Engines whose names begin with the letter of their role."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
    cores: dict[str, EngineCore] = {}
    try:
        async with fleet(detour_from_tokens=1, **limits) as one:
            for name in names:
                core = cores[name] = start_engine(sim_config(model, device="sim:2ms", kv_transfer=True))
                one.start(name, core, core.info, role=roles[name[0]])
            await one.ready(*names)
            yield one, cores
    finally:
        for core in cores.values():
            core.close()


def joined(deltas: list[RequestDelta]) -> dict[str, Any]:
    """All that a client can see of it."""
    return {
        "token_ids": tokens_of(deltas),
        "logprobs": [entry for delta in deltas for entry in delta.logprobs or ()],
        "prompt_logprobs": [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None],
        "finish_reasons": [delta.finish_reason for delta in deltas if delta.finish_reason is not None],
        "stop_token_ids": [delta.stop_token_id for delta in deltas if delta.stop_token_id is not None],
        "cached": [delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None],
        "first": (deltas[0].num_cached_tokens is not None, deltas[0].prompt_logprobs is not None),
        "ids": {delta.request_id for delta in deltas},
    }


def totals(cores: dict[str, EngineCore]) -> tuple[int, int, int]:
    """Hand-overs sent, taken and computed again."""
    snapshots = [core.snapshot() for core in cores.values()]
    return (
        sum(one.num_kv_sent for one in snapshots),
        sum(one.num_kv_received for one in snapshots),
        sum(one.num_kv_recomputed for one in snapshots),
    )


async def assert_nothing_held(one: Fleet) -> None:
    def held() -> int:
        snapshots = [status.snapshot for status in one.router.replicas()]
        return sum(s.num_used_blocks + s.num_kv_leases + s.num_running for s in snapshots if s is not None)

    await become_true(lambda: held() == 0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.9},
        {"temperature": 0.7, "logprobs": 2, "prompt_logprobs": 0},
        {"max_tokens": 2},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 1.0},
        {"min_tokens": 7},
    ],
    ids=str,
)
async def test_the_answer_is_that_of_one_replica(model: Path, fields: dict[str, Any]) -> None:
    async with pools(model, "p", "d") as (one, cores):
        await one.ready("d")
        alone = await collect(one.router, request("alone", prompt=PROMPT, **fields))
    async with pools(model, "p", "d") as (one, cores):
        apart = await collect(one.router, request("alone", prompt=PROMPT, **fields))
        assert joined(apart) == joined(alone)
        await become_true(lambda: totals(cores) == (1, 1, 0))
        await assert_nothing_held(one)


async def test_a_stop_token_ends_it_wherever_it_comes(model: Path) -> None:
    async with pools(model, "p", "d") as (one, cores):
        tokens = tokens_of(await collect(one.router, request("first", prompt=PROMPT)))
        for position in (0, 1, 9):
            stop = tokens[position]
            deltas = await collect(one.router, request(f"r{position}", prompt=PROMPT, stop_token_ids=(stop,)))
            assert tokens_of(deltas) == tokens[: tokens.index(stop) + 1]
            assert deltas[-1].finish_reason is FinishReason.STOP
            assert deltas[-1].stop_token_id == stop
        await assert_nothing_held(one)
        assert totals(cores)[2] == 0


async def test_cached_tokens_are_those_of_the_replica_that_computes_the_prompt(model: Path) -> None:
    async with pools(model, "p", "d") as (one, cores):
        first = await collect(one.router, request("a", prompt=PROMPT))
        again = await collect(one.router, request("b", prompt=PROMPT))
        assert (first[0].num_cached_tokens, again[0].num_cached_tokens) == (0, 96)
        assert tokens_of(first) == tokens_of(again)
        await become_true(lambda: totals(cores)[1:] == (2, 0))


async def test_many_at_once_are_all_handed_over(model: Path) -> None:
    async with pools(model, "p1", "p2", "d1", "d2") as (one, cores):
        prompts = [[i + 2, *PROMPT] for i in range(40)]
        outputs = await asyncio.gather(
            *(collect(one.router, request(f"r{i}", prompt=prompt)) for i, prompt in enumerate(prompts))
        )
        assert [len(tokens_of(deltas)) for deltas in outputs] == [40] * 40
        await become_true(lambda: totals(cores) == (40, 40, 0))
        assert all(core.snapshot().num_generated_tokens for core in cores.values())
        await assert_nothing_held(one)


async def test_clients_that_leave_at_any_moment_leave_nothing(model: Path) -> None:
    async with pools(model, "p", "d") as (one, _):
        for round_number in range(4):
            tasks = [
                asyncio.create_task(collect(one.router, request(f"r{round_number}.{i}", prompt=[i + 2, *PROMPT * 4])))
                for i in range(16)
            ]
            for i, task in enumerate(tasks):
                await asyncio.sleep(0.001 * (i % 5))
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await assert_nothing_held(one)
        tokens = tokens_of(await collect(one.router, request("after", prompt=PROMPT)))
        assert len(tokens) == 40


async def test_an_answer_goes_on_when_the_replica_dies_that_its_prompt_was_handed_to(model: Path) -> None:
    async with pools(model, "p", "d1", "d2") as (one, _):
        undisturbed = await collect(one.router, request("r", prompt=PROMPT, max_tokens=100))
        killed: list[str] = []

        def kill(num_tokens: int) -> None:
            if num_tokens == 30:
                (replica_id,) = one.held
                killed.append(replica_id)
                one.engines[replica_id].close()

        moved = await collect(one.router, request("r", prompt=PROMPT, max_tokens=100), after=kill)
        assert killed[0] in ("d1", "d2")
        assert tokens_of(moved) == tokens_of(undisturbed)


async def test_a_role_is_taken_after_a_drain_and_nothing_is_lost(model: Path) -> None:
    async with pools(model, "p", "d1", "d2", drain_grace_s=0.1) as (one, cores):
        long = [request(f"r{i}", prompt=[i + 2, *PROMPT], max_tokens=600) for i in range(6)]
        expected = [tokens_of(await collect(one.router, msgspec.structs.replace(each))) for each in long[:2]]
        running = [asyncio.create_task(collect(one.router, each)) for each in long]
        await become_true(lambda: any(cores[name].snapshot().num_running for name in ("d1", "d2")))
        changed = next(name for name in ("d1", "d2") if cores[name].snapshot().num_running)
        (other,) = {"d1", "d2"} - {changed}

        def role(name: str) -> Role | None:
            (status,) = [status for status in one.router.replicas() if status.replica_id == name]
            return status.role if status.ready else None

        one.router.set_role(changed, Role.PREFILL)
        await become_true(lambda: role(changed) is Role.PREFILL, within_s=20)
        outputs = [tokens_of(await task) for task in running]
        assert [len(tokens) for tokens in outputs] == [600] * 6
        assert outputs[:2] == expected
        assert b'manta_requests_moved_total{edge="edge"} 0.0' not in await one.router.render_metrics()
        # It works in its new role, and may change it again.
        await one.ready(changed, other)
        sent = cores[changed].snapshot().num_kv_sent
        await collect(one.router, request("new", prompt=[99, *PROMPT]))
        await become_true(lambda: cores[changed].snapshot().num_kv_sent == sent + 1)
        one.router.set_role(changed, Role.MIXED)
        await become_true(lambda: role(changed) is Role.MIXED)
