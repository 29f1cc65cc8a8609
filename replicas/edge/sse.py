"""Server-sent events and the sending of replies as plain ASGI messages. Knows no endpoint.

Events are joined before they are sent: one `send` for all that came at once, without waking a task. Nothing here
validates or copies JSON trees for the common event, which is a text between two prebuilt byte strings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from typing import Any

import msgspec

from .errors import ErrorReply, SlowReader

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"

MAX_UNSENT_BYTES = 8 * 2**20
"""What one stream may keep for a client that does not read, beside the buffers of its connection."""

MAX_GATHERED = 128
"""Streams whose events are made before the first of them is sent."""

_MARK = "\u0000text\u0000"

_encode = msgspec.json.Encoder().encode
_LINE_BREAKS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""What Unicode calls a line break and JSON leaves as it is: many clients split an event's text there."""


def encode_json(tree: Any) -> bytes:
    """JSON of which no client makes two lines."""
    data = _encode(tree)
    if not data.isascii():
        for char, escaped in _LINE_BREAKS:
            data = data.replace(char, escaped)
    return data


def event(tree: Any) -> bytes:
    """One event that carries a JSON tree."""
    return b"data: " + encode_json(tree) + b"\n\n"


class TextEvent:
    """An event of which only one text changes: `make_tree(text)` is rendered once, then cut at the text."""

    def __init__(self, make_tree: Callable[[str], Any]) -> None:
        self._head, self._tail = event(make_tree(_MARK)).split(encode_json(_MARK))

    def render(self, text: str) -> bytes:
        return self._head + encode_json(text) + self._tail


class Outbox:
    """Streams with something to send, sent one after the other when the callback that filled them is over.

    The proxy behind the connections then wakes once for many events: sent as they are made, each would wake it.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)
        if len(self._streams) == MAX_GATHERED:  # nor should the first of very many wait for the last
            self._flush()

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
    """The reply of a streamed request. Headers go out with the first events, so that a refusal has a real status.

    `write` may be called outside of any task: events are sent within the same turn of the event loop as long as the
    client reads. For one that does not they wait here, bounded, and a task of their own sends them in order.
    """

    def __init__(
        self,
        send: Send,
        outbox: Outbox,
        *,
        write_part: Callable[[bytes], bool] | None = None,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """`write_part`: a shorter way than `send` for events between the first and the last; see direct.py."""
        self._send = send
        self._write_part = write_part
        self._outbox = outbox
        self.headers: Callable[[], Mapping[str, str]] = dict[str, str]
        """More headers, asked for when the first events go out."""
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0
        self._is_in_outbox = False
        self._sender: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self.has_begun = False

    def write(self, events: bytes) -> None:
        """Send whole events soon, or as soon as the client reads again. Raises SlowReader when too much waits."""
        if self._error is not None:
            raise self._error
        self._unsent.append(events)
        self._num_unsent_bytes += len(events)
        if self._sender is None:
            if not self._is_in_outbox:
                self._is_in_outbox = True
                self._outbox.add(self)
        elif self._num_unsent_bytes > self._max_unsent_bytes:
            raise SlowReader(f"The client left {self._num_unsent_bytes} bytes of its stream unread.")

    def flush(self) -> None:
        """For the outbox: send what waits, in no task as long as the client reads."""
        self._is_in_outbox = False
        if not self._unsent or self._sender is not None:
            return
        try:
            events = self._take_unsent()
            if self.has_begun and self._write_part is not None and self._write_part(events):
                return
            started = _start(self._send_events(events))
        except Exception as error:  # belongs to the stream's own task, which asks at its next write
            self._error = error
            return
        if started is not None:
            self._sender = asyncio.get_running_loop().create_task(self._go_on(started))

    async def end(self, events: bytes = DONE) -> None:
        """Send the last events, after all that waits, and end the reply."""
        if (sender := self._sender) is not None:
            await asyncio.wait((sender,))  # an interruption of this wait leaves the sender alone
        if self._error is not None:
            raise self._error
        if not self.has_begun:
            await self._begin()
        body = self._take_unsent() + events
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, reply: ErrorReply) -> None:
        """End a stream that has begun with an error event. No [DONE] follows: the answer is not complete."""
        await self.end(event(reply.envelope))

    def close(self) -> None:
        """Forget what waits. Nothing may be written any more."""
        self._unsent = []
        if self._sender is not None:
            self._sender.cancel()

    def _take_unsent(self) -> bytes:
        unsent, self._unsent, self._num_unsent_bytes = self._unsent, [], 0
        return unsent[0] if len(unsent) == 1 else b"".join(unsent)

    def _send_events(self, events: bytes) -> Awaitable[None]:
        if not self.has_begun:
            return self._send_first(events)
        return self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_first(self, events: bytes) -> None:
        await self._begin()
        await self._send_events(events)

    async def _begin(self) -> None:
        self.has_begun = True
        headers = _STREAM_HEADERS + [(name.lower().encode(), value.encode()) for name, value in self.headers().items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _go_on(self, started: Awaitable[None]) -> None:
        try:
            await started
            while self._unsent:
                await self._send_events(self._take_unsent())
        except Exception as error:
            self._error = error
        finally:
            self._sender = None


def _start(awaitable: Awaitable[None]) -> _Started | None:
    """Run an awaitable up to its first wait, in no task. None when it did not wait; else what runs the rest."""
    steps = awaitable.__await__()
    try:
        return _Started(next(steps), steps)
    except StopIteration:
        return None


class _Started:
    """The rest of an awaitable that waits for a future. Await it in a task."""

    def __init__(self, awaited: Any, rest: Generator[Any, None, None]) -> None:
        self._awaited = awaited
        self._rest = rest

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield self._awaited
        except BaseException:
            self._rest.close()
            raise
        yield from self._rest


async def send_json(send: Send, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send one whole JSON reply."""
    listed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    listed += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, reply: ErrorReply, *, headers: Mapping[str, str] | None = None) -> None:
    """Send an error as the whole reply, with `headers` beside its own."""
    await send_json(send, reply.body, status=reply.status, headers={**reply.headers, **(headers or {})})


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
