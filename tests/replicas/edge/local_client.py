"""An EngineClient over one engine core in a thread of this process, and a minimal /metrics. For tests only."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from manta.engine.core import EngineCore
from manta.engine.errors import EngineFailed
from manta.engine.llm import refusal_error
from manta.engine.request import EngineRequest, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot
from manta.replicas.edge.client import ReplicaStatus, RequestRecord, RequestTerms, RouteNote, Take

Item = RequestDelta | Exception


@dataclass
class MemoryObserver:
    """Keeps what it is told."""

    records: list[RequestRecord] = field(default_factory=list)
    refusals: list[tuple[str, int, str]] = field(default_factory=list)

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        self.refusals.append((endpoint, status, code))


class LocalClient:
    """Implements EngineClient. The core's thread takes calls, steps while there is work, and sleeps otherwise."""

    def __init__(self, core: EngineCore, observer: MemoryObserver) -> None:
        self._core = core
        self._observer = observer
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Item]]] = {}
        self._snapshot = core.snapshot()
        self._thread = threading.Thread(target=self._run, name="engine core")
        self._thread.start()

    @property
    def info(self) -> EngineInfo | None:
        return self._core.info

    async def run(
        self, request: EngineRequest, take: Take, terms: RequestTerms = RequestTerms(), note: RouteNote | None = None
    ) -> None:
        items: asyncio.Queue[Item] = asyncio.Queue()
        self._streams[request.request_id] = (asyncio.get_running_loop(), items)
        self._calls.put(lambda: self._add(request))
        is_over = False
        try:
            while not is_over:
                item = await items.get()
                if isinstance(item, Exception):
                    is_over = True
                    raise item
                is_over = item.finish_reason is not None
                if not take(item):
                    return
        finally:
            del self._streams[request.request_id]
            if not is_over:
                self._calls.put(lambda: self._cancel(request.request_id))

    def replicas(self) -> list[ReplicaStatus]:
        alive = self._thread.is_alive()
        return [ReplicaStatus("local", ready=alive, snapshot=self._snapshot, last_frame_age_s=0.0)]

    async def render_metrics(self) -> bytes:
        first_tokens = [
            choice.time_to_first_token_s
            for record in self._observer.records
            for choice in record.choices
            if choice.time_to_first_token_s is not None
        ]
        lines = {
            "manta_requests_running": self._snapshot.num_running,
            "manta_requests_waiting": self._snapshot.num_waiting,
            "manta_kv_cache_usage": self._snapshot.kv_cache_usage,
            "manta_time_to_first_token_seconds_count": len(first_tokens),
            "manta_time_to_first_token_seconds_sum": sum(first_tokens),
        }
        return "".join(f"{name} {value}\n" for name, value in lines.items()).encode()

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def close(self) -> None:
        """Stop the thread. The core is left to its owner."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        core = self._core
        while True:
            while not core.has_work or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    return
                call()
                self._snapshot = core.snapshot()
            try:
                deltas = core.step()
            except Exception as error:
                for request_id in list(self._streams):
                    self._send(request_id, EngineFailed(f"The engine failed: {error}"))
                return
            self._snapshot = core.snapshot()
            for delta in deltas:
                self._send(delta.request_id, delta)

    def _add(self, request: EngineRequest) -> None:
        refusal = self._core.add(request)
        if refusal is not None:
            self._send(request.request_id, refusal_error(refusal))

    def _cancel(self, request_id: str) -> None:
        self._core.cancel(request_id)

    def _send(self, request_id: str, item: Item) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream[0].call_soon_threadsafe(stream[1].put_nowait, item)
