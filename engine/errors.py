"""Typed errors of the whole product. Each message is one sentence that says what to do; knows nothing of HTTP."""

from __future__ import annotations


class MantaError(Exception):
    """Base of every error that a user may see."""


class ConfigError(MantaError):
    """A configuration field has a value that cannot work. `field` is its dotted name."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(MantaError):
    """Model files are missing, short, contradictory or of an unsupported kind; the message names the file or tensor."""


class InvalidRequest(MantaError):
    """The sender must change the request. `param` names the field, `code` is a stable machine-readable reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output does not fit the served context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFound(MantaError):
    """The request names a model that is not served here."""


class AuthenticationFailed(MantaError):
    """The API key is missing or wrong."""


class Overloaded(MantaError):
    """Too much work for now; try again after `retry_after_s` seconds. `code` is a stable machine-readable reason,
    `estimated_wait_s` how long it would have taken to the first token, when that is why."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        code: str = "overloaded",
        estimated_wait_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code
        self.estimated_wait_s = estimated_wait_s


class Unavailable(MantaError):
    """Nothing can answer now (loading, stopping, no replica); try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFailed(MantaError):
    """The engine died while it worked on the request; the request may be sent again."""
