"""Chaos without a system: what counts as altered or failed, and what a report says."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from manta.bench.chaos import ChaosReport, summary
from manta.bench.chaos_faults import FAULTS, FaultRecord
from manta.bench.chaos_load import Answer, ChoiceSeen, Load, LoadCounts, ask, make_bodies
from manta.bench.chaos_system import arguments_of
from manta.bench.http_client import HttpClient
from manta.deploy.chaos_cli import KINDS, NODE_KINDS
from manta.deploy.config import load_config


def answer(**changes: Any) -> Answer:
    choice = ChoiceSeen("abc", [1, 2, 3], ["a", "b", "c"], [-0.1, -0.2, -0.3], [0, 1, 2], "stop", "d")
    for name, value in changes.items():
        setattr(choice, name, value)
    return Answer({0: choice}, num_prompt_tokens=5, num_completion_tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "abd"),
        ("text", "abcabc"),
        ("token_ids", [1, 2]),
        ("token_ids", [1, 2, 3, 3]),
        ("logprob_tokens", ["a", "b", "b"]),
        ("logprobs", [-0.1, -0.2, -0.31]),
        ("text_offsets", [0, 1, 1]),
        ("finish_reason", "length"),
        ("stop_reason", None),
    ],
)
def test_whatever_a_client_sees_differently_is_an_altered_output(name: str, value: Any) -> None:
    assert answer().difference(answer()) is None
    assert answer(**{name: value}).difference(answer()) is not None


def test_of_an_answer_that_the_client_left_the_beginning_counts() -> None:
    begun = answer(text="ab", token_ids=[1, 2], logprob_tokens=["a"], logprobs=[-0.1], text_offsets=[0])
    begun.choices[0].finish_reason = None
    assert begun.difference(answer(), is_whole=False) is None
    begun.choices[0].text = "ac"
    assert begun.difference(answer(), is_whole=False) is not None


def test_usage_and_the_number_of_choices_count() -> None:
    for name, value in (("num_completion_tokens", 4), ("num_prompt_tokens", 4), ("choices", {})):
        other = answer()
        setattr(other, name, value)
        assert other.difference(answer()) is not None


def test_rounding_of_log_probabilities_is_no_difference() -> None:
    assert answer(logprobs=[-0.1001, -0.2, -0.3]).difference(answer()) is None


def test_counts_tell_failed_altered_and_left_requests_apart() -> None:
    counts = LoadCounts()
    failed = answer()
    failed.error = "status 500"
    for seen in (answer(), failed, answer(text="x")):
        counts.note(seen, answer(), has_left=False)
    counts.note(Answer(), answer(), has_left=True)
    assert (counts.requests, counts.disconnects, counts.failed, counts.altered) == (3, 1, 1, 1)
    assert len(counts.problems) == 2


def test_bodies_are_reproducible_and_cover_what_a_move_could_break() -> None:
    bodies = make_bodies("m", count=24, seed=3, max_tokens=100)
    assert bodies == make_bodies("m", count=24, seed=3, max_tokens=100)
    assert bodies != make_bodies("m", count=24, seed=4, max_tokens=100)
    for name in ("logprobs", "stop", "presence_penalty", "n", "top_p", "stream_options"):
        assert 1 < sum(name in body for body in bodies) < 24
    assert len({json.dumps(body) for body in bodies}) == 24
    assert all("seed" in body for body in bodies)


EVENTS = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [1], "logprobs": None, "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "b", "token_ids": [2], "logprobs": None, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]


@asynccontextmanager
async def server(reply: Callable[[], list[Any]], *, status: int = 200) -> AsyncIterator[str]:
    """Answers every request with the events that `reply` gives; what is not a dict is sent as it is."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for event in [*reply(), None]:
                data = b"" if event is None else event if isinstance(event, bytes) else json.dumps(event).encode()
                data = b"data: " + data + b"\n\n" if data else b""
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await listening.wait_closed()


async def test_a_whole_stream_has_no_error_and_one_that_breaks_off_has() -> None:
    body = {"stream": True}
    for events, error in (
        ([*EVENTS, b"[DONE]"], None),
        (EVENTS, "without [DONE]"),
        ([EVENTS[0], {"error": {"message": "engine failed"}}, b"[DONE]"], "engine failed"),
    ):
        async with server(lambda events=events: events) as url:
            client = HttpClient(url)
            seen = await ask(client, body)
            await client.close()
        assert (seen.error is None) == (error is None)
        assert error is None or error in str(seen.error)
        assert seen.choices[0].text.startswith("a")


async def test_the_load_finds_an_answer_that_changes() -> None:
    first = [*EVENTS, b"[DONE]"]
    changed = copy.deepcopy(first)
    changed[1]["choices"][0]["token_ids"] = [9]
    answers = [first]
    bodies = [{"stream": True, "number": i} for i in range(3)]
    async with server(lambda: answers[0]) as url:
        load = Load(url, bodies, num_streams=2, seed=0)
        assert await load.learn() == []
        load.start()
        while load.counts.requests < 20:
            await asyncio.sleep(0.005)
        assert (load.counts.failed, load.counts.altered) == (0, 0)
        answers[0] = changed
        while not load.counts.altered:
            await asyncio.sleep(0.005)
        await load.stop()


def record(kind: str, out_s: float | None, again_s: float | None) -> FaultRecord:
    return FaultRecord(kind, 1.0, "what", True, out_s, again_s, 1, 4)


def test_a_report_is_clean_only_without_failures_alterations_leaks_and_problems() -> None:
    assert ChaosReport(0).is_clean
    for name in ("failed_requests", "altered_outputs", "leaked_blocks", "leaked_actors", "leaked_placement_groups"):
        report = ChaosReport(0)
        setattr(report, name, 1)
        assert not report.is_clean
        assert " 1" in summary(report)[1]
    assert not ChaosReport(0, problems=["x"]).is_clean
    report = ChaosReport(
        0, faults={"kill_rank": 2}, fault_log=[record("kill_rank", 0.1, 5.0), record("kill_rank", 0.3, 9.0)]
    )
    assert report.by_kind()["kill_rank"] == {
        "out_of_routing_s": 0.2, "worst_out_of_routing_s": 0.3, "serving_again_s": 7.0, "worst_serving_again_s": 9.0,
    }  # fmt: skip


def test_the_command_knows_every_fault() -> None:
    assert tuple(FAULTS) == (*KINDS, *NODE_KINDS)


def test_a_deployment_s_arguments_give_the_same_deployment() -> None:
    config = load_config("sim-h200", {"engine.device": "sim:20ms", "serving.node_labels": {"role": "engine"}})
    assert load_config(None, arguments_of(config)) == config
