"""The documented way with real Ray: nodes by `manta cluster start`, `serve deploy`, a replica that waits for room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from manta.deploy import processes
from manta.deploy.checks import free_ports
from tests.deploy.test_serve import ROOT, wait_until
from tests.replicas.edge.local_server import write_byte_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PYTHON = sys.executable
MISSING = "needs nodes with the labels zone=far, and none of 1 node has them"


class Cluster:
    """Nodes on this machine, each in the foreground of a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.port, self.dashboard_port, self.http_port, client_port = free_ports(4)
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.environment = {
            **os.environ,
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_AUTH_MODE": "token",
            "RAY_SERVE_ENABLE_HA_PROXY": "0",  # whose ports are the machine's
        }
        self._head = ["--head", "--port", str(self.port), "--temp-dir", str(folder / "ray")]
        self._head += [f"--dashboard-port={self.dashboard_port}", f"--ray-client-server-port={client_port}"]

    def start_head(self) -> None:
        self._start(*self._head)
        wait_until(lambda: answers(f"http://127.0.0.1:{self.dashboard_port}/api/version"), timeout_s=60)

    def start_node(self, *options: str) -> None:
        self._start("--address", f"127.0.0.1:{self.port}", *options)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-m", *command], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60
        )

    def ready(self) -> dict[str, Any]:
        """Body of /ready; empty while nobody answers."""
        try:
            reply = httpx.get(f"{self.url}/ready", trust_env=False)
            return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else {}
        except httpx.HTTPError:
            return {}

    def close(self) -> None:
        """Not in order, which takes Ray half a minute: all processes are ended at once."""
        for node in self._nodes:
            node.kill()
            node.wait()
        processes.end_processes(processes.instance_processes("", self._folder), grace_s=1.0)

    def _start(self, *options: str) -> None:
        (agent_port,) = free_ports(1)
        command = [PYTHON, "-m", "manta", "cluster", "start", *options, "--num-cpus", "2", "--num-gpus", "0", "--block"]
        command.append(f"--dashboard-agent-listen-port={agent_port}")  # which nodes of one machine cannot share
        with (self._folder / f"node{len(self._nodes)}.log").open("wb") as log:
            self._nodes.append(subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log))


def answers(url: str) -> bool:
    try:
        httpx.get(url, trust_env=False)
    except httpx.HTTPError:
        return False
    return True


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one = Cluster(tmp_path_factory.mktemp("c"))
    try:
        yield one
    finally:
        one.close()


def test_from_machines_to_a_model_that_waits_for_its_node(cluster: Cluster, tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "bytes")
    args = {"model": str(model), "device": "sim:1ms", "load_format": "dummy", "served_model_name": "bytes"}
    args |= {"num_blocks": 256, "node_labels": {"zone": "far"}}
    application = {"name": "manta", "route_prefix": "/", "import_path": "manta.deploy.app:build", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": cluster.http_port}, "applications": [application]}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"proxy_location": "HeadOnly", **config}))

    cluster.start_head()
    token = Path(cluster.environment["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o777 == 0o600
    dashboard = f"http://127.0.0.1:{cluster.dashboard_port}"
    assert httpx.get(f"{dashboard}/api/serve/applications/", trust_env=False).status_code == 401
    deployed = cluster.run("ray.serve.scripts", "deploy", str(tmp_path / "serve.yaml"), "-a", dashboard)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr

    wait_until(lambda: cluster.ready().get("missing") == MISSING, timeout_s=60)
    assert MISSING in cluster.ready()["error"]["message"]
    status = cluster.run("manta", "status", "--url", cluster.url)
    assert status.returncode == 1
    assert f"A replica waits for room: it {MISSING}." in " ".join(status.stdout.split())

    cluster.start_node("--label", "zone=far")
    wait_until(lambda: cluster.ready().get("status") == "ready", timeout_s=60)
    body = {"model": "bytes", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False).status_code == 200
    tree = json.loads(cluster.run("manta", "status", "--url", cluster.url, "--json").stdout)
    (gang,) = tree["cluster"]["gangs"]
    assert (gang["state"], gang["ranks"][0]["state"]) == ("placed", "up")
    assert [node["labels"].get("zone") for node in tree["cluster"]["nodes"] if not node["is_head"]] == ["far"]

    logs = cluster.run("manta", "logs", gang["replica_id"], "--address", f"127.0.0.1:{cluster.port}")
    assert logs.returncode == 0, logs.stderr
    assert f"rank 0 of replica {gang['replica_id']} starts in process" in logs.stdout
