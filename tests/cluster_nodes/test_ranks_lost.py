"""Each rank of one of two gangs killed and frozen in turn: how long until nobody is sent there, until it serves again.

And nothing is taken for lost that is only slow: a step of many seconds.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from manta.bench.node_lab import NodeLab
from manta.engine.parallel.vitals import LEAST_STEP_S
from tests.cluster_nodes.lab import ClusterServed, assert_golden_tokens, lab_of, lose_rank, note, seconds_until, served
from tests.deploy.test_serve import Served
from tests.replicas.edge.server import COMPLETIONS, Server

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(400)]

LONG_PROMPT = 4000


@pytest.fixture(scope="module")
def lab() -> Iterator[NodeLab]:
    with lab_of(2) as two:
        yield two


@pytest.fixture(scope="module")
def engine(lab: NodeLab) -> Iterator[ClusterServed]:
    sizes = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "cpu_cache_gib": 0.25}
    with served(lab, tensor_parallel_size=2, num_replicas=2, **sizes) as one:
        yield one


@contextmanager
def always_ready(engine: ClusterServed, replica_ids: set[str]) -> Iterator[None]:
    """Fails when one of the replicas is out of routing for a moment meanwhile."""
    missed: list[set[str]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            if missing := replica_ids - engine.ready():
                missed.append(missing)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield
        finally:
            is_over.set()
            looking.result()
    assert not missed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_lost_rank_is_out_of_routing_in_5_seconds_beside_a_healthy_replica(
    engine: ClusterServed, number: signal.Signals, rank: int
) -> None:
    seconds_until(lambda: len(engine.ready()) == 2, within_s=60)
    hit, healthy = sorted(engine.ready())
    with always_ready(engine, {healthy}):
        took = lose_rank(engine, hit, rank, number)
    note(f"TP 2 of two replicas, rank {rank}, {number.name}", **took)
    assert took["out_of_routing_s"] < 5.0
    assert hit not in engine.gangs()
    assert len(engine.gangs()) == 2


def test_a_prefill_of_many_seconds_is_no_false_alarm(engine: ClusterServed) -> None:
    seconds_until(lambda: len(engine.ready()) == 2, within_s=60)
    server, ids, rng = engine.server, engine.ready(), random.Random(1)
    assert_golden_tokens(server)  # short steps, by which a step that takes long is judged
    lost = server.metric("manta_replicas_lost_total")
    took_s = []
    with always_ready(engine, ids):
        for _ in range(4):  # two for each replica: the first of its size is excused
            prompt = [rng.randrange(1000, 40000) for _ in range(LONG_PROMPT)]
            steps, start_s = server.metric("manta_engine_steps_total"), time.monotonic()
            server.ok(COMPLETIONS, prompt=prompt, max_tokens=1)
            took_s.append(time.monotonic() - start_s)
            assert server.metric("manta_engine_steps_total") - steps <= 2
    note(f"TP 2, a step of {LONG_PROMPT} prompt tokens", shortest_s=min(took_s), longest_s=max(took_s))
    assert min(took_s) > LEAST_STEP_S
    assert server.metric("manta_replicas_lost_total") == lost


def test_steps_of_six_seconds_are_no_false_alarm() -> None:
    one = Served(device="sim:6000ms")
    server = Server(one.url, "sim-h200", 4096, vocab_size=1000, block_size=16)
    try:
        one.wait_line("Ctrl-C stops it.")
        (before,) = server.http.get("/ready").json()["replicas"]
        start_s = time.monotonic()
        assert server.complete("x", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
        took_s = time.monotonic() - start_s
        (after,) = server.http.get("/ready").json()["replicas"]
        assert (after["replica_id"], after["ready"]) == (before["replica_id"], True)
        assert server.metric("manta_replicas_lost_total") == server.metric("manta_requests_moved_total") == 0
        note("simulated, 3 tokens in steps of 6 s", took_s=took_s)
        assert took_s > 3 * LEAST_STEP_S
        one.process.send_signal(signal.SIGTERM)
        assert one.wait_exit() == 0, one.output
    finally:
        server.http.close()
        one.close()
