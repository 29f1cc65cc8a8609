"""A whole workload at once from several processes, and what is read of the server meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from manta.bench import burst
from manta.bench.process_cpu import serving_role, tree_cpu_s
from manta.bench.server_process import running
from manta.deploy.checks import free_ports
from manta.engine.errors import ConfigError
from manta.engine.stats import Snapshot
from manta.replicas.edge.client import ReplicaStatus
from manta.replicas.metrics import EdgeMetrics
from manta.replicas.step_histogram import StepHistogram, quantile


@pytest.fixture
async def bare() -> AsyncIterator[burst.Server]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "manta.bench.bare_server", str(port), "5", "90"]
    async with running(command, f"http://127.0.0.1:{port}") as server:
        yield burst.Server(server.url, pid=server.pid)


async def test_all_requests_at_once_beside_the_engine_alone(bare: burst.Server, tmp_path: Path) -> None:
    alone = {"figures": {"d2_output_tokens_per_s": 1000.0, "d2_step_p99_ms": 6.0}}
    (tmp_path / "engine.json").write_text(json.dumps(alone))
    sizes = burst.Burst(num_requests=40, length_divisor=40, num_clients=2, repeats=1)
    report = await asyncio.to_thread(
        burst.run, bare, sizes, in_process=tmp_path / "engine.json", json_path=tmp_path / "out.json"
    )
    figures = report.figures
    assert figures["d2_http_errors"] == 0
    assert figures["d2_http_requests"] == 40
    assert figures["d2_http_ratio_to_in_process"] == figures["d2_http_output_tokens_per_s"] / 1000
    # All run at once, one token a step: the longest output decides, not the number of requests.
    longest = max(item.max_tokens for item in burst._items(sizes, 0))
    assert 0.004 * longest <= figures["d2_http_s"] < 0.004 * 40 * longest
    assert figures["d2_http_cpu_us_per_token"] > 0
    assert 0 < figures["d2_http_busiest_client_cores"] < 2
    assert "d2_http_step_p99_ms" not in figures  # this server shows no step times
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["workload"]["num_clients"] == 2
    assert sum(written["details"]["server_cpu_s_by_process"].values()) > 0


def test_steps_are_counted_over_all_engines_whatever_else_is_in_the_metrics() -> None:
    first, second = StepHistogram(), StepHistogram()
    for _ in range(9):
        first.add(0.02)
    second.add(0.3)
    second.add(5.0)
    statuses = [
        ReplicaStatus(name, ready=True, snapshot=Snapshot(), step_times=times)
        for name, times in (("a", first), ("b", second))
    ]
    counts = burst.step_counts(EdgeMetrics("e").render(statuses).decode())
    assert counts == [one + other for one, other in zip(first.counts, second.counts, strict=True)]
    middle = quantile(counts, 0.5)
    assert middle is not None
    assert 0.019 < middle <= 0.0208
    assert burst.step_counts("") == []


def test_processes_of_a_server_are_told_apart() -> None:
    titles = {
        "ray::ServeReplica:manta:edge": "edge", "ray::ServeReplica:manta:engine": "other",
        "ray::EngineShard.run": "engine core", "ray::ProxyActor": "proxy", "sleep": "other",
    }  # fmt: skip
    children = [subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 60"]) for title in titles]
    try:
        for child, role in zip(children, titles.values(), strict=True):
            wanted = f"edge {child.pid}" if role == "edge" else role
            while serving_role(child.pid, "sleep") == "other" != wanted:  # until bash has become what it is to be
                assert child.poll() is None
        names = tree_cpu_s(os.getpid(), name_of=serving_role)
        assert {"engine core", "proxy", "other", f"edge {children[0].pid}"} <= names.keys()
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    server = burst.Server("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="must be one of d2"):
        burst.run(server, burst.Burst(workload="d9"))
    with pytest.raises(ConfigError, match="at least 1"):
        burst.run(server, burst.Burst(num_clients=0))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match="no results of `manta bench engine`"):
        burst.run(server, in_process=tmp_path / "other.json")
