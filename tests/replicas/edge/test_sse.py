"""A stream's way to its client: sent at once without a task, in order and bounded when the client does not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from manta.engine.request import FinishReason
from manta.replicas.edge.direct import direct_writer
from manta.replicas.edge.errors import SlowReader
from manta.replicas.edge.sse import DONE, MAX_GATHERED, EventStream, Outbox, TextEvent, event
from tests.replicas.edge.local_server import LocalServer, local_server, sim_config, write_byte_model
from tests.replicas.edge.server import eventually


class Client:
    """An ASGI `send` that can be made to wait, as a server's does whose client does not read."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.received: list[MutableMapping[str, Any]] = []
        self.fails = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        if self.fails:
            raise ConnectionResetError("told to fail")
        self.received.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.received)


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_an_event_is_one_line_also_for_clients_that_split_text_where_unicode_breaks_lines() -> None:
    text = "a\x85b\u2028c\u2029d\ne é 漢"
    for data in (event({"text": text}), TextEvent(lambda changed: {"text": changed}).render(text)):
        [line, rest] = data.decode().splitlines()
        assert (json.loads(line.removeprefix("data: ")), rest) == ({"text": text}, "")


async def test_events_leave_within_the_turn_in_which_they_were_made() -> None:
    client = Client()
    stream = EventStream(client.send, Outbox())
    for part in (b"a", b"b", b"c"):
        stream.write(part)
        await asyncio.sleep(0)  # one turn of the event loop
    assert [message["type"] for message in client.received] == ["http.response.start"] + ["http.response.body"] * 3
    await stream.end()
    assert client.body == b"abc" + DONE
    assert [message.get("more_body") for message in client.received[1:]] == [True, True, True, False]


async def test_what_is_made_in_one_turn_is_one_message_also_with_the_end() -> None:
    client = Client()
    stream = EventStream(client.send, Outbox())
    stream.write(b"a")
    stream.write(b"b")
    await asyncio.sleep(0)
    stream.write(b"c")
    await stream.end()
    await turns()
    assert [message.get("body") for message in client.received[1:]] == [b"ab", b"c" + DONE]


async def test_streams_are_sent_in_order_and_the_first_of_many_waits_for_few() -> None:
    outbox, order = Outbox(), []

    def make(name: int) -> EventStream:
        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                order.append(name)

        return EventStream(send, outbox)

    streams = [make(name) for name in range(2 * MAX_GATHERED + 3)]
    for index, stream in enumerate(streams):
        stream.write(b"x")
        assert len(order) == (index + 1) // MAX_GATHERED * MAX_GATHERED
    await asyncio.sleep(0)
    assert order == list(range(len(streams)))


@pytest.mark.parametrize("num_sent_before", [0, 1])
async def test_events_for_a_slow_client_keep_their_order_and_are_joined(num_sent_before: int) -> None:
    client = Client()
    stream = EventStream(client.send, Outbox())
    for _ in range(num_sent_before):
        stream.write(b"-")
        await turns()
    client.reads.clear()
    for index in range(10):
        stream.write(b"%d" % index)
        await turns()
    assert client.body == b"-" * num_sent_before
    client.reads.set()
    await turns()
    assert client.body == b"-" * num_sent_before + b"0123456789"
    # The headers (once), what was sent before, the event that had to wait, and the others in one message.
    assert len(client.received) == 1 + num_sent_before + 2
    stream.write(b"x")
    await turns()
    assert client.body.endswith(b"9x")
    client.reads.clear()
    stream.write(b"y")
    await turns()
    ending = asyncio.create_task(stream.end())
    await turns()
    assert not ending.done()
    client.reads.set()
    await ending
    assert client.body.endswith(b"xy" + DONE)


async def test_what_waits_for_a_client_is_bounded() -> None:
    client = Client()
    stream = EventStream(client.send, Outbox(), max_unsent_bytes=100)
    client.reads.clear()
    stream.write(b"first")
    await turns()
    for _ in range(10):
        stream.write(b"." * 10)
    with pytest.raises(SlowReader, match="110 bytes"):
        stream.write(b"." * 10)
    stream.close()
    client.reads.set()
    await turns()
    assert client.received == []


async def test_an_interrupted_end_can_still_say_why() -> None:
    client = Client()
    stream = EventStream(client.send, Outbox())
    client.reads.clear()
    stream.write(b"a")
    await turns()
    ending = asyncio.create_task(stream.end())
    await turns()
    ending.cancel()
    await asyncio.wait((ending,))
    client.reads.set()
    await stream.end(b"because")
    assert client.body == b"abecause"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_connection_that_breaks_is_noticed(waits: bool) -> None:
    client = Client()
    stream = EventStream(client.send, Outbox())
    if waits:
        client.reads.clear()
    client.fails = not waits
    stream.write(b"a")
    await turns()
    client.fails = True
    client.reads.set()
    await turns()
    with pytest.raises(ConnectionResetError):
        stream.write(b"b")
    with pytest.raises(ConnectionResetError):
        await stream.end()


NUM_TOKENS = 900


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    config = sim_config(write_byte_model(tmp_path_factory.mktemp("model") / "bytes"), num_blocks=8192)
    with local_server(config) as one:
        yield one


def open_and_read_nothing(local: LocalServer, *, n: int) -> socket.socket:
    """A connection with a small window that has asked for a stream of n choices."""
    fields = {"prompt": [5], "n": n, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 1.0}
    body = json.dumps({"model": local.server.model, "return_token_ids": True, **fields}).encode()
    host, port = local.server.base_url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_pauses_misses_nothing_and_holds_up_nobody(local: LocalServer) -> None:
    with open_and_read_nothing(local, n=24) as connection:
        assert eventually(lambda: local.core.snapshot().num_finished >= 24, within_s=30)
        start_s = time.monotonic()
        assert local.server.ok("/v1/completions", prompt="x", max_tokens=5)["usage"]["completion_tokens"] == 5
        assert time.monotonic() - start_s < 2.0
        received = bytearray()
        while part := connection.recv(1 << 16):
            received += part
    lines = [line for line in bytes(received).split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
    for index in range(24):
        own = [choice for choice in choices if choice["index"] == index]
        assert sum(len(choice["token_ids"]) for choice in own) == NUM_TOKENS
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_most_events_take_the_short_way(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    original = RequestResponseCycle.send

    async def counted(self: RequestResponseCycle, message: Any) -> None:
        sent.append(message["type"])
        await original(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", counted)
    texts, reason = local.server.streamed("x", max_tokens=200, ignore_eos=True, return_token_ids=True)
    assert (len(texts), reason) == (200, "length")
    # Headers, the first event and the end; a few more when the client was slow for a moment.
    assert sent[0] == "http.response.start"
    assert 3 <= len(sent) < 50


def test_only_the_known_server_has_a_short_way() -> None:
    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    assert direct_writer(receive) is None
    assert direct_writer(Client().send) is None  # type: ignore[arg-type]


def test_a_client_that_never_reads_is_given_up(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream.__init__, "__kwdefaults__", {"write_part": None, "max_unsent_bytes": 1000})
    before = local.core.snapshot()
    with open_and_read_nothing(local, n=64):
        assert eventually(lambda: local.core.snapshot().num_cancelled > before.num_cancelled, within_s=30)
        local.server.assert_idle(within_s=2)
    reasons = {choice.finish_reason for choice in local.observer.records[-1].choices}
    assert FinishReason.CANCELLED in reasons
