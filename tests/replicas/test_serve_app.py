"""The whole application on Ray Serve with simulated engines: streams survive the death of their engines' processes."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from manta.deploy import processes
from tests.deploy.test_serve import Served, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(300)]

NUM_TOKENS = 250
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    one = Served("num_replicas=2")
    try:
        one.wait_line("Ctrl-C stops it.")
        yield one
        one.process.send_signal(signal.SIGTERM)
        assert one.wait_exit() == 0, one.output
        one.assert_nothing_left()
    finally:
        one.close()


class ClientLeaves(Exception):
    """Breaks a stream off, as a client does that closes its connection."""


def ready(server: Served) -> list[dict[str, Any]]:
    replicas = httpx.get(f"{server.url}/ready", trust_env=False).json()["replicas"]
    return [replica for replica in replicas if replica["ready"]]


def metric(server: Served, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def shard_pids(server: Served) -> list[int]:
    """Processes of engine cores, oldest first."""
    found = []
    for pid in processes.instance_processes("", server.folder):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                name = file.read()
        except OSError:
            continue
        if name.startswith(b"ray::EngineShard"):
            found.append(pid)
    return sorted(found)


def busiest_pid(server: Served) -> int:
    """Process of the engine core that runs the most streams."""
    busiest = max(ready(server), key=lambda replica: replica["num_running"])
    gangs = httpx.get(f"{server.url}/cluster", trust_env=False).json()["gangs"]
    [pid] = [rank["pid"] for gang in gangs if gang["replica_id"] == busiest["replica_id"] for rank in gang["ranks"]]
    return pid


def stream(server: Served, index: int, on_event: Callable[[int], None] = lambda num_events: None) -> list[int]:
    """Token ids of a streamed completion that must end well."""
    body = {"model": "sim-h200", "prompt": f"story {index}", "max_tokens": NUM_TOKENS, "seed": index, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    token_ids: list[int] = []
    reasons = []
    client = httpx.Client(timeout=120, trust_env=False)
    with client, client.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for num_events, line in enumerate(line for line in reply.iter_lines() if line.startswith("data: {")):
            event = httpx.Response(200, content=line[6:]).json()
            assert "error" not in event, event
            token_ids += event["choices"][0]["token_ids"]
            reasons.append(event["choices"][0]["finish_reason"])
            on_event(num_events)
    assert reasons[-1] == "length"
    return token_ids


def streams(server: Served, *, disturb: Callable[[], None] | None = None) -> list[list[int]]:
    """NUM_STREAMS streams at once; `disturb` is called when all of them have delivered something."""
    begun = threading.Barrier(NUM_STREAMS + 1)

    def on_event(num_events: int) -> None:
        if num_events == 20:
            begun.wait(30)

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(stream, server, i, on_event) for i in range(NUM_STREAMS)]
        begun.wait(60)
        if disturb is not None:
            disturb()
        return [one.result() for one in running]


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> list[list[int]]:
    outputs = streams(server)
    assert [len(tokens) for tokens in outputs] == [NUM_TOKENS] * NUM_STREAMS
    return outputs


def test_both_replicas_work(server: Served, undisturbed: list[list[int]]) -> None:
    assert len(shard_pids(server)) == len(ready(server)) == 2
    assert metric(server, "manta_requests_running") == 0
    assert metric(server, "manta_generation_tokens_total") >= NUM_STREAMS * NUM_TOKENS


def test_streams_go_on_elsewhere_when_an_engine_s_process_is_killed(
    server: Served, undisturbed: list[list[int]]
) -> None:
    moved = metric(server, "manta_requests_moved_total")
    before = {replica["replica_id"] for replica in ready(server)}
    assert streams(server, disturb=lambda: os.kill(busiest_pid(server), signal.SIGKILL)) == undisturbed
    assert metric(server, "manta_requests_moved_total") - moved >= NUM_STREAMS // 2
    # Serve replaces the replica.
    wait_until(lambda: len(ready(server)) == 2, timeout_s=60)
    assert len({replica["replica_id"] for replica in ready(server)} - before) == 1


def test_streams_wait_for_a_replacement_when_all_engines_are_killed(
    server: Served, undisturbed: list[list[int]]
) -> None:
    moved = metric(server, "manta_requests_moved_total")

    def kill_one_after_the_other() -> None:
        first, second = shard_pids(server)
        os.kill(first, signal.SIGKILL)
        # Two deaths without a token in between would end a request by design: let all go on before the second.
        wait_until(lambda: len(ready(server)) == 1)
        wait_until(lambda: metric(server, "manta_requests_running") == NUM_STREAMS)
        before = metric(server, "manta_generation_tokens_total")
        wait_until(lambda: metric(server, "manta_generation_tokens_total") > before + 3 * NUM_STREAMS)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: not ready(server))

    assert streams(server, disturb=kill_one_after_the_other) == undisturbed
    assert metric(server, "manta_requests_moved_total") - moved > NUM_STREAMS
    wait_until(lambda: len(ready(server)) == 2, timeout_s=60)
    wait_until(lambda: len(shard_pids(server)) == 2, timeout_s=10)
    gauges = ("manta_requests_running", "manta_requests_waiting", "manta_kv_cache_usage", "manta_edge_requests_waiting")
    assert {name: metric(server, name) for name in gauges} == dict.fromkeys(gauges, 0.0)


def test_a_frozen_engine_is_replaced(server: Served, undisturbed: list[list[int]]) -> None:
    before = {replica["replica_id"] for replica in ready(server)}
    frozen = shard_pids(server)[0]
    assert streams(server, disturb=lambda: os.kill(frozen, signal.SIGSTOP)) == undisturbed
    wait_until(lambda: len({replica["replica_id"] for replica in ready(server)} - before) == 1, timeout_s=30)
    wait_until(lambda: frozen not in shard_pids(server))


def test_many_choices_of_one_request_do_not_block_the_edge(server: Served) -> None:
    """Serve's router must not be given several pending calls under one internal request id."""
    body = {"model": "sim-h200", "prompt": "x", "max_tokens": 2, "temperature": 1.0, "n": 16}
    for _ in range(5):
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=5, trust_env=False)
        assert len(reply.json()["choices"]) == 16


def test_a_client_that_leaves_has_its_work_cancelled(server: Served) -> None:
    cancelled = metric(server, "manta_engine_cancelled_total")

    def leave(num_events: int) -> None:
        if num_events == 20:
            raise ClientLeaves

    with pytest.raises(ClientLeaves):
        stream(server, 0, on_event=leave)
    wait_until(lambda: metric(server, "manta_requests_running") == 0, timeout_s=3)
    assert metric(server, "manta_engine_cancelled_total") == cancelled + 1
