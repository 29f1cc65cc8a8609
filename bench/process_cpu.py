"""CPU time of a process and everything below it, from Linux's /proc. Knows no Ray.

The time of children that have ended counts through the parents that collected them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    name: str
    cpu_s: float


def tree_cpu_s(root: int, *, name_of: Callable[[int, str], str] = lambda pid, name: name) -> dict[str, float]:
    """CPU seconds since each process's start, summed by the processes' names, over `root` and all below it.

    `name_of(pid, name)` may give one another name. Clock ticks are 10 ms: differences mean something over seconds.
    """
    processes = _processes()
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    totals: dict[str, float] = {}
    pending = [root]
    while pending:
        pid = pending.pop()
        pending += children.get(pid, ())
        if (process := processes.get(pid)) is not None:
            name = name_of(process.pid, process.name)
            totals[name] = totals.get(name, 0.0) + process.cpu_s
    return totals


def serving_role(pid: int, name: str) -> str:
    """What a process of `manta serve` is, each edge for itself: `edge 4711`, `engine core`, `proxy`, `other`."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return "other"
    if title.startswith("ray::ServeReplica:") and title.endswith(":edge"):
        return f"edge {pid}"
    if title.startswith("ray::EngineShard"):
        return "engine core"
    return "proxy" if name == "haproxy" or title.startswith("ray::ProxyActor") else "other"


def _processes() -> dict[int, _Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                process = _parse((entry / "stat").read_text())
                found[process.pid] = process
    return found


def _parse(stat: str) -> _Process:
    """proc(5): the name is in parentheses and may hold any character; fields 14 to 17 are the times in ticks."""
    before, _, after = stat.rpartition(")")
    pid, _, name = before.partition(" (")
    fields = after.split()
    return _Process(int(pid), int(fields[1]), name, sum(map(int, fields[11:15])) / _TICKS_PER_S)
