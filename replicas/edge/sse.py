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

_MARK = "\u0000text\u0000"

encode_json = msgspec.json.Encoder().encode


def event(tree: Any) -> bytes:
    """One event that carries a JSON tree."""
    return b"data: " + encode_json(tree) + b"\n\n"


class TextEvent:
    """An event of which only one text changes: `make_tree(text)` is rendered once, then cut at the text."""

    def __init__(self, make_tree: Callable[[str], Any]) -> None:
        self._head, self._tail = event(make_tree(_MARK)).split(encode_json(_MARK))

    def render(self, text: str) -> bytes:
        return self._head + encode_json(text) + self._tail


class EventStream:
    """The reply of a streamed request. Headers go out with the first events, so that a refusal has a real status.

    `write` may be called outside of any task: it sends at once as long as the client reads. For one that does not,
    events wait here, bounded, and a task of their own sends them in order.
    """

    def __init__(self, send: Send, *, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self._send = send
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self.has_begun = False

    def write(self, events: bytes) -> None:
        """Send whole events now, or as soon as the client reads again. Raises SlowReader when too much waits."""
        if self._sender is None:
            started = _start(self._send_events(events))
            if started is not None:
                self._sender = asyncio.get_running_loop().create_task(self._go_on(started))
            return
        if self._sender.done():
            self._sender.result()
        self._unsent.append(events)
        self._num_unsent_bytes += len(events)
        if self._num_unsent_bytes > self._max_unsent_bytes:
            raise SlowReader(f"The client left {self._num_unsent_bytes} bytes of its stream unread.")

    async def end(self, events: bytes = DONE) -> None:
        """Send the last events, after all that waits, and end the reply."""
        if (sender := self._sender) is not None:
            await asyncio.wait((sender,))  # an interruption of this wait leaves the sender alone
            sender.result()
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def fail(self, reply: ErrorReply) -> None:
        """End a stream that has begun with an error event. No [DONE] follows: the answer is not complete."""
        await self.end(event(reply.envelope))

    def close(self) -> None:
        """Forget what waits. Nothing may be written any more."""
        if self._sender is not None:
            self._sender.cancel()

    def _send_events(self, events: bytes) -> Awaitable[None]:
        if not self.has_begun:
            return self._send_first(events)
        return self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_first(self, events: bytes) -> None:
        await self._begin()
        await self._send_events(events)

    async def _begin(self) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def _go_on(self, started: Awaitable[None]) -> None:
        await started
        while self._unsent:
            events, self._unsent, self._num_unsent_bytes = b"".join(self._unsent), [], 0
            await self._send_events(events)
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


async def send_error(send: Send, reply: ErrorReply) -> None:
    """Send an error as the whole reply."""
    await send_json(send, reply.body, status=reply.status, headers=reply.headers)


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
