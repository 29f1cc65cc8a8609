"""A real model's answer is the same wherever in it the engine's process is killed: penalties, seed and a stop string.

Five places in CI, every place with MANTA_KILLS=all (`make soak`).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.test_serve import Served, wait_until

EVERYWHERE = os.environ.get("MANTA_KILLS") == "all"

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(3600 if EVERYWHERE else 300)]

NUM_TOKENS = 50
PLACES = range(1, NUM_TOKENS) if EVERYWHERE else (1, 13, 25, 37, 48)
BODY: dict[str, Any] = {
    "model": "smollm2-135m", "prompt": "The three most surprising things about the sea are", "max_tokens": 60,
    "seed": 11, "temperature": 0.8, "top_p": 0.95,
    "repetition_penalty": 1.15, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    "ignore_eos": True, "logprobs": 2, "return_token_ids": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    one = Served("dtype=float32", "num_replicas=2", "cpu_cache_gib=0.2", target="smollm2-135m", device="cpu")
    try:
        one.wait_line("Ctrl-C stops it.")
        yield one
        one.process.send_signal(signal.SIGTERM)
        assert one.wait_exit() == 0, one.output
        one.assert_nothing_left()
    finally:
        one.close()


def get(server: Served, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", timeout=10, trust_env=False).json()


def num_ready(server: Served) -> int:
    return sum(replica["ready"] for replica in get(server, "/ready")["replicas"])


def busy_replicas(server: Served) -> list[str]:
    return [one["replica_id"] for one in get(server, "/ready")["replicas"] if one.get("num_running")]


def busy_process(server: Served) -> int:
    """The process of the engine that works on the one request there is."""
    (replica_id,) = busy_replicas(server)
    (gang,) = [gang for gang in get(server, "/cluster")["gangs"] if gang["replica_id"] == replica_id]
    (rank,) = gang["ranks"]
    return rank["pid"]


def num_moved(server: Served) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10, trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("manta_requests_moved_total"))


def answer(server: Served, *, on_token: Callable[[int], None] = lambda num_tokens: None, **fields: Any) -> list[Any]:
    """The choices of all events, the usage at the end."""
    events: list[Any] = []
    num_tokens = 0
    client = httpx.Client(timeout=120, trust_env=False)
    with client, client.stream("POST", f"{server.url}/v1/completions", json={**BODY, **fields}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            events += event["choices"] or [event["usage"]]
            if event["choices"]:
                num_tokens += len(event["choices"][0]["token_ids"])
                on_token(num_tokens)
    return events


def seen(events: list[Any]) -> dict[str, Any]:
    """What must not differ; log-probabilities are rounded differently after a move, their tokens are not."""
    *choices, usage = events
    return {
        "text": [choice["text"] for choice in choices],
        "token_ids": [choice["token_ids"] for choice in choices],
        "logprob_tokens": [choice["logprobs"]["tokens"] for choice in choices],
        "text_offsets": [choice["logprobs"]["text_offset"] for choice in choices],
        "end": [(choice["finish_reason"], choice.get("stop_reason")) for choice in choices],
        "usage": (usage["prompt_tokens"], usage["completion_tokens"]),
    }


def logprobs(events: list[Any]) -> list[float]:
    return [number for choice in events[:-1] for number in choice["logprobs"]["token_logprobs"]]


@pytest.fixture(scope="module")
def stop(server: Served) -> str:
    """Text that ends at the fiftieth token and is nowhere before."""
    texts = [choice["text"] for choice in answer(server)[:-1]]
    stop = "".join(texts[NUM_TOKENS - 4 : NUM_TOKENS])
    assert "".join(texts).index(stop) + len(stop) == len("".join(texts[:NUM_TOKENS]))
    return stop


@pytest.fixture(scope="module")
def undisturbed(server: Served, stop: str) -> list[Any]:
    events = answer(server, stop=[stop])
    assert events[-1]["completion_tokens"] == NUM_TOKENS
    assert events[-2]["stop_reason"] == stop
    return events


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_changes_nothing_that_the_client_sees(
    server: Served, stop: str, undisturbed: list[Any], place: int
) -> None:
    with server.telling():
        assert_kill_changes_nothing(server, stop, undisturbed, place)


def assert_kill_changes_nothing(server: Served, stop: str, undisturbed: list[Any], place: int) -> None:
    # Idle, too: the request of a test that failed may still be leaving, and which one is to be struck would be unclear.
    wait_until(lambda: num_ready(server) == 2 and not busy_replicas(server), timeout_s=90)
    moved, pid = num_moved(server), None
    killed_at: list[int] = []

    def on_token(num_tokens: int) -> None:
        nonlocal pid
        if pid is None:
            pid = busy_process(server)
        if not killed_at and num_tokens >= place:
            os.kill(pid, signal.SIGKILL)
            killed_at.append(num_tokens)

    events = answer(server, stop=[stop], on_token=on_token)
    assert killed_at
    assert seen(events) == seen(undisturbed)
    assert logprobs(events) == pytest.approx(logprobs(undisturbed), abs=2e-3)
    if killed_at[0] < NUM_TOKENS - 5:  # later ones may have had all their tokens before the signal
        assert num_moved(server) == moved + 1
