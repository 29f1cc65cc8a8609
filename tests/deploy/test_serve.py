"""`manta serve` as a process: ready, asked, stopped in every way, nothing left behind (on the simulated device)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from manta.deploy import processes
from manta.deploy.checks import check_port, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent.parent
STEP_S = 0.02
STORY_LINES = 15
"""Of each log."""


class Served:
    """One `manta serve`, in a session of its own; by default of a simulated device whose steps take 20 ms."""

    def __init__(
        self, *settings: str, target: str = "sim-h200", device: str = "sim:20ms", port: int | None = None
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-u", "-m", "manta", "serve", target, "--port", str(self.port)]
        for setting in (f"device={device}", *settings):
            command += ["--set", setting]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""

    @property
    def folder(self) -> Path:
        found = re.search(r"in (/\S*manta-\S+)", self.output)
        assert found, self.output
        return Path(found[1])

    def wait_line(self, text: str) -> None:
        """Read output up to a line that contains `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} did not come:\n{self.output}")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """A failure in here says how the server fares at that moment."""
        try:
            yield
        except Exception as error:
            error.add_note(self.story())
            raise

    def story(self) -> str:
        """Whether it runs, all that it printed, and the ends of Serve's and Ray's logs, as long as they are there."""
        code = self.process.poll()
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while select.select([descriptor], [], [], 0)[0] and (more := os.read(descriptor, 1 << 16)):
            self.output += more.decode(errors="replace")
        parts = ["the server runs" if code is None else f"the server has ended with code {code}", self.output]
        logs = self.folder / "session_latest" / "logs"
        for log in sorted((*logs.glob("serve/*.log"), *logs.glob("raylet.*"), *logs.glob("gcs_server.*"))):
            with contextlib.suppress(OSError):  # removed meanwhile
                if lines := log.read_text(errors="replace").splitlines()[-STORY_LINES:]:
                    parts += [f"--- the end of {log.name}", *lines]
        return "\n".join(parts)

    def wait_exit(self) -> int:
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=60)

    def assert_nothing_left(self) -> None:
        until = time.monotonic() + 20
        while self.folder.exists() or processes.instance_processes("", self.folder):
            assert time.monotonic() < until, processes.instance_processes("", self.folder)
            time.sleep(0.05)
        check_port("127.0.0.1", self.port)

    def close(self) -> None:
        """Kill what still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stream(self, prompt: str, max_tokens: int) -> list[dict | str]:
        """The events of one streamed completion; the last one is "DONE" if the server said so."""
        body = {"model": "sim-h200", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        events: list[dict | str] = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data:"):
                    data = line[5:].strip()
                    events.append("DONE" if data == "[DONE]" else json.loads(data))
        return events

    def num_running(self) -> int:
        replicas = httpx.get(f"{self.url}/ready", trust_env=False).json()["replicas"]
        return sum(replica.get("num_running", 0) for replica in replicas)


@pytest.fixture
def serve() -> Iterator:
    started: list[Served] = []

    def start(*settings: str) -> Served:
        started.append(Served(*settings))
        return started[-1]

    yield start
    for served in started:
        served.close()


def manta(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manta", *arguments]
    return subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=60)


def wait_until(condition, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def test_ready_means_ready_and_sigterm_lets_streams_finish(serve) -> None:
    server = serve()
    server.wait_line("Ctrl-C stops it.")
    assert "kv cache" in server.output
    assert f"READY: {server.url}/v1" in server.output
    (curl,) = re.findall(r"^curl .*$", server.output, re.MULTILINE)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"

    taken = manta("serve", "sim-h200", "--port", str(server.port))
    assert taken.returncode == 1
    assert f"port {server.port} on 127.0.0.1 is taken" in taken.stderr
    assert taken.stderr.count("\n") == 1
    status = manta("status", "--url", server.url)
    assert status.returncode == 0
    assert "model sim-h200" in status.stdout
    # Most of the simulated ids have no text in the borrowed tokenizer, so a few tokens could be none at all.
    chat = manta("chat", "--url", server.url, "--max-tokens", "50", typed="Hello\n/exit\n")
    assert chat.returncode == 0
    assert chat.stdout.strip()

    num_tokens = 150
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(server.stream, f"story {i}", num_tokens) for i in range(8)]
        wait_until(lambda: server.num_running() == 8)
        server.process.send_signal(signal.SIGTERM)
        server.wait_line("Stopping (SIGTERM)")
        wait_until(lambda: httpx.get(f"{server.url}/ready", trust_env=False).status_code == 503)
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        body = {"model": "sim-h200", "prompt": "new", "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        for stream in streams:
            *events, last = stream.result()
            assert last == "DONE"
            finish = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]  # type: ignore[index]
            assert finish[-1] == "length"
    assert server.wait_exit() == 0, server.output
    server.assert_nothing_left()


def test_streams_that_take_too_long_end_with_an_error_event(serve) -> None:
    server = serve("graceful_shutdown_timeout_s=1")
    server.wait_line("Ctrl-C stops it.")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(server.stream, f"story {i}", 4000) for i in range(4)]
        wait_until(lambda: server.num_running() == 4)
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        for stream in streams:
            events = stream.result()
            errors = [event for event in events if isinstance(event, dict) and "error" in event]
            assert len(errors) == 1
            assert errors[0]["error"]["message"]
    assert server.wait_exit() == 0, server.output
    assert "Ending 4 open requests" in server.output
    server.assert_nothing_left()


def test_ctrl_c_while_starting(serve) -> None:
    server = serve()
    server.wait_line("Ray Serve ...")
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait_exit() == 130, server.output
    server.assert_nothing_left()


def test_a_killed_server_leaves_nothing(serve) -> None:
    server = serve()
    server.wait_line("Ctrl-C stops it.")
    assert processes.instance_processes("", server.folder)
    assert server.story().startswith("the server runs\n")
    assert "--- the end of raylet.out" in server.story()
    server.process.kill()
    server.process.wait()
    assert server.story().startswith("the server has ended with code -9\n")
    server.assert_nothing_left()
