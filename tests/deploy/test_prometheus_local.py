"""Prometheus beside `manta serve`: found, started, told where edges are, ended with it, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from manta.deploy import prometheus_local
from manta.deploy.checks import free_ports
from manta.deploy.observability_config import ObservabilityConfig
from manta.deploy.prometheus_local import LocalPrometheus, PrometheusFailed, prometheus_beside, wanted
from manta.engine.errors import ConfigError
from tests.deploy.test_serve import Served, manta, wait_until

ROOT = Path(__file__).parent.parent.parent
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="PROMETHEUS IS NOT INSTALLED (apt-get install prometheus)"
)


def test_it_is_wanted_where_it_is_installed_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(path: str | None) -> None:
        monkeypatch.setattr(prometheus_local.shutil, "which", lambda name: path)

    installed("/usr/bin/prometheus")
    assert wanted(ObservabilityConfig())
    assert not wanted(ObservabilityConfig(prometheus="never"))
    installed(None)
    assert not wanted(ObservabilityConfig())
    with pytest.raises(ConfigError, match="`prometheus` is not installed: apt install prometheus on Debian"):
        wanted(ObservabilityConfig(prometheus="always"))


def test_it_listens_a_thousand_ports_above_the_server_or_where_it_is_told_to() -> None:
    free = next(port for port in range(20000, 21000) if _is_free(port + 1000))
    one = LocalPrometheus(ObservabilityConfig(), server_url="http://127.0.0.1:1", server_port=free)
    assert one.port == free + 1000
    one.stop()
    high = LocalPrometheus(ObservabilityConfig(), server_url="http://127.0.0.1:1", server_port=65000)
    assert high.port < 65536
    high.stop()


def _is_free(port: int) -> bool:
    return prometheus_local._is_free(port)


@needs_prometheus
def test_what_does_not_start_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    in_the_way = tmp_path / "data"
    in_the_way.write_text("a file where a folder should be")
    said: list[str] = []
    config = ObservabilityConfig(prometheus_dir=str(in_the_way))
    arguments: dict[str, Any] = {"server_url": "http://127.0.0.1:1", "server_port": 64999, "say": said.append}
    with prometheus_beside(config, **arguments) as one:
        assert one is None
    assert "Prometheus did not start: " in said[0]
    assert "serving without it" in said[0]
    with (
        pytest.raises(PrometheusFailed),
        prometheus_beside(config.model_copy(update={"prometheus": "always"}), **arguments),
    ):
        pass


@needs_prometheus
def test_it_ends_when_who_started_it_is_killed(tmp_path: Path) -> None:
    """Though the janitor of that one's own instance ends what belongs to it at the same time."""
    (port,) = free_ports(1)
    outer = tmp_path / "outer"
    outer.mkdir()
    program = f"""
        import os, signal
        from pathlib import Path
        from manta.deploy import processes
        from manta.deploy.observability_config import ObservabilityConfig
        from manta.deploy.prometheus_local import LocalPrometheus
        os.environ[processes.MARK] = "outer-{port}"
        outer = processes.start_janitor("outer-{port}", Path("{outer}"))
        one = LocalPrometheus(ObservabilityConfig(prometheus_port={port}), server_url="http://x", server_port=1)
        one.start()
        print(one.folder, flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert httpx.get(f"http://127.0.0.1:{port}/-/ready", trust_env=False).status_code == 200
        process.kill()
    wait_until(lambda: _is_free(port) and not folder.exists() and not outer.exists(), timeout_s=20)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    shown = {"prometheus": "always", "scrape_interval_s": 0.5, "metrics_aliases": "vllm", "gpu_dollars_per_hour": 2}
    settings = [f"observability.{name}={value}" for name, value in shown.items()]
    one = Served("num_edges=2", "num_replicas=2", *settings)
    try:
        one.wait_line("Ctrl-C stops it.")
        yield one
    finally:
        one.close()


@needs_prometheus
@pytest.mark.ray
@pytest.mark.model
@pytest.mark.timeout(300)
def test_it_finds_the_edges_of_a_served_model_and_ends_with_it(server: Served) -> None:
    (line,) = (line for line in server.output.splitlines() if line.startswith("Prometheus: "))
    url = line.split()[1]

    def query(expression: str) -> list[dict[str, Any]]:
        reply = httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False)
        return reply.json()["data"]["result"]

    wait_until(lambda: len(query('up{job="manta"} == 1')) == 2, timeout_s=30)
    assert server.stream("count me", 5)[-1] == "DONE"
    wait_until(lambda: bool(query('sum(manta_slo_requests_total{outcome="met"}) > 1')), timeout_s=20)
    page = httpx.get(f"{server.url}/metrics", trust_env=False).text
    assert page.count("manta_edge_requests_in_flight{") == 2, "the public page has both edges"
    assert 'vllm:num_requests_running{engine="0",model_name="sim-h200"} 0.0' in page
    replicas = [
        replica["replica_id"] for replica in httpx.get(f"{server.url}/ready", trust_env=False).json()["replicas"]
    ]
    assert len(replicas) == 2
    assert not any(replica in page for replica in replicas), "no replica's id is a label"
    shown = manta("top", "--url", server.url, "--once", "--interval", "0.5")
    assert shown.returncode == 0, shown.stderr
    assert replicas[0] in shown.stdout
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0, server.output
    server.assert_nothing_left()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
    assert not [name for name in os.listdir("/tmp") if name.startswith("manta-prometheus-") and _holds(name, url)]


def _holds(name: str, url: str) -> bool:
    return (Path("/tmp") / name / "prometheus.yaml").exists() and url.rsplit(":", 1)[1] in (
        Path("/tmp") / name / "prometheus.yaml"
    ).read_text()
