"""From exceptions to OpenAI's error envelope: status, body, headers. Knows no endpoint.

Every error that leaves the edge has the body {"error": {"message", "type", "param", "code"}}, also inside a stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from manta.engine.errors import (
    AuthenticationFailed,
    EngineFailed,
    InvalidRequest,
    MantaError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)


class NotAllowed(MantaError):
    """The key is a good one, but not for this."""


class RequestTooLarge(MantaError):
    """The body has more bytes than this server reads."""


class RequestTimedOut(MantaError):
    """The request took longer than the server allows."""


class UnknownRequest(MantaError):
    """Nothing is remembered of a request by that id."""


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


class SlowReader(ClientGone):
    """The client keeps its connection but does not read: its stream is given up."""


@dataclass(frozen=True)
class ErrorReply:
    """What a client gets to see of an error."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    estimated_wait_s: float | None = None
    """Of a refusal: how long the request would have waited for its first token."""

    @property
    def envelope(self) -> dict[str, Any]:
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.estimated_wait_s is not None:
            error["estimated_wait_s"] = round(self.estimated_wait_s, 3)
        return {"error": error}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope)


def reply_for(error: Exception) -> ErrorReply:
    """The reply for any exception; one that is not ours shows nothing of its inside."""
    match error:
        case InvalidRequest():
            return ErrorReply(400, _text(error), "invalid_request_error", error.param, error.code)
        case AuthenticationFailed():
            header = {"WWW-Authenticate": "Bearer"}
            return ErrorReply(401, _text(error), "invalid_request_error", None, "invalid_api_key", header)
        case ModelNotFound():
            return ErrorReply(404, _text(error), "invalid_request_error", "model", "model_not_found")
        case NotAllowed():
            return ErrorReply(403, _text(error), "permission_error", None, "not_allowed")
        case UnknownRequest():
            return ErrorReply(404, _text(error), "invalid_request_error", "request_id", "request_not_found")
        case RequestTooLarge():
            return ErrorReply(413, _text(error), "invalid_request_error", None, "request_too_large")
        case Overloaded():
            retry = _retry_after(error.retry_after_s)
            return ErrorReply(429, _text(error), "rate_limit_error", None, error.code, retry, error.estimated_wait_s)
        case Unavailable():
            retry = _retry_after(error.retry_after_s)
            return ErrorReply(503, _text(error), "service_unavailable_error", None, "unavailable", retry)
        case RequestTimedOut():
            return ErrorReply(504, _text(error), "server_error", None, "timeout")
        case EngineFailed():
            return ErrorReply(500, _text(error), "server_error", None, "engine_failed")
    return ErrorReply(500, "The server had an internal error; the log has its cause.", "server_error", None, "internal")


def reply_for_status(status: int, path: str, method: str) -> ErrorReply:
    """The reply for what the HTTP framework refuses by itself: unknown paths and methods."""
    if status == 404:
        return ErrorReply(404, f"Unknown request URL: {method} {path}.", "invalid_request_error", None, "unknown_url")
    if status == 405:
        message = f"{path} does not take {method} requests."
        return ErrorReply(405, message, "invalid_request_error", None, "method_not_allowed")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorReply(status, f"The request was refused with status {status}.", kind)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
