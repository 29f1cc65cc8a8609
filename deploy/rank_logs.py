"""Finds and shows what a replica's ranks wrote: in the folder of a local `manta serve`, or through Ray's state API.

Each rank's process says at its start which rank of which replica it is; its files are found by that, dead or alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manta.engine.errors import ConfigError, MantaError

from . import ray_local

STARTS = re.compile(rb"rank (\d+) of replica (\S+) starts in process \d+")
"""What replicas/shard.py logs first."""
HEAD_BYTES = 64 * 1024
"""That line stands near the beginning."""
POLL_S = 0.25
MAX_ACTORS = 10_000


class NoLogs(MantaError):
    """There is no such replica or rank, or no cluster; the sentence says what there is."""


@dataclass(frozen=True, order=True)
class RankLog:
    """Where one rank's output is."""

    replica_id: str
    rank: int
    place: str
    """A path, or an actor's id."""
    state: str = ""
    """What Ray says of the process, where it is asked."""


class Logs(Protocol):
    """Where ranks' output is found."""

    def find(self) -> list[RankLog]:
        """All ranks that are known, of dead replicas too."""
        ...

    def lines(self, log: RankLog, *, tail: int, follow: bool) -> Iterator[str]:
        """The last lines of a rank; with `follow` without end."""
        ...


class FolderLogs:
    """Log files of Ray on this machine."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def find(self) -> list[RankLog]:
        found = []
        for folder in self._folders:
            for file in folder.glob("worker-*.err"):
                with contextlib.suppress(OSError), file.open("rb") as opened:
                    match = STARTS.search(opened.read(HEAD_BYTES))
                    if match:
                        found.append(RankLog(match[2].decode(), int(match[1]), str(file)))
        return sorted(found)

    def lines(self, log: RankLog, *, tail: int, follow: bool) -> Iterator[str]:
        with open(log.place, encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in file.readlines()[-tail:])
            while follow:
                line = file.readline()
                if line:
                    yield line.rstrip("\n")
                else:
                    time.sleep(POLL_S)


class StateLogs:
    """Ranks of a cluster whose dashboard runs. The process must be connected to Ray."""

    def find(self) -> list[RankLog]:
        from ray.util.state import list_actors
        from ray.util.state.exception import RayStateApiException

        try:
            actors: list[Any] = list_actors(
                _connected(), filters=[("class_name", "=", "EngineShard")], detail=True, limit=MAX_ACTORS
            )
        except RayStateApiException as error:
            reason = ray_local.first_line(error)
            raise NoLogs(f"Ray's dashboard, which knows the ranks, does not answer: {reason}") from error
        found = []
        for actor in actors:
            replica_id, separator, rank = (actor.name or "").rpartition(":rank")
            if separator:
                found.append(RankLog(replica_id, int(rank), actor.actor_id, str(actor.state).lower()))
        return sorted(found)

    def lines(self, log: RankLog, *, tail: int, follow: bool) -> Iterator[str]:
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        rest = ""
        try:
            pieces = get_log(_connected(), actor_id=log.place, suffix="err", tail=tail, follow=follow, errors="replace")
            for piece in pieces:
                *whole, rest = (rest + piece).split("\n")
                yield from whole
        except RayStateApiException as error:
            raise NoLogs(f"Ray cannot give the log of rank {log.rank}: {ray_local.first_line(error)}") from error
        if rest:
            yield rest


def _connected() -> str:
    """Address of the Ray that this process has joined: without one, the state API takes no other Ray beside it."""
    import ray

    return ray.get_runtime_context().gcs_address


def open_logs(address: str | None) -> Logs:
    """Of the cluster at an address, or of `manta serve` on this machine. Raises NoLogs or RayFailed."""
    if address is not None:
        ray_local.join(address)
        return StateLogs()
    folders = local_folders()
    if not folders:
        raise NoLogs("no `manta serve` runs on this machine; for a cluster, say --address auto or --address HOST:PORT")
    return FolderLogs(folders)


def local_folders() -> list[Path]:
    """Folders of logs of each `manta serve` of this user that runs here."""
    found = []
    for base in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for folder in base.glob("manta-*"):
            with contextlib.suppress(OSError):
                logs = folder / "session_latest" / "logs"
                if folder.stat().st_uid == os.getuid() and logs.is_dir():
                    found.append(logs)
    return sorted(found)


def choose(found: Sequence[RankLog], replica: str | None, rank: int | None) -> list[RankLog]:
    """The logs of one replica, by the beginning of its id. Raises NoLogs with what there is."""
    ids = sorted({log.replica_id for log in found})
    known = ", ".join(f"{one} ({_count_ranks(found, one)})" for one in ids) or "none yet"
    if replica is None:
        raise NoLogs(f"which replica? There are: {known}")
    matching = [one for one in ids if one == replica] or [one for one in ids if one.startswith(replica)]
    if len(matching) != 1:
        problem = f"{len(matching)} replicas begin" if matching else "no replica begins"
        raise NoLogs(f"{problem} with {replica!r}; there are: {known}")
    chosen = [log for log in found if log.replica_id == matching[0] and rank in (None, log.rank)]
    if not chosen:
        raise NoLogs(f"replica {matching[0]} has no rank {rank}: it has {_count_ranks(found, matching[0])}, from 0 on")
    return chosen


def show(
    logs: Logs, replica: str | None, *, rank: int | None, follow: bool, tail: int, write: Callable[[str], None]
) -> None:
    """Write the lines of the chosen ranks, each with its rank in front when there are several."""
    if tail < 1:
        raise ConfigError(f"--tail {tail}: must be at least 1", field="tail")
    chosen = choose(logs.find(), replica, rank)
    prefix = "[rank {}] " if len(chosen) > 1 else ""

    def copy(log: RankLog) -> None:
        for line in logs.lines(log, tail=tail, follow=follow):
            write(prefix.format(log.rank) + line)

    if not follow:
        for log in chosen:
            copy(log)
        return
    threads = [threading.Thread(target=copy, args=(log,), daemon=True) for log in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # ends with Ctrl-C, or when the cluster ends


def _count_ranks(found: Sequence[RankLog], replica_id: str) -> str:
    ranks = [log for log in found if log.replica_id == replica_id]
    states = {log.state for log in ranks if log.state}
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}{', ' + '/'.join(sorted(states)) if states else ''}"
