"""The least that an HTTP server must do to stream tokens: uvicorn, one event each step and stream. Knows no model.

The yardstick of `manta bench overhead`: what it costs is the price of HTTP itself. Run as a module with port, step in
ms and the bytes of one event.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MODEL = "bare"
_DONE = b"data: [DONE]\n\n"


def token_event(event_bytes: int) -> bytes:
    """An event of that size, shaped as a completion's token."""
    head, tail = b'data: {"choices":[{"index":0,"text":"', b'","finish_reason":null}]}\n\n'
    return head + b"x" * max(1, event_bytes - len(head) - len(tail)) + tail


def make_app(step_s: float, event_bytes: int) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """An ASGI application that answers every completion with `max_tokens` events, one each `step_s`."""
    event = token_event(event_bytes)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if scope["method"] == "GET":
            await _start(send, b"application/json")
            await send({"type": "http.response.body", "body": json.dumps({"data": [{"id": MODEL}]}).encode()})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        num_tokens = json.loads(body)["max_tokens"]
        await _start(send, b"text/event-stream")
        due_s = time.monotonic()
        for index in range(num_tokens):
            due_s += step_s
            await asyncio.sleep(due_s - time.monotonic())
            last = _last_events(num_tokens) if index == num_tokens - 1 else b""
            await send({"type": "http.response.body", "body": last or event, "more_body": not last})

    return app


async def _start(send: Send, content_type: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})


def _last_events(num_tokens: int) -> bytes:
    last = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
    return b"".join(b"data: " + json.dumps(tree).encode() + b"\n\n" for tree in (last, usage)) + _DONE


def main() -> None:
    import uvicorn

    port, step_ms, event_bytes = sys.argv[1:]
    app = make_app(float(step_ms) / 1e3, int(event_bytes))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
