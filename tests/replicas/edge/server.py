"""Serves an application on a free port in a thread, and speaks HTTP with it. For tests only."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import uvicorn

from manta.replicas.edge.middleware import App

T = TypeVar("T")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Server:
    """A running service under test, wherever it runs."""

    base_url: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self.http = httpx.Client(base_url=self.base_url, timeout=120, limits=limits, trust_env=False)

    @property
    def port(self) -> int:
        return int(self.base_url.rsplit(":", 1)[1])

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": self.model, **body})

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self.ok(COMPLETIONS, prompt=prompt, **fields)

    def text(self, prompt: Any, **fields: Any) -> str:
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def chat(self, messages: Any, **fields: Any) -> httpx.Response:
        return self.post(CHAT, messages=messages, **fields)

    def events(self, path: str, **body: Any) -> Iterator[Any]:
        """Parsed events of a stream, the string "[DONE]" as itself."""
        with self.http.stream("POST", path, json={"model": self.model, "stream": True, **body}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])

    def streamed(self, prompt: Any, **fields: Any) -> tuple[list[str], str | None]:
        """The texts of a streamed completion's events, and its finish reason."""
        texts, reason = [], None
        for event in self.events(COMPLETIONS, prompt=prompt, **fields):
            if event != "[DONE]" and event["choices"]:
                texts.append(event["choices"][0]["text"])
                reason = event["choices"][0]["finish_reason"] or reason
        return texts, reason

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line and line[0] != "#"]
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert found, f"{name} is not among the metrics"
        return sum(found)

    def assert_alive(self) -> None:
        assert self.http.get("/health").status_code == 200
        assert len(self.complete("ping", max_tokens=1)["choices"]) == 1

    def assert_idle(self, *, within_s: float) -> None:
        """Wait until no request runs or waits and no block is held."""
        gauges = ("manta_requests_running", "manta_requests_waiting", "manta_kv_cache_usage")
        assert eventually(lambda: all(self.metric(name) == 0 for name in gauges), within_s=within_s), {
            name: self.metric(name) for name in gauges
        }


def eventually(condition: Callable[[], bool], *, within_s: float, every_s: float = 0.05) -> bool:
    """Whether the condition becomes true in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(every_s)
    return True


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of the calls, made by as many threads; the first exception is raised."""
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextmanager
def serving(app: App) -> Iterator[str]:
    """The base URL of `app` on a real uvicorn."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn")
    thread.start()
    try:
        assert eventually(lambda: server.started, within_s=10, every_s=0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
