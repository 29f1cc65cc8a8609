"""Around every endpoint: API keys, the way past the framework for streams, and the last line that turns an unexpected
error into an envelope. Plain ASGI."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from manta.engine.errors import AuthenticationFailed

from .body import Receive
from .errors import ClientGone, reply_for
from .sse import Send, send_error

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Probes and scrapers need no key."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireApiKey:
    """Refuses requests without a known bearer token. Comparing takes the same time for every wrong key."""

    def __init__(self, app: App, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_known(scope):
            message = "Incorrect or missing API key: send it as 'Authorization: Bearer <key>'."
            await send_error(send, reply_for(AuthenticationFailed(message)))
            return
        await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


class DirectPosts:
    """Hands POST requests to some paths straight to their endpoints, everything else to the framework."""

    def __init__(self, endpoints: Mapping[str, App], *, otherwise: App) -> None:
        self._endpoints = endpoints
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        app = self._endpoints.get(scope["path"]) if is_post else None
        await (self._otherwise if app is None else app)(scope, receive, send)


class ErrorBoundary:
    """Logs what no endpoint caught, once, and answers 500 in the envelope when nothing has been sent yet."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_begun = False

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            return
        except Exception as error:
            logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if has_begun:
                raise
            await send_error(send, reply_for(error))
