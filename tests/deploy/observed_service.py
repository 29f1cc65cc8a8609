"""Prefill and decode engines, two edges and an HTTP port in this process, with metrics as a deployment shows them. For
tests only."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from manta.cluster.routing.admission import Tenant
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided, PoolStatus, ScalingStatus
from manta.cluster.slo import Slo
from manta.cluster.spec import GangSpec, PoolSpec
from manta.engine.core import EngineCore
from manta.engine.model_source import resolve_model
from manta.engine.startup import start_engine
from manta.engine.tokenizer import Tokenizer
from manta.replicas.channel import Address, KeyPair
from manta.replicas.edge.app import create_app
from manta.replicas.edge.client import EdgeContext, Observers, RequestObserver
from manta.replicas.edge.router import ChannelRouter, RouterLimits
from manta.replicas.exposition import Aliases, Exposition
from manta.replicas.metrics import EdgeMetrics
from tests.replicas.edge.local_server import sim_config
from tests.replicas.engines import Engine, engine

POOLS = (
    PoolSpec("prefill", GangSpec(), 1, Role.PREFILL),
    PoolSpec("decode", GangSpec(), 1, Role.DECODE),
)
DECIDED = Decided(time_s=1764460800.25, pool="decode", before=1, after=2, reason="forecast", sentence="12 req/s come.")


class ObservedService:
    """Made by `observed_service`. `url` is the first edge's port."""

    def __init__(self, url: str, edges: list[Edge], cores: dict[str, EngineCore]) -> None:
        self.url = url
        self.edges = edges
        self.cores = cores
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def complete(self, prompt: Any, *, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": "bytes", "prompt": prompt, "temperature": 0, **fields})


class Edge:
    """One edge: a router to all engines, its metrics, and a page of its own. Implements Directory."""

    def __init__(
        self,
        name: str,
        engines: dict[str, Engine],
        keys: KeyPair,
        ask_all: Callable[[str], Any],
        *,
        aliases: Aliases,
        limits: RouterLimits,
    ) -> None:
        self._engines = engines
        self.metrics = EdgeMetrics(
            name,
            slo=Slo(ttft_s=2.0, tpot_s=0.5),
            pools=POOLS,
            pool_of=lambda replica_id: replica_id.split("-")[0],
            dollars_per_gpu_hour=2.5,
        )
        self.router = ChannelRouter(self, edge_id=name, keys=keys, limits=limits, metrics=self.metrics)
        self.exposition = Exposition(self.router.metric_families, model_name="bytes", ask_all=ask_all, aliases=aliases)

    async def locate(self, replica_id: str) -> Address:
        return self._engines[replica_id].server.address

    def hold(self, replica_id: str) -> Callable[[], None]:
        return lambda: None

    def learn(self, *, desired: int, num_decided: int) -> None:
        """What an autoscaler would say."""
        pools = tuple(
            PoolStatus(name=one.name, role=one.role, desired=desired, num_ready=1, gpus_per_replica=1.0)
            for one in POOLS
        )
        self.metrics.scaling_learned(
            ScalingStatus(
                time_s=0.0,
                pools=pools,
                forecast_requests_s=12.0,
                arrivals_requests_s=10.0,
                attainment=0.995,
                cold_start_s=4.0,
                gpus_used=2.0,
                gpu_budget=8.0,
                decided=(DECIDED,),
                num_decided={"decode": {"forecast": num_decided}},
            )
        )


@contextmanager
def observed_service(
    model: Path, *, aliases: Aliases = "none", observer: RequestObserver | None = None, **limits: Any
) -> Iterator[ObservedService]:
    """`observer` is told of the first edge's requests, too."""
    keys = KeyPair.new()
    with ExitStack() as stack:
        cores: dict[str, EngineCore] = {}
        engines: dict[str, Engine] = {}
        for pool in POOLS:
            name = f"{pool.name}-0"
            core = cores[name] = start_engine(sim_config(model, device="sim:2ms", kv_transfer=True))
            stack.callback(core.close)
            running = engine(core, keys.public, name=name, info=core.info, role=pool.role)
            engines[name] = stack.enter_context(running)
        thread = _EdgeThread(model, engines, keys, aliases, observer, RouterLimits(detour_from_tokens=64, **limits))
        stack.callback(thread.stop)
        service = ObservedService(thread.url, thread.edges, cores)
        stack.callback(service.http.close)
        yield service


class _EdgeThread:
    """Two edges on one event loop; the first has the port."""

    def __init__(
        self,
        model: Path,
        engines: dict[str, Engine],
        keys: KeyPair,
        aliases: Aliases,
        observer: RequestObserver | None,
        limits: RouterLimits,
    ) -> None:
        self._model, self._engines, self._keys = model, engines, keys
        self._aliases: Aliases = aliases
        self._observer = observer
        self._limits = limits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.edges: list[Edge] = []
        self._is_up = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="edges")
        self._thread.start()
        assert self._is_up.wait(30)

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _ask_all(self, method: str) -> list[Any]:
        if method == "metrics_target":
            return [edge.exposition.target for edge in self.edges]
        return [edge.router.metric_families() for edge in self.edges]

    async def _run(self) -> None:
        for name in ("edge-a", "edge-b"):
            edge = Edge(name, self._engines, self._keys, self._ask_all, aliases=self._aliases, limits=self._limits)
            edge.router.set_members(self._engines)
            self.edges.append(edge)
        first = self.edges[0]
        observers = [first.metrics, *([] if self._observer is None else [self._observer])]
        context = EdgeContext(
            first.router,
            Tokenizer.load(resolve_model(sim_config(self._model).model)),
            "bytes",
            observer=Observers(tuple(observers)),
            roles=(Role.PREFILL, Role.DECODE),
            hash_key=self._keys.for_engines.block_hashes,
            default_tenant=Tenant(name="default"),
            metrics=first.exposition.page,
            metrics_targets=first.exposition.targets,
        )
        config = uvicorn.Config(
            create_app(context), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        serving = asyncio.ensure_future(self._server.serve([self._listener]))
        for _ in itertools.repeat(None, 1000):
            ready = all(sum(one.ready for one in edge.router.replicas()) == len(POOLS) for edge in self.edges)
            if self._server.started and ready:
                break
            await asyncio.sleep(0.01)
        self._is_up.set()
        await serving
        for edge in self.edges:
            edge.exposition.close()
            await edge.router.close()
