"""Prefill and decode engines without Ray: processes of this machine behind an edge in a thread, KV through links that
can be broken. Starts, kills and counts; knows no fault and no load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from manta.cluster.routing.roles import Role
from manta.deploy.config import DeployConfig, Pool, pools_of
from manta.engine.errors import MantaError
from manta.engine.model_source import resolve_model
from manta.engine.tokenizer import Tokenizer
from manta.replicas.channel import Address, ChannelLost, KeyPair
from manta.replicas.edge.app import create_app
from manta.replicas.edge.client import EdgeContext
from manta.replicas.edge.router import ChannelRouter, RouterLimits
from manta.replicas.metrics import EdgeMetrics

from .engine_process import EngineOrder, EngineReply
from .link_proxy import Link, Links

START_TIMEOUT_S = 120.0


class PoolLabFailed(MantaError):
    """Something did not come (back) to where it should be; the message says what was waited for."""


@dataclass(eq=False)
class LabEngine:
    """One engine's process."""

    replica_id: str
    pool: Pool
    process: subprocess.Popen[bytes]
    links: list[Link]
    """Of its core and of each of its ranks."""
    address: Address | None = None
    log: Path = field(default=Path())


class PoolLab:
    """`start`, then faults; `close` at the end, whatever happened."""

    def __init__(self, config: DeployConfig, folder: Path) -> None:
        """`folder` takes the engines' logs."""
        self.config = config
        self.links = Links()
        self.engines: dict[str, LabEngine] = {}
        """By replica id; also those that were killed, until `revive`."""
        self._pools = pools_of(config)
        self._folder = folder
        self._keys = KeyPair.new()
        self._numbers = itertools.count()
        self._edge = _EdgeThread(self._locate, self._keys, config)
        self._http = httpx.Client(base_url=self._edge.url, timeout=10.0, trust_env=False)

    @property
    def url(self) -> str:
        """Where the edge answers."""
        return self._edge.url

    def start(self) -> None:
        """All engines, and the edge. Raises PoolLabFailed."""
        self._edge.start()
        started = [self._launch(pool) for pool in self._pools for _ in range(pool.num_replicas)]
        for engine in started:
            self._wait_started(engine)

    def close(self) -> None:
        """End everything."""
        self._http.close()
        self._edge.stop()
        for engine in self.engines.values():
            engine.process.kill()
            engine.process.wait()
        self.links.close()

    def of(self, role: Role) -> list[LabEngine]:
        """The engines of a pool."""
        return [engine for engine in self.engines.values() if engine.pool.role is role]

    def set_members(self, *roles: Role) -> None:
        """Let the edge know the engines of these pools, and wait until they are ready."""
        ids = [engine.replica_id for role in roles for engine in self.of(role)]
        self._edge.set_members(ids)
        self.wait(lambda: {one["replica_id"] for one in self.replicas() if one["ready"]} == set(ids), "all replicas")

    def revive(self, engine: LabEngine) -> LabEngine:
        """In place of one that died: another under a name of its own, as Serve does it."""
        engine.process.kill()
        engine.process.wait()
        del self.engines[engine.replica_id]
        fresh = self._launch(engine.pool)
        self._wait_started(fresh)
        self.set_members(*(pool.role for pool in self._pools))
        return fresh

    def replicas(self) -> list[dict[str, Any]]:
        """Every replica that the edge knows."""
        return self._http.get("/ready").json()["replicas"]

    def held(self, role: Role) -> dict[str, int]:
        """Blocks, leases and requests that the engines of a pool hold now."""
        mine = {engine.replica_id for engine in self.of(role)}
        found = [one for one in self.replicas() if one["replica_id"] in mine]
        names = {"blocks": "num_used_blocks", "leases": "num_kv_leases", "running": "num_running"}
        return {name: sum(one.get(number, 0) for one in found) for name, number in names.items()}

    def metric(self, name: str) -> float:
        """Sum over all labels; 0 for one that is not there."""
        return sum(number for _, number in self._samples(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Samples of a metric by the value of one of its labels."""
        return {line.partition(f'{label}="')[2].partition('"')[0]: number for line, number in self._samples(name)}

    def _samples(self, name: str) -> list[tuple[str, float]]:
        lines = [line.rsplit(" ", 1) for line in self._http.get("/metrics").text.splitlines() if line[:1] != "#"]
        return [(line, float(number)) for line, number in lines if line.split("{")[0] == name]

    def wait(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0, poll_s: float = 0.05) -> float:
        """Seconds until `condition()` is true. Raises PoolLabFailed naming `what` was waited for."""
        start_s = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition():
                    return time.monotonic() - start_s
            if time.monotonic() - start_s > timeout_s:
                raise PoolLabFailed(f"waited {timeout_s:g} s in vain for {what}")
            time.sleep(poll_s)

    def model_name(self) -> str:
        """Of what is served."""
        return self._http.get("/v1/models").json()["data"][0]["id"]

    def _launch(self, pool: Pool) -> LabEngine:
        name = f"{pool.name}-{next(self._numbers)}"
        parallel = pool.engine.parallel
        num_ranks = 1 if pool.engine.device.startswith("sim") else parallel.num_ranks
        links = [self.links.open() for _ in range(1 + num_ranks)]
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "manta.bench.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        order = EngineOrder(
            name=name,
            role=pool.role,
            config=pool.engine.model_dump(mode="json"),
            keys=self._keys.for_engines,
            control_port=links[0].port,
            rank_ports=[link.port for link in links[1:]],
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        engine = self.engines[name] = LabEngine(name, pool, process, links, log=log)
        return engine

    def _wait_started(self, engine: LabEngine) -> None:
        assert engine.process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, engine.process.kill)
        timer.start()
        line = engine.process.stdout.readline()
        timer.cancel()
        if not line:
            said = engine.log.read_text(errors="replace").strip().splitlines()
            raise PoolLabFailed(f"engine {engine.replica_id} did not start: {said[-1] if said else 'no word from it'}")
        reply = msgspec.json.decode(line, type=EngineReply)
        engine.address = reply.address
        for link, url in zip(engine.links, [reply.control_url, *reply.rank_urls], strict=True):
            host, _, port = url.removeprefix("tcp://").rpartition(":")
            link.target = (host, int(port))

    def _locate(self, replica_id: str) -> Address:
        engine = self.engines.get(replica_id)
        if engine is None or engine.address is None or engine.process.poll() is not None:
            raise ChannelLost("its process is gone")
        return engine.address


class _EdgeThread:
    """The edge of the lab, on an event loop and a port of its own. Implements Directory."""

    def __init__(self, find: Callable[[str], Address], keys: KeyPair, config: DeployConfig) -> None:
        self._find = find
        self._keys = keys
        self._config = config
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="edge", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router: ChannelRouter | None = None
        self._server: uvicorn.Server | None = None

    async def locate(self, replica_id: str) -> Address:
        return self._find(replica_id)

    def hold(self, replica_id: str) -> Callable[[], None]:
        return lambda: None

    def start(self) -> None:
        self._thread.start()
        if not self._is_up.wait(START_TIMEOUT_S):
            raise PoolLabFailed("the edge did not start")

    def set_members(self, replica_ids: list[str]) -> None:
        assert self._loop is not None
        assert self._router is not None
        self._loop.call_soon_threadsafe(self._router.set_members, replica_ids)

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join()
        self._listener.close()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        model, serving, metrics = self._config.engine.model, self._config.serving, EdgeMetrics("lab")
        source = resolve_model(model)
        limits = RouterLimits(
            max_queued_requests=serving.max_queued_requests,
            max_wait_s=serving.replica_wait_s,
            drain_grace_s=serving.drain_grace_s,
            detour_from_tokens=self._config.serving.routing.detour_from_tokens,
        )
        router = self._router = ChannelRouter(self, edge_id="lab", keys=self._keys, limits=limits, metrics=metrics)
        context = EdgeContext(
            router,
            Tokenizer.load(source, chat_template=model.chat_template),
            model.served_model_name or source.name,
            observer=metrics,
            hash_key=self._keys.for_engines.block_hashes,
            roles=tuple(pool.role for pool in pools_of(self._config)),
        )
        uvicorn_config = uvicorn.Config(
            create_app(context), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(uvicorn_config)
        serving_task = asyncio.ensure_future(self._server.serve([self._listener]))
        while not self._server.started and not serving_task.done():
            await asyncio.sleep(0.01)
        self._is_up.set()
        await serving_task
        await router.close()


def is_gone(engine: LabEngine) -> bool:
    """Whether its process has ended."""
    return engine.process.poll() is not None


def kill(engine: LabEngine, number: int) -> None:
    """Send its process a signal."""
    os.kill(engine.process.pid, number)
