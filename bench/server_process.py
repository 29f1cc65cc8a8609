"""Starts a server as a child process, waits until it answers, and stops it with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from manta.deploy import settings
from manta.engine.errors import MantaError

from .http_client import HttpClient
from .load import ServerProblem, find_target, send_one
from .workloads import Item

STOP_TIMEOUT_S = 60.0


class ServerDied(MantaError):
    """The server ended or did not answer in time; the message holds its last lines."""


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers."""

    pid: int
    url: str
    startup_s: float


def manta_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manta", *arguments]


@contextlib.asynccontextmanager
async def running(command: Sequence[str], url: str, *, timeout_s: float = 180.0) -> AsyncIterator[ServerProcess]:
    """Run `command` until the block ends; ready when it has answered a completion at `url`. Raises ServerDied."""
    with tempfile.TemporaryDirectory(prefix="manta-bench-") as folder:
        log = Path(folder) / "output"
        begin_s = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=settings.inherited({"PYTHONUNBUFFERED": "1"}),
                start_new_session=True,  # Ctrl-C reaches this process, which then stops the server in order
            )
        try:
            await _wait_ready(process, url, log, begin_s + timeout_s)
            yield ServerProcess(process.pid, url, time.monotonic() - begin_s)
        finally:
            await asyncio.to_thread(_stop, process)


async def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, until_s: float) -> None:
    client = HttpClient(url)
    try:
        while True:
            with contextlib.suppress(ServerProblem):
                target = await find_target(client)
                if (await send_one(client, target, Item([5000], 1), time.monotonic())).ok:
                    return
            if process.poll() is not None or time.monotonic() > until_s:
                lines = log.read_text(errors="replace").strip().splitlines()[-5:]
                raise ServerDied(f"the server for the measurement did not start: {' | '.join(lines) or 'no output'}")
            await asyncio.sleep(0.2)
    finally:
        await client.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
