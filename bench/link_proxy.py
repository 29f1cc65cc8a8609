"""A TCP link that can be cut, silenced and slowed down, between a port of this machine and another. Knows no protocol.

All links run in one thread with an event loop of its own; every method may be called by any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future

PART_BYTES = 16 * 1024


class LinkState(enum.Enum):
    UP = enum.auto()
    CUT = enum.auto()
    """Connections are broken, and new ones end at once."""
    SILENT = enum.auto()
    """Connections stay, and nothing arrives: what a firewall does that drops packets."""


class Link:
    """One way to `target`, which may be set later, from `port` of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.target: tuple[str, int] | None = None
        self.num_bytes = 0
        """Passed on so far, both ways."""
        self.state = LinkState.UP
        self.bytes_s: float | None = None
        """How many bytes a second pass each way; None: as many as come."""
        self.latency_s = 0.0
        """Added to every part."""
        self.up = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """That are open now."""
        return len(self.tasks) // 2


class Links:
    """`open` as many as needed; `close` at the end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """That passed over all links."""
        return sum(link.num_bytes for link in self._links)

    @property
    def num_connections(self) -> int:
        """That are open now."""
        return sum(link.num_connections for link in self._links)

    def open(self) -> Link:
        """A link without a target; connections end at once until it has one."""

        async def listen() -> Link:
            link = Link(0)
            server = await asyncio.start_server(lambda r, w: self._connected(link, r, w), "127.0.0.1", 0)
            link.port = server.sockets[0].getsockname()[1]
            link.up.set()
            self._servers.append(server)
            self._links.append(link)
            return link

        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result()

    def cut(self) -> None:
        """Break all connections; none can be made until `heal`."""
        self._set(LinkState.CUT)

    def silence(self) -> None:
        """Let nothing pass until `heal`."""
        self._set(LinkState.SILENT)

    def slow(self, *, bytes_s: float, latency_s: float) -> None:
        """From now on parts take longer, until `heal`."""

        def change() -> None:
            for link in self._links:
                link.bytes_s, link.latency_s = bytes_s, latency_s

        self._do(change)

    def heal(self) -> None:
        """As it was."""

        def change() -> None:
            for link in self._links:
                link.bytes_s, link.latency_s = None, 0.0

        self._do(change)
        self._set(LinkState.UP)

    def close(self) -> None:
        """Break everything off."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = [task for link in self._links for task in link.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _set(self, state: LinkState) -> None:
        def change() -> None:
            for link in self._links:
                link.state = state
                if state is LinkState.SILENT:
                    link.up.clear()
                else:
                    link.up.set()
                if state is LinkState.CUT:
                    for task in list(link.tasks):
                        task.cancel()

        self._do(change)

    def _do(self, change: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            change()
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result()

    async def _connected(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if link.target is None or link.state is LinkState.CUT:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*link.target)
        except OSError:
            writer.close()
            return
        ways = [(reader, far_writer), (far_reader, writer)]
        tasks = [asyncio.ensure_future(_pass_on(link, *way)) for way in ways]
        link.tasks.update(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link.tasks.difference_update(tasks)
        for end in (writer, far_writer):
            end.transport.abort()


async def _pass_on(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(PART_BYTES):
            delay_s = link.latency_s + (len(part) / link.bytes_s if link.bytes_s else 0.0)
            if delay_s:
                await asyncio.sleep(delay_s)
            await link.up.wait()
            link.num_bytes += len(part)
            writer.write(part)
            await writer.drain()
