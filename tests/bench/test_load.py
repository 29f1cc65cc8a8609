"""The load generator against a real bare server, and against replies that are wrong in every way it tells apart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manta.bench import serving
from manta.bench.bare_server import token_event
from manta.bench.http_client import HttpClient, RequestFailed
from manta.bench.load import ServerProblem, StreamReader, Target, closed_loop, find_target, open_loop, send_one
from manta.bench.overhead import lags_s
from manta.bench.process_cpu import tree_cpu_s
from manta.bench.server_process import ServerDied, running
from manta.bench.stats import RequestRecord
from manta.bench.workloads import Item, at_rate, uniform
from manta.deploy.checks import free_ports
from manta.engine.errors import ConfigError

TARGET = Target("m", None)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


TOKEN = token_event(90)
LAST = b'data: {"choices":[{"index":0,"text":"x","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(*writes: bytes, close: bool = False) -> AsyncIterator[HttpClient]:
    """A server that answers each request with `writes`, a moment between them."""

    tasks: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                for data in writes:
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield client
        await client.close()
        await asyncio.gather(*tasks)


async def one(client: HttpClient) -> RequestRecord:
    return await send_one(client, TARGET, Item([1, 2], 3), time.monotonic())


async def test_a_stream_cut_at_any_byte_is_read_the_same() -> None:
    whole = HEAD + chunked(TOKEN, TOKEN + LAST, USAGE + DONE) + b"0\r\n\r\n"
    for cut in range(1, len(whole), 7):
        async with answering(whole[:cut], whole[cut:]) as client:
            record = await one(client)
            assert record.ok, (cut, record.error)
            assert record.num_output_tokens == 3
            assert record.finish_reason == "length"


async def test_a_connection_is_used_again() -> None:
    whole = HEAD + chunked(TOKEN, TOKEN, LAST, USAGE, DONE) + b"0\r\n\r\n"
    async with answering(whole) as client:
        records = [await one(client) for _ in range(3)]
        assert all(record.ok for record in records)
        assert len(client._idle) == 1


@pytest.mark.parametrize(
    ("writes", "kind"),
    [
        ((b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}",), "http_429"),
        ((HEAD + chunked(TOKEN, LAST, USAGE) + b"0\r\n\r\n",), "truncated"),
        ((HEAD + chunked(TOKEN, LAST, USAGE.replace(b"3", b"2"), DONE) + b"0\r\n\r\n",), "wrong_token_count"),
        ((HEAD + chunked(TOKEN, LAST.replace(b"length", b"stop"), USAGE, DONE) + b"0\r\n\r\n",), "wrong_finish_reason"),
        ((HEAD + chunked(TOKEN, b'data: {"error":{"message":"x"}}\n\n') + b"0\r\n\r\n",), "error_event"),
        ((HEAD + chunked(TOKEN, b"data: {\n\n", DONE) + b"0\r\n\r\n",), "bad_event"),
        ((HEAD + chunked(TOKEN),), "disconnected"),
        ((b"SSH-2.0 hello\r\n\r\n",), "disconnected"),
    ],
)
async def test_what_goes_wrong_is_told_apart(writes: tuple[bytes, ...], kind: str) -> None:
    async with answering(*writes, close=True) as client:
        assert (await one(client)).error == kind


async def test_no_server() -> None:
    (port,) = free_ports(1)
    client = HttpClient(f"http://127.0.0.1:{port}")
    assert (await one(client)).error == "connect"
    with pytest.raises(ServerProblem, match="manta serve"):
        await find_target(client)
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        HttpClient("https://example.com")


async def test_a_slow_reply_times_out() -> None:
    async with answering(HEAD) as client:
        with pytest.raises(RequestFailed, match=r"within 0\.05 s"):
            await client.request("GET", "/", timeout_s=0.05)
        assert client._idle == []


def test_arrivals_are_counted_by_read_and_text_cannot_forge_them() -> None:
    record = RequestRecord(0.0, 1, 3)
    reader = StreamReader(record)
    reader.feed(1.0, TOKEN + TOKEN[:20])
    reader.feed(2.0, TOKEN[20:-2])
    reader.feed(3.0, b"\n\n" + LAST)
    reader.feed(4.0, USAGE + DONE)
    assert record.arrivals_s == [1.0, 3.0]
    assert record.num_events == 3
    assert reader.problem() is None


def test_lag_is_against_the_device_s_pace() -> None:
    record = RequestRecord(0.0, 1, 11, arrivals_s=[5.0, 5.3], num_output_tokens=11)
    assert lags_s([record], 0.02) == pytest.approx([0.1])


@pytest.fixture
async def bare() -> AsyncIterator[str]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with running([sys.executable, "-m", "manta.bench.bare_server", str(port), "5", "100"], url) as server:
        assert sum(tree_cpu_s(server.pid).values()) > 0
        yield url


async def test_loops_against_the_bare_server(bare: str) -> None:
    client = HttpClient(bare)
    target = await find_target(client)
    items = uniform(8, 4, 10, vocab_size=2000, seed=0)
    closed = await closed_loop(client, target, items, concurrency=3)
    assert [record.error for record in closed.records] == [None] * 8
    # Between the moments at which the client had an answer and sent the next request at most three were in flight.
    changes = sorted([(r.due_s, 1) for r in closed.records] + [(r.finished_s or 0.0, -1) for r in closed.records])
    in_flight = [sum(change for _, change in changes[: index + 1]) for index in range(len(changes))]
    assert max(in_flight) == 3
    for record in closed.records:
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.004  # a step of 5 ms; the server's event loop rounds its timers to 1 ms
        assert record.num_events == 10
        assert len(record.arrivals_s) <= 10
    begin_s = time.monotonic()
    opened = await open_loop(client, target, at_rate(items, 40.0, process="constant"))
    assert all(record.ok for record in opened.records)
    assert time.monotonic() - begin_s >= 7 / 40 + 0.05
    dues = sorted(record.due_s for record in opened.records)
    assert dues[-1] - dues[0] == pytest.approx(7 / 40)
    await client.close()


async def test_a_sweep_with_knee_and_goodput_as_report(bare: str, tmp_path: Path) -> None:
    requests = serving.Requests(prompt_lens="8", output_lens="4", num_requests=6)
    report = await asyncio.to_thread(
        serving.run,
        bare,
        concurrency=[1, 2],
        slo="ttft=5",
        requests=requests,
        json_path=tmp_path / "a.json",
        plot_path=tmp_path / "a.png",
    )
    figures = report.figures
    assert figures["concurrency_1_errors"] == 0
    assert figures["concurrency_2_requests"] == 6
    assert figures["concurrency_1_goodput_requests_per_s"] == figures["concurrency_1_requests_per_s"]
    assert figures["concurrency_1_ttft_median_ms"] >= 4.0
    assert figures["knee_by_power_concurrency"] in (1, 2)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="needs --slo"):
        serving.run(bare, knee=True)
    with pytest.raises(ConfigError, match="not both"):
        serving.run(bare, rates=[1], concurrency=[1])
    with pytest.raises(ServerProblem, match="serves bare"):
        await asyncio.to_thread(serving.run, bare, model="other")


async def test_a_server_that_does_not_start_is_said_with_its_last_lines() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ServerDied, match="no such thing"):
        async with running([sys.executable, "-c", "raise SystemExit('no such thing')"], f"http://127.0.0.1:{port}"):
            raise AssertionError("it never runs")


def test_cpu_of_a_tree_grows_with_work() -> None:
    before = sum(tree_cpu_s(os.getpid()).values())
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    assert sum(tree_cpu_s(os.getpid()).values()) - before >= 0.15
