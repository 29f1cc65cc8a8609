"""Around every endpoint: API keys, the way past the framework for streams, and the last line that turns an unexpected
error into an envelope. Plain ASGI."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from manta.cluster.routing.admission import Tenant
from manta.engine.errors import AuthenticationFailed

from .body import Receive
from .client import TenantKey
from .errors import ClientGone, reply_for
from .sse import Send, send_error

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/metrics/targets"})
"""Probes and scrapers need no key."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


TENANT = "manta.tenant"
"""In the scope: the Tenant whose key the request has; absent for other keys."""


class RequireApiKey:
    """Refuses requests without a known bearer token, and says whose it is. Comparing takes the same time for every
    wrong key."""

    def __init__(self, app: App, api_keys: Sequence[str], tenant_keys: Sequence[TenantKey] = ()) -> None:
        self._app = app
        owners = [*((key, None) for key in api_keys), *((known.key, known.tenant) for known in tenant_keys)]
        self._digests = [(hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in owners]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            owners = self._owners(scope)
            if not owners:
                message = "Incorrect or missing API key: send it as 'Authorization: Bearer <key>'."
                await send_error(send, reply_for(AuthenticationFailed(message)))
                return
            if owners[0] is not None:
                scope[TENANT] = owners[0]
        await self._app(scope, receive, send)

    def _owners(self, scope: Scope) -> list[Tenant | None]:
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [(hmac.compare_digest(digest, known), tenant) for known, tenant in self._digests]
        return [tenant for is_equal, tenant in matches if is_equal and kind.lower() == b"bearer"]


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
