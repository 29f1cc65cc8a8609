"""Finding and ending an instance's processes, with ordinary processes in the part of Ray's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manta.deploy import checks, processes
from manta.deploy.processes import MARK
from manta.engine.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
SLEEP = "import time; print(flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def start(code: str, mark: str | None = None, stderr: Path | None = None) -> subprocess.Popen[str]:
    """A process that has printed its line."""
    environment = {**os.environ, **({MARK: mark} if mark else {})}
    with open(stderr or os.devnull, "w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=sink, text=True
        )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def wait_until(condition, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def test_marked_processes_and_those_with_open_files_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "instance"
    folder.mkdir()
    marked, with_file, other = start(SLEEP, "a1"), start(SLEEP, stderr=folder / "log"), start(SLEEP, "a2")
    try:
        assert sorted(processes.instance_processes("a1", folder)) == sorted([marked.pid, with_file.pid])
        assert [processes.is_marked(process.pid) for process in (marked, with_file, other)] == [True, False, True]
    finally:
        for process in (marked, with_file, other):
            process.kill()
            process.wait()
    assert processes.instance_processes("a1", folder) == []
    assert not processes.is_marked(marked.pid)


def test_the_ray_of_another_manta_is_neither_named_nor_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    marked, other = start(SLEEP, "a1"), start(SLEEP)
    try:
        found = [(marked.pid, "gcs_server"), (marked.pid, "raylet")]
        monkeypatch.setattr(checks, "_processes", lambda: iter(found))
        assert checks.running_rays() == []
        checks.check_joinable("127.0.0.1:6379")
        with pytest.raises(ConfigError, match=r"serving\.ray_address = 'auto': no Ray runs on this machine"):
            checks.check_joinable("auto")
        found += [(other.pid, "gcs_server"), (other.pid, "raylet")]
        assert checks.running_rays() == [other.pid]
        checks.check_joinable("auto")
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    polite, stubborn = start(SLEEP), start(STUBBORN)
    processes.end_processes([polite.pid, stubborn.pid], grace_s=0.3)
    assert not Path(f"/proc/{polite.pid}").exists()
    assert not Path(f"/proc/{stubborn.pid}").exists()
    polite.wait()
    stubborn.wait()


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_janitor_cleans_up_after_a_killed_parent_only(tmp_path: Path, is_killed: bool) -> None:
    folder = tmp_path / "instance"
    folder.mkdir()
    parent_code = f"""
import sys
from pathlib import Path
from manta.deploy import processes
janitor = processes.start_janitor("janitor-test", Path({str(folder)!r}))
print(flush=True)
sys.stdin.readline()
processes.dismiss_janitor(janitor)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdout.readline()
    orphan = start(SLEEP, "janitor-test")
    if is_killed:
        parent.send_signal(signal.SIGKILL)
        assert orphan.wait(timeout=20) == -signal.SIGTERM
        wait_until(lambda: not folder.exists())
    else:
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait(timeout=20) == 0  # the janitor has ended: it is waited for
        assert orphan.poll() is None
        assert folder.exists()
        orphan.kill()
        orphan.wait()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
