"""Finds and ends the processes of one local instance, and is the janitor that does so when `manta serve` is killed.

Uses the standard library only. Linux's /proc shows which processes belong to an instance: by a mark in their
environment, or by files that they hold open in its folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "MANTA_INSTANCE"


def start_janitor(instance: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process that cleans up when this one ends without having called `dismiss_janitor`.

    It belongs to no instance itself: the janitor of another one, which this process may be part of, leaves it alone.
    """
    command = ["env", "-u", MARK, sys.executable, "-m", "manta.deploy.processes", instance, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def dismiss_janitor(janitor: subprocess.Popen[bytes]) -> None:
    """Everything is gone already."""
    with contextlib.suppress(BrokenPipeError):
        janitor.communicate(b"done", timeout=5.0)


def remove_instance(instance: str, folder: Path) -> None:
    """End every process that carries the mark, those that start meanwhile included, and delete the folder."""
    until = time.monotonic() + 15.0
    while (pids := instance_processes(instance, folder)) and time.monotonic() < until:
        end_processes(pids, grace_s=3.0)
    shutil.rmtree(folder, ignore_errors=True)


def instance_processes(instance: str, folder: Path) -> list[int]:
    """Processes, other than this one, that carry the instance's mark or have a file in its folder open.

    The second is for those that gave themselves a title, which overwrites the environment that /proc shows.
    """
    mark = f"{MARK}={instance}".encode()
    inside = f"{folder}/"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark in (entry / "environ").read_bytes().split(b"\0") or any(
                file.startswith(inside) for file in open_files(entry)
            ):
                found.append(int(entry.name))
    return found


def is_marked(pid: int) -> bool:
    """Whether the process belongs to any instance, as far as its environment shows."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is another user's
        return False
    return any(variable.startswith(f"{MARK}=".encode()) for variable in variables)


def open_files(process: Path) -> list[str]:
    """What the descriptors of a process (its folder in /proc) refer to. Raises OSError for another user's process."""
    files = []
    for descriptor in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            files.append(os.readlink(process / "fd" / descriptor))
    return files


def end_processes(pids: list[int], *, grace_s: float) -> None:
    """SIGTERM, then SIGKILL to those that are alive after `grace_s`; returns when all are gone (at most 5 s more)."""
    _signal_all(pids, signal.SIGTERM)
    alive = _wait_gone(pids, grace_s)
    _signal_all(alive, signal.SIGKILL)
    _wait_gone(alive, 5.0)


def collect_children(timeout_s: float) -> None:
    """Take the exit status of every child, adopted ones included, so that no zombie stays behind."""
    until = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):  # raised when there is no child any more
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those still alive after `timeout_s`."""
    until = time.monotonic() + timeout_s
    alive = [pid for pid in pids if _is_alive(pid)]
    while alive and time.monotonic() < until:
        time.sleep(0.05)
        alive = [pid for pid in alive if _is_alive(pid)]
    return alive


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie of ours is collected."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _janitor(instance: str, folder: Path) -> None:
    is_done = sys.stdin.buffer.read()  # returns when the process that started this one says so or is gone
    if not is_done:
        remove_instance(instance, folder)


if __name__ == "__main__":
    _janitor(sys.argv[1], Path(sys.argv[2]))
