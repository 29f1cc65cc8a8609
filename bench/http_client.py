"""A small HTTP/1.1 client for load generation: keep-alive, chunked replies, events with their times. Knows no API.

It exists because the client shares the machine with the server that it measures: a general client costs several times
more CPU per event. It speaks to one address, without TLS, and follows no redirects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from manta.engine.errors import ConfigError, MantaError

OnBody = Callable[[float, bytes], None]
"""Called with the time (time.monotonic) and each part of a reply's body as it arrives, chunk framing removed."""


class RequestFailed(MantaError):
    """No complete reply came. `kind` is short and stable, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    """Empty when the body went to `on_body`."""


class HttpClient:
    """Connections to one server. Every request in flight has a connection of its own; idle ones are used again."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` is http://host:port. Raises ConfigError for another scheme."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"--url {url!r}: load is sent to http://HOST:PORT only")
        self._host, self._port = parts.hostname, parts.port or 80
        lines = [f"Host: {parts.netloc}", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {api_key}"] if api_key else []
        self._fixed_headers = "".join(f"{line}\r\n" for line in lines)
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        on_body: OnBody | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> Reply:
        """Send and wait for the whole reply. A successful reply's body goes to `on_body` when given.

        Raises RequestFailed with kind `connect`, `timeout` or `disconnected`.
        """
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"{method} {path} HTTP/1.1\r\n{self._fixed_headers}{extra}Content-Length: {len(body)}\r\n\r\n"
        connection = await self._connection()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await connection.send(head.encode() + body, on_body)
        except TimeoutError:
            raise RequestFailed("timeout", f"no complete reply within {timeout_s:g} s") from None
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        return reply

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise RequestFailed("connect", f"cannot reach {self._host}:{self._port}: {error.strerror}") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._done: asyncio.Future[Reply] | None = None
        self._on_body: OnBody | None = None
        self._status = 0
        self._headers: dict[str, str] | None = None
        self._left: int | None = None
        """Bytes that the body still has; None: chunked."""
        self._body: list[bytes] = []

    @property
    def is_reusable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._done is None

    async def send(self, message: bytes, on_body: OnBody | None) -> Reply:
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._on_body, self._headers, self._body = on_body, None, []
        self._buffer.clear()
        self._transport.write(message)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed the connection{f' ({exc})' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        if self._done is None:
            self.close()
            return
        now_s = time.monotonic()
        self._buffer += data
        try:
            if self._headers is None and not self._read_head():
                return
            self._read_body(now_s)
        except (ValueError, IndexError):
            self._fail("the server's reply is not HTTP/1.1")
            self.close()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self._status = int(status_line.split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        chunked = self._headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = None if chunked else int(self._headers.get("content-length", "0"))
        return True

    def _read_body(self, now_s: float) -> None:
        if self._left is not None:
            part = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(part)
            self._deliver(now_s, part)
            if not self._left:
                self._finish()
            return
        parts, start, is_last = [], 0, False
        while (line_end := self._buffer.find(b"\r\n", start)) >= 0:
            size = int(self._buffer[start:line_end].split(b";")[0], 16)
            end = line_end + 2 + size
            if len(self._buffer) < end + 2:
                break
            if not size:
                is_last = True
                break
            parts.append(bytes(self._buffer[line_end + 2 : end]))
            start = end + 2
        del self._buffer[:start]
        self._deliver(now_s, b"".join(parts))
        if is_last:
            self._finish()

    def _deliver(self, now_s: float, part: bytes) -> None:
        if not part:
            return
        if self._on_body is not None and self._status < 300:
            self._on_body(now_s, part)
        else:
            self._body.append(part)

    def _finish(self) -> None:
        done, self._done = self._done, None
        headers = self._headers or {}
        if headers.get("connection", "").lower() == "close":
            self.close()
        if done is not None and not done.done():
            done.set_result(Reply(self._status, headers, b"".join(self._body)))

    def _fail(self, why: str) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(RequestFailed("disconnected", why))
