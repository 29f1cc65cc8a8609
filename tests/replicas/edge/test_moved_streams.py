"""What clients see of a stream whose replica is killed, stopped or drained at any token: the undisturbed answer.

The whole way from the request's JSON to the events, over real channels to simulated engines.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manta.engine.model_source import resolve_model
from manta.engine.startup import start_engine
from manta.engine.tokenizer import Tokenizer
from manta.replicas.channel import Address
from manta.replicas.edge.chat import chat_job
from manta.replicas.edge.client import EdgeContext
from manta.replicas.edge.completions import completions_job
from manta.replicas.edge.generate import run_choices
from manta.replicas.edge.job import Job
from manta.replicas.edge.schema import ChatFields, CompletionFields, read_fields
from manta.replicas.edge.stream import Piece
from tests.replicas.edge.local_server import sim_config, write_byte_model
from tests.replicas.fleet import KEYS, Fleet, become_true, fleet

ROOT = Path(__file__).parents[3]
NUM_TOKENS = 50
FIELDS: dict[str, Any] = {
    "model": "bytes", "prompt": "Once upon a time", "temperature": 0.9, "logprobs": 2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2,
    "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


class Edge:
    """The edge's own part of one process: contexts, jobs and their events."""

    def __init__(self, one: Fleet, folder: Path) -> None:
        self.fleet = one
        source = resolve_model(sim_config(folder).model)
        self._context = EdgeContext(one.router, Tokenizer.load(source, chat_template=None), "bytes")
        self._names = 0

    def start(self, folder: Path, **overrides: Any) -> str:
        """One more engine. Its name."""
        core = start_engine(sim_config(folder, **overrides))
        self._names += 1
        name = f"engine{self._names}"
        self.fleet.start(name, core, core.info)
        return name

    def job(self, **fields: Any) -> Job:
        info = self.fleet.router.info
        assert info is not None
        if "messages" in fields:
            return chat_job(self._context, info, read_fields(ChatFields, fields), 0.0)
        return completions_job(self._context, info, read_fields(CompletionFields, {**FIELDS, **fields}), 0.0)

    async def answer(self, job: Job, *, after: Callable[[int], None] = lambda num_tokens: None) -> list[Any]:
        """Everything that the client is sent, without what names the answer. `after` is told the tokens so far."""
        events: list[bytes] = []

        def deliver(pieces: Sequence[Piece]) -> None:
            events.append(job.form.events(pieces))
            after(sum(choice.num_tokens for choice in job.choices))

        await run_choices(self.fleet.router, job.choices, deliver)
        events.append(job.form.usage_event(job.usage()))
        lines = [line[6:] for line in b"".join(events).decode().split("\n\n") if line]
        return [{**json.loads(line), "id": "", "created": 0} for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes") / "model")


@asynccontextmanager
async def edge_over(folder: Path, num_engines: int, **limits: Any) -> AsyncIterator[Edge]:
    async with fleet(**limits) as one:
        edge = Edge(one, folder)
        await one.ready(*(edge.start(folder) for _ in range(num_engines)))
        yield edge


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def with_a_stop_string(edge: Edge) -> dict[str, Any]:
    """Fields of a request that a stop string of two letters ends at its fiftieth token, the first being held back."""
    for seed in range(1000):
        events = await edge.answer(edge.job(seed=seed))
        letters = [event["choices"][0]["text"] for event in events if event["choices"]]
        stop = "".join(letters[NUM_TOKENS - 2 : NUM_TOKENS])
        if len(letters) == 60 and stop.isascii() and stop.isprintable() and len(set(stop)) == 2:
            text = text_of(events)
            if text.index(stop) == len("".join(letters[: NUM_TOKENS - 2])):
                return {"seed": seed, "stop": [stop]}
    raise AssertionError("no seed gives such a text")


async def test_a_stream_is_the_same_wherever_its_replica_is_killed(folder: Path) -> None:
    async with edge_over(folder, 1) as edge:
        fields = await with_a_stop_string(edge)
        expected = await edge.answer(edge.job(**fields))
        assert expected[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        assert expected[-2]["choices"][0]["stop_reason"] == fields["stop"][0]
        killed = 0
        for index in range(1, NUM_TOKENS):
            edge.start(folder)
            await edge.fleet.ready(*edge.fleet.engines)
            has_died = False

            def kill(num_tokens: int, index: int = index) -> None:
                nonlocal has_died, killed
                if num_tokens >= index and not has_died:
                    has_died = True
                    (name,) = edge.fleet.held
                    edge.fleet.engines.pop(name).close()
                    killed += 1

            assert await edge.answer(edge.job(**fields), after=kill) == expected, index
            await edge.fleet.ready(*edge.fleet.engines)
        # The last token's predecessor is held back: the client hears of both together, and nothing of it in between.
        assert killed >= NUM_TOKENS - 2


async def test_a_stream_is_the_same_wherever_its_replica_is_drained(folder: Path) -> None:
    async with edge_over(folder, 2, drain_grace_s=0.0) as edge:
        fields = await with_a_stop_string(edge)
        expected = await edge.answer(edge.job(**fields))
        closing = []
        for index in range(1, NUM_TOKENS - 1):
            drained: list[str] = []

            def drain(num_tokens: int, index: int = index, drained: list[str] = drained) -> None:
                if num_tokens >= index and not drained:
                    drained.extend(edge.fleet.held)
                    edge.fleet.router.set_members(edge.fleet.engines.keys() - set(drained))

            assert await edge.answer(edge.job(**fields), after=drain) == expected, index
            # Nothing keeps the replica any more: Serve may stop it. (A stream that ended before it could move has the
            # connection closed behind it.)
            await become_true(
                lambda name=drained[0]: name not in {one.replica_id for one in edge.fleet.router.replicas()}
            )
            closing.append(asyncio.create_task(asyncio.to_thread(edge.fleet.engines.pop(drained[0]).close)))
            await edge.fleet.ready(*edge.fleet.engines, edge.start(folder))
        await asyncio.gather(*closing)


async def test_choices_of_a_chat_move_with_their_role_their_usage_and_their_order(folder: Path) -> None:
    fields = {"model": "bytes", "messages": [{"role": "user", "content": "Hi"}], "n": 3, "seed": 4, "max_tokens": 90}
    fields |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 1, "stream": True}

    def by_choice(events: list[Any]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for event in events[:-1]:
            found.setdefault(event["choices"][0]["index"], []).append(event)
        return found

    async with edge_over(folder, 3) as edge:
        expected = await edge.answer(edge.job(**fields))
        job = edge.job(**fields)
        killed: list[str] = []
        num_when_moved: dict[int, int] = {}

        def have_all_gone_on() -> bool:
            """Whether each choice had a token where it is now: what ends two replicas in a row is given up."""
            for choice in job.choices:
                if choice.note.replica_id not in killed:
                    num_when_moved.setdefault(choice.index, choice.num_tokens)
            return all(choice.num_tokens > num_when_moved.get(choice.index, 90) for choice in job.choices)

        def kill(num_tokens: int) -> None:
            if (not killed and num_tokens >= 20) or (len(killed) == 1 and have_all_gone_on()):
                killed.append(str(job.choices[0].note.replica_id))
                edge.fleet.engines.pop(killed[-1]).close()

        moved = await edge.answer(job, after=kill)
        assert len(set(killed)) == 2
        assert by_choice(moved) == by_choice(expected)
        assert moved[-1]["usage"]["completion_tokens"] == expected[-1]["usage"]["completion_tokens"] == 270


async def test_an_answer_that_is_not_streamed_moves_with_the_log_probabilities_of_its_prompt(folder: Path) -> None:
    fields = {"stream": False, "stream_options": None, "echo": True, "prompt_logprobs": 1, "seed": 3, "n": 2}

    async def body(edge: Edge, *, after: int | None = None) -> Any:
        job = edge.job(**fields)
        pieces: list[list[Piece]] = [[] for _ in job.choices]

        def collect(new: Any) -> None:
            nonlocal after
            for piece in new:
                pieces[piece.choice.index].append(piece)
            if after is not None and job.choices[0].num_tokens >= after:
                after = None
                edge.fleet.engines.pop(edge.fleet.held[0]).close()

        await run_choices(edge.fleet.router, job.choices, collect)
        return {**json.loads(job.form.body(job.choices, pieces, job.usage())), "id": "", "created": 0}

    async with edge_over(folder, 2) as edge:
        expected = await body(edge)
        assert len(expected["choices"][0]["prompt_logprobs"]) == expected["usage"]["prompt_tokens"]
        before = len(edge.fleet.engines)
        moved = await body(edge, after=11)
        assert len(edge.fleet.engines) == before - 1
        assert moved == expected


class Process:
    """A simulated engine in a process that can be stopped."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.replicas.sim_engine", str(folder), KEYS.public.decode()]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url, key, *_ = self.process.stdout.readline().split()
        self.address = Address(url, key.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def process(folder: Path) -> Iterator[Process]:
    one = Process(folder)
    yield one
    one.close()


async def test_streams_at_every_token_are_the_same_when_their_process_is_stopped(
    folder: Path, process: Process
) -> None:
    """A stream begins at each token of the first one, and if need be of the next; all freeze at the same moment, at
    twenty different tokens or more."""
    async with edge_over(folder, 1) as edge:
        fields = await with_a_stop_string(edge)
        expected = await edge.answer(edge.job(**fields))
        edge.fleet.addresses["process"] = process.address
        await edge.fleet.ready("process")
        progress: list[int] = []
        """Tokens of each stream."""
        frozen_at: list[int] = []
        running: list[asyncio.Task[list[Any]]] = []
        leader = 0

        def begin() -> None:
            stream = len(progress)
            progress.append(0)

            def after(num_tokens: int) -> None:
                nonlocal leader
                progress[stream] = num_tokens
                if frozen_at or stream != leader:
                    return
                if num_tokens < NUM_TOKENS - 2:
                    begin()
                elif len(set(progress) - {NUM_TOKENS}) >= 20:
                    process.process.send_signal(signal.SIGSTOP)
                    frozen_at.extend(progress)
                else:  # tokens came in lumps, so that streams began together: others follow the next one
                    leader = next(other for other, tokens in enumerate(progress) if tokens < NUM_TOKENS - 2)

            running.append(asyncio.create_task(edge.answer(edge.job(**fields), after=after)))

        begin()
        await become_true(lambda: bool(frozen_at), within_s=20)
        start_s = asyncio.get_running_loop().time()
        edge.fleet.router.set_members(["process", edge.start(folder)])
        await become_true(lambda: [s.ready for s in edge.fleet.router.replicas()] == [False, True])
        assert asyncio.get_running_loop().time() - start_s < 5.0
        for stream, events in enumerate(await asyncio.gather(*running)):
            assert events == expected, (stream, frozen_at[stream])
        assert len(set(frozen_at)) >= 20
