"""Manta on several Ray nodes in network namespaces, started and served by the documented commands. For tests only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from manta.bench.node_lab import NodeLab
from tests.deploy.test_serve import ROOT, Served
from tests.replicas.edge.server import Server, at_once
from tests.replicas.edge.test_cases_model import GOLDEN, body_of

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 128
PORT = 8000
"""On the head's machine, which nobody else uses; one for all, as Serve keeps the port that it was started with."""
PROMPTS = GOLDEN[1:12]
"""Of the golden file: ten that go on for long, and a long one."""
OCCUPY = Path(__file__).with_name("occupy.py")
MIN_DRAIN = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
"""How long an edge behind HAProxy stays at least when the application ends: half a minute by default."""
FIGURES = "MANTA_CLUSTER_JSON"
"""Environment variable that names the file to which `note` adds what was measured."""


@contextmanager
def lab_of(num_nodes: int, *, cpus_per_node: int = 2) -> Iterator[NodeLab]:
    """The head and so many nodes for engines. This thread is on the head's machine meanwhile; without root, a skip."""
    if os.geteuid() != 0:
        pytest.skip("CLUSTER TESTS DID NOT RUN: Ray nodes in network namespaces need root")
    environment = dict(os.environ)
    os.environ[MIN_DRAIN] = "1"
    lab = NodeLab(num_nodes, cpus_per_node=cpus_per_node)
    try:
        lab.start()
        yield lab
    finally:
        lab.remove()
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def occupied(lab: NodeLab, *, free_cpus: float, cpus_per_node: int = 2) -> Iterator[None]:
    """Somebody else's work takes all but `free_cpus` of every node for engines."""
    command = [
        sys.executable,
        str(OCCUPY),
        lab.address,
        str(len(lab.workers)),
        str(round(cpus_per_node - free_cpus, 4)),
    ]
    tenant = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tenant.stdout is not None
    try:
        assert tenant.stdout.readline() == "occupied\n"
        yield
    finally:
        tenant.communicate("", timeout=30)


class ClusterServed(Served):
    """`manta serve` of the demo model in float32 on the lab's cluster, as it is started on the head."""

    def __init__(self, lab: NodeLab, **settings: Any) -> None:
        common = {
            "serving.ray_address": lab.address,
            "node_labels": "{role: engine}",
            "dtype": "float32",
            "cpu_cache_gib": 0.1,
            "max_model_len": MAX_MODEL_LEN,
            "startup_timeout_s": 120,
            **settings,
        }
        super().__init__(*(f"{name}={value}" for name, value in common.items()), target=MODEL, device="cpu", port=PORT)
        self.lab = lab
        self.server = Server(self.url, MODEL, MAX_MODEL_LEN, vocab_size=49152, block_size=16)
        """For the helpers of the API's tests."""

    def close(self) -> None:
        """Kill what still runs."""
        self.server.http.close()
        super().close()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path, whatever the status."""
        return httpx.get(f"{self.url}{path}", timeout=10, trust_env=False).json()

    def ready(self) -> set[str]:
        """Ids of the replicas that take new work. Raises httpx.HTTPError while nobody answers."""
        return {replica["replica_id"] for replica in self.get("/ready")["replicas"] if replica["ready"]}

    def num_running_on(self, replica_id: str) -> int:
        """Requests that run on a replica."""
        replicas = self.get("/ready")["replicas"]
        return sum(replica.get("num_running", 0) for replica in replicas if replica["replica_id"] == replica_id)

    def gangs(self) -> dict[str, list[dict[str, Any]]]:
        """The ranks of every replica that has its place."""
        return {gang["replica_id"]: gang["ranks"] for gang in self.get("/cluster")["gangs"]}


@contextmanager
def served(lab: NodeLab, **settings: Any) -> Iterator[ClusterServed]:
    """`manta serve` until it is ready; it ends in order and leaves no replica and no rank behind."""
    one = ClusterServed(lab, **settings)
    try:
        one.wait_line("Ctrl-C stops it.")
        yield one
        one.process.send_signal(signal.SIGTERM)
        assert one.wait_exit() == 0, one.output
        seconds_until(lambda: not ranks_on(lab), within_s=20)
    finally:
        one.close()


def assert_golden_tokens(server: Server, prompts: Sequence[dict[str, Any]] = PROMPTS) -> None:
    """All of them at once."""

    def check(golden: dict[str, Any]) -> None:
        path, body = body_of(golden)
        assert server.ok(path, **body)["choices"][0]["token_ids"] == golden["continuation_ids"]

    at_once([lambda golden=golden: check(golden) for golden in prompts])


def lose_rank(engine: ClusterServed, replica_id: str, rank: int, number: signal.Signals) -> dict[str, float]:
    """Kill or freeze a rank while some golden prompts are answered, which must not show. Returns what it took, after
    having seen all of the gang's processes go."""
    pids = [one["pid"] for one in engine.gangs()[replica_id]]
    num_replicas = len(engine.ready())
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(assert_golden_tokens, engine.server, PROMPTS[:4])
        seconds_until(lambda: engine.num_running_on(replica_id) > 0, within_s=10)
        os.kill(pids[rank], number)
        struck_at_s = time.monotonic()
        out_s = seconds_until(lambda: replica_id not in engine.ready(), within_s=20, since_s=struck_at_s)
        again_s = seconds_until(lambda: len(engine.ready()) == num_replicas, within_s=90, since_s=struck_at_s)
        load.result()
    seconds_until(lambda: not set(pids) & set(ranks_on(engine.lab)), within_s=20)
    return {"out_of_routing_s": out_s, "serving_again_s": again_s}


def ranks_on(lab: NodeLab) -> dict[int, str]:
    """Processes of engine ranks, and the address of the node on which each runs."""
    return {pid: node.address for node in lab.nodes for pid in node.pids() if title_of(pid).startswith("ray::EngineSh")}


def title_of(pid: int) -> str:
    """How a process calls itself; nothing for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def seconds_until(condition: Callable[[], bool], *, within_s: float, since_s: float | None = None) -> float:
    """Seconds from `since_s` (monotonic; default now) until `condition()` is true. Fails when it takes too long."""
    start_s = time.monotonic() if since_s is None else since_s
    while not condition():
        assert time.monotonic() - start_s < within_s, f"it did not happen within {within_s:g} s"
        time.sleep(0.02)
    return time.monotonic() - start_s


def note(name: str, **seconds: float) -> None:
    """Keep what was measured: on the screen, and in the file that MANTA_CLUSTER_JSON names."""
    rounded = {key: round(value, 2) for key, value in seconds.items()}
    print(f"{name}: {rounded}")
    if file := os.environ.get(FIGURES):
        path = Path(file)
        figures = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**figures, name: rounded}, indent=1) + "\n")
