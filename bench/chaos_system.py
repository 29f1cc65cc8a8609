"""The system that chaos is made in: Manta on a Ray of its own on this machine. Starts, changes and counts it.

The application is deployed as a Serve config, as `serve deploy` does, so that scaling and rolling updates are what an
operator would do. Knows no fault and no load.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from manta.deploy import processes, settings
from manta.deploy.checks import free_ports
from manta.deploy.config import DeployConfig
from manta.deploy.ray_local import LocalRay, choose_haproxy, join, keep_logs, quiet
from manta.engine.config import Section
from manta.engine.errors import MantaError

from .node_lab import LabNode, NodeLab

APP_NAME = "manta"
RANK_TITLE = b"ray::EngineShard"
REVISION = "MANTA_REVISION"
"""Environment variable of engine replicas that a rolling update changes."""


class ChaosFailed(MantaError):
    """The system did not come (back) to where it should be; the message says what was waited for."""


@dataclass(frozen=True)
class Held:
    """What the system holds at one moment."""

    blocks: int
    actors: int
    """Actors of replicas and ranks beyond those that the deployment has."""
    placement_groups: int
    """Beyond one a replica."""

    @property
    def is_nothing(self) -> bool:
        return not (self.blocks or self.actors or self.placement_groups)


class ChaosSystem:
    """`start`, then faults; `close` at the end, whatever happened."""

    def __init__(self, config: DeployConfig, lab: NodeLab | None = None) -> None:
        """`lab`: on its nodes, which are not started yet, instead of on a Ray of this machine alone."""
        (port,) = free_ports(1)
        self.config = config
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._num_replicas = config.serving.num_replicas
        self._revision = 0
        parallel = config.engine.parallel
        self._world_size = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
        num_cpus = (os.cpu_count() or 1) + 4 * self._num_replicas * self._world_size
        self._lab = lab
        self._ray = lab or LocalRay(num_cpus=num_cpus, use_haproxy=choose_haproxy(config.serving.proxy))
        self._http = httpx.Client(base_url=self.url, timeout=5.0, trust_env=False)

    @property
    def num_replicas(self) -> int:
        """Replicas that the deployment has when nothing is wrong."""
        return self._num_replicas

    def start(self) -> None:
        """Until every replica is ready. Raises RayFailed or ChaosFailed."""
        self._ray.start()
        if self._lab is not None:
            join(self._lab.address)
        settings.export({"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"})
        from ray import serve
        from ray.serve.schema import LoggingConfig

        quiet()
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": self.port},
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )
        self._deploy()
        self.wait(self._is_up, "all replicas", timeout_s=180.0)

    def close(self) -> int:
        """End everything. Returns how many processes were left."""
        self._http.close()
        try:
            if self._lab is not None:
                import ray

                ray.shutdown()
        finally:
            self._ray.remove()
        return len(processes.instance_processes(self._ray.instance, self._ray.folder))

    def keep_logs(self, folder: Path) -> Path | None:
        """Copy Ray's logs to a folder that stays; None without any."""
        return keep_logs(self._ray.logs, folder)

    def lab_and_node(self, rng: random.Random) -> tuple[NodeLab, LabNode]:
        """The lab, and one of its nodes that holds ranks. Raises ChaosFailed without a lab."""
        if self._lab is None:
            raise ChaosFailed("faults of nodes need several nodes: manta chaos --nodes 4")
        ranks = set(self.ranks())
        return self._lab, rng.choice([node for node in self._lab.workers if ranks & set(node.pids())])

    def scale(self, num_replicas: int) -> None:
        """Ask Serve for so many engine replicas. One that is too many drains."""
        self._num_replicas = num_replicas
        self._deploy()

    def update(self) -> None:
        """Ask Serve for engine replicas of another revision: a rolling update."""
        self._revision += 1
        self._deploy()

    def replicas(self) -> list[dict[str, Any]]:
        """Every replica that the edge knows. Raises httpx.HTTPError while it cannot be asked."""
        reply = self._http.get("/ready")
        return reply.json()["replicas"] if reply.status_code in (200, 503) and reply.content[:1] == b"{" else []

    def known(self) -> set[str]:
        """Ids of all replicas that the edge knows, also of those that leave."""
        return {replica["replica_id"] for replica in self.replicas()}

    def ready(self) -> set[str]:
        """Ids of the replicas that take new work."""
        return {replica["replica_id"] for replica in self.replicas() if replica["ready"]}

    def model_name(self) -> str:
        """Of what is served."""
        return self._http.get("/v1/models").json()["data"][0]["id"]

    def metric(self, name: str) -> float:
        """Sum over all labels; 0 for one that is not there."""
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def ranks(self) -> list[int]:
        """Processes of engine ranks, oldest first."""
        found = []
        for pid in processes.instance_processes(self._ray.instance, self._ray.folder):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:  # it ended
                continue
            if title.startswith(RANK_TITLE):
                found.append(pid)
        return sorted(found, key=lambda pid: (started_at(pid) or 0, pid))

    def held(self) -> Held:
        """What is held now, compared with an idle deployment of `num_replicas`."""
        import ray
        from ray.util import placement_group_table

        actors = ray._private.state.actors().values()  # type: ignore[attr-defined]
        alive = [one["ActorClassName"] for one in actors if one["State"] != "DEAD"]
        num_ranks = sum(name.endswith("EngineShard") for name in alive)
        num_replicas = sum("engine" in name for name in alive if name.startswith("ServeReplica"))
        groups = sum(group["state"] != "REMOVED" for group in placement_group_table().values())
        blocks = sum(replica.get("num_used_blocks", 0) for replica in self.replicas())
        extra = num_ranks - self._num_replicas * self._world_size + num_replicas - self._num_replicas
        return Held(blocks, extra, groups - self._num_replicas)

    def wait(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0, poll_s: float = 0.05) -> float:
        """Seconds until `condition()` is true. Raises ChaosFailed naming `what` was waited for."""
        start_s = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return time.monotonic() - start_s
            if time.monotonic() - start_s > timeout_s:
                raise ChaosFailed(f"waited {timeout_s:g} s in vain for {what}")
            time.sleep(poll_s)

    def wait_ready(self, *, timeout_s: float) -> float:
        """Seconds until every replica is ready. Raises ChaosFailed."""
        return self.wait(lambda: len(self.ready()) == self._num_replicas, "all replicas", timeout_s=timeout_s)

    def _is_up(self) -> bool:
        from ray import serve

        application = serve.status().applications.get(APP_NAME)
        if application is not None and application.status == "DEPLOY_FAILED":
            raise ChaosFailed(f"the application could not be deployed: {application.message.strip()[-500:]}")
        return len(self.ready()) == self._num_replicas

    def _deploy(self) -> None:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        engine = {
            "name": "engine",
            "num_replicas": self._num_replicas,
            "ray_actor_options": {"num_cpus": 0.1, "runtime_env": {"env_vars": {REVISION: str(self._revision)}}},
        }
        # Faults are to hit engines: the loss of an edge closes its clients' connections, whatever it does.
        resources = {} if self._lab is None else {"resources": {"edge": 0.01}}
        edge = {"name": "edge", "ray_actor_options": {"num_cpus": 0.2, **resources}}
        application = {
            "name": APP_NAME,
            "route_prefix": "/",
            "import_path": "manta.deploy.app:build",
            "args": arguments_of(self.config),
            "deployments": [engine, edge],
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        }
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(
            ServeDeploySchema.model_validate(
                {
                    "proxy_location": "HeadOnly",
                    "http_options": {"host": "127.0.0.1", "port": self.port},
                    "applications": [application],
                }
            )
        )


def arguments_of(config: DeployConfig) -> dict[str, Any]:
    """What is not the default, by dotted name: the arguments of a Serve config file that give the same deployment."""

    def flat(section: Section, path: str) -> Iterator[tuple[str, Any]]:
        tree = section.model_dump(mode="json", exclude_defaults=True)
        for name, value in tree.items():
            part = getattr(section, name)
            if isinstance(part, Section):
                yield from flat(part, f"{path}{name}.")
            else:
                yield path + name, value

    return dict(flat(config, ""))


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a process is frozen by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
