"""Server-sent events and the sending of replies as plain ASGI messages. Knows no endpoint.

Events are joined before they are sent: one `send` for all that came at once. Nothing here validates or copies JSON
trees for the common event, which is a text between two prebuilt byte strings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from .errors import ErrorReply

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DONE = b"data: [DONE]\n\n"

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
    """The reply of a streamed request. Headers go out with the first events, so that a refusal has a real status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def write(self, events: bytes) -> None:
        """Send whole events."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = DONE) -> None:
        """Send the last events and end the reply."""
        if not self.has_begun:
            await self.write(b"")
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def fail(self, reply: ErrorReply) -> None:
        """End a stream that has begun with an error event. No [DONE] follows: the answer is not complete."""
        await self.end(event(reply.envelope))


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
