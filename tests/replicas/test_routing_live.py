"""Routing on Ray Serve over HTTP, with four simulated replicas and two edges: hits, salts, explanations, counts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from manta.bench.http_client import HttpClient
from manta.bench.load import find_target
from manta.bench.routing_live import PrefixLoad, live_hit_rate, simulated_hit_rate
from manta.bench.routing_live import Served as Replicas
from tests.deploy.test_serve import Served, manta, wait_until
from tests.replicas.test_serve_app import metric, ready, shard_pids

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]

REPLICAS = Replicas()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = {name: value for name, value in REPLICAS.settings().items() if name != "device"}
    one = Served(*(f"{name}={value}" for name, value in settings.items()), device=f"sim:{REPLICAS.step_ms}ms")
    try:
        one.wait_line("Ctrl-C stops it.")
        wait_until(lambda: len(ready(one)) == 4, timeout_s=60)
        yield one
        one.process.send_signal(signal.SIGTERM)
        assert one.wait_exit() == 0, one.output
        one.assert_nothing_left()
    finally:
        one.close()


def complete(server: Served, prompt: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    """Over a connection of its own, so that it may reach either edge."""
    body = {"model": "sim-h200", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def edges_of(server: Served, name: str) -> dict[str, float]:
    """A metric of this edge and that: of every edge that answers when it is asked often enough."""
    found: dict[str, float] = {}
    for _ in range(12):
        for line in httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines():
            if line.startswith(f'{name}{{edge="'):
                found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


def test_prompts_meet_their_prefixes_as_often_as_in_the_simulator(server: Served) -> None:
    items = PrefixLoad(num_requests=200, num_prefixes=30).items()

    async def measure() -> float:
        client = HttpClient(server.url)
        try:
            return await live_hit_rate(client, await find_target(client), items)
        finally:
            await client.close()

    live, simulated = asyncio.run(measure()), simulated_hit_rate(items, REPLICAS)
    assert simulated > 0.5
    assert live >= simulated - 0.05
    in_flight = edges_of(server, "manta_edge_requests_in_flight")
    assert len(in_flight) == 2, "both edges served"
    known = edges_of(server, "manta_prefix_index_blocks")
    assert min(known.values()) > 0.9 * max(known.values()) > 0


def test_p15_cached_prefixes_never_cross_salts(server: Served) -> None:
    memo = "Confidential memo. " * 60

    def cached(salt: str | None = None) -> int:
        fields: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        return complete(server, memo, **fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("tenant-a") == 0
    wait_until(lambda: cached("tenant-a") > 0, timeout_s=5)  # whichever edge it reaches
    assert cached("tenant-b") == 0
    assert cached() == 0
    for wrong in ("", 7):
        assert complete(server, memo, cache_salt=wrong).status_code == 400


def test_any_edge_explains_what_another_one_served(server: Served) -> None:
    reply = complete(server, [7000] * 64, headers={"X-Manta-Explain": "1"})
    response_id = reply.json()["id"]
    assert reply.headers["x-manta-request-id"] == response_id
    answers = [httpx.get(f"{server.url}/explain/{response_id}", trust_env=False) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({json.dumps(answer.json(), sort_keys=True) for answer in answers}) == 1
    found = answers[0].json()
    decision = found["sequences"][0]["decisions"][0]
    assert decision["replica_id"] == reply.headers["x-manta-replica"]
    assert len(decision["candidates"]) == 4
    shown: subprocess.CompletedProcess[str] = manta("explain", response_id, "--url", server.url)
    assert shown.returncode == 0, shown.stderr
    assert f"served by edge {found['edge_id']}" in shown.stdout
    assert manta("explain", "cmpl-nobody", "--url", server.url).returncode == 1


def test_p23_counts_return_to_zero_however_requests_end(server: Served) -> None:
    """Finished, abandoned, and on a replica that dies: a burst of streams, one engine killed in the middle of it."""
    moved = sum(edges_of(server, "manta_requests_moved_total").values())
    chance = random.Random(5)
    prompts = [[chance.randrange(1000, 30000) for _ in range(40)] for _ in range(60)]
    begun: list[int] = []

    def stream(number: int) -> None:
        body = {"model": "sim-h200", "prompt": prompts[number], "max_tokens": 150, "stream": True, "ignore_eos": True}
        client = httpx.Client(timeout=120, trust_env=False)
        with client, client.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            for count, line in enumerate(reply.iter_lines()):
                assert '"error"' not in line
                if count == 8:
                    begun.append(number)
                    if number % 3 == 0:
                        return

    with concurrent.futures.ThreadPoolExecutor(60) as pool:
        running = [pool.submit(stream, number) for number in range(60)]
        wait_until(lambda: len(begun) > 30, timeout_s=30)
        os.kill(shard_pids(server)[0], signal.SIGKILL)
        for one in running:
            one.result()
    assert sum(edges_of(server, "manta_requests_moved_total").values()) > moved
    gauges = ("manta_edge_requests_in_flight", "manta_edge_requests_waiting", "manta_admission_waiting")
    for name in gauges:
        assert set(edges_of(server, name).values()) == {0.0}, name
    for name in ("manta_requests_running", "manta_requests_waiting", "manta_kv_cache_usage"):
        wait_until(lambda name=name: metric(server, name) == 0, timeout_s=5)
    wait_until(lambda: len(ready(server)) == 4, timeout_s=60)
    assert complete(server, prompts[1]).status_code == 200
