"""Where an edge's metrics are shown: its own on a port of its own, those of all edges on the public one. Knows no Ray.

Prometheus finds the ports by GET /metrics/targets (its HTTP discovery). They need no key and show what the public
/metrics shows, which needs none either.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric

from .metric_aliases import vllm_aliases
from .metric_families import Page, merge, render_text

Aliases = Literal["none", "vllm"]


@dataclass(frozen=True)
class Observability:
    """What an edge shows of itself, and to whom."""

    aliases: Aliases = "none"
    """Names of another system that the public page has, too."""
    dollars_per_gpu_hour: float | None = None
    traces_endpoint: str | None = None
    """Of OTLP over HTTP; None: no traces."""
    traces_share: float = 1.0
    """Of the requests that no caller traces."""


ANSWER_TIMEOUT_S = 5.0


class Exposition:
    """Made on the edge's running loop, in which the metrics are read; `close` at the end."""

    def __init__(
        self,
        own: Callable[[], list[Metric]],
        *,
        model_name: str,
        ask_all: Callable[[str], Awaitable[Sequence[Any]]] | None = None,
        host: str = "127.0.0.1",
        aliases: Aliases = "none",
    ) -> None:
        """`own` gives this edge's metrics. `ask_all` calls a method of every edge, this one included: `metric_families`
        and `metrics_target`; None where there is one edge. `host`: where Prometheus reaches this process."""
        self._own = own
        self._model_name = model_name
        self._ask_all = ask_all
        self._aliases = aliases
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry()
        registry.register(Page(self._own_from_thread))
        self._server = (_Server6 if ":" in host else _Server)((host, 0), _Quiet)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        port = self._server.server_port
        self.target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Host and port of this edge's own page."""

    async def page(self) -> bytes:
        """The public page: all edges, and aliases where they are asked for."""
        pages = [self._own()] if self._ask_all is None else await self._ask_all("metric_families")
        families = merge(pages) if len(pages) > 1 else list(pages[0] if pages else self._own())
        if self._aliases == "vllm":
            families += vllm_aliases(families, self._model_name)
        return render_text(families)

    async def targets(self) -> list[dict[str, Any]]:
        """Every edge's own page, as Prometheus's HTTP discovery wants it."""
        targets = [self.target] if self._ask_all is None else await self._ask_all("metrics_target")
        return [{"targets": sorted(targets), "labels": {"model": self._model_name}}]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _own_from_thread(self) -> list[Metric]:
        """In a thread of the port's server."""
        return asyncio.run_coroutine_threadsafe(self._read_own(), self._loop).result(ANSWER_TIMEOUT_S)

    async def _read_own(self) -> list[Metric]:
        return self._own()


class _Server(ThreadingMixIn, WSGIServer):
    """Of an edge's own page."""

    daemon_threads = True

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for the name of the address, and an edge that starts would wait for
        # seconds where none answers.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing a request."""
