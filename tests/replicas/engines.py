"""Engines for tests of channel and router: a core of a few lines, and a loop in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from manta.cluster.routing.roles import Role
from manta.engine.kv_transfer.messages import SendKv, TakeKv
from manta.engine.prefix_cache import CacheEvents
from manta.engine.request import EngineRequest, FinishReason, Refusal, RefusalReason, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot
from manta.engine.step_costs import StepCosts
from manta.replicas.channel_server import ChannelServer
from manta.replicas.engine_loop import Core, EngineLoop

INFO = EngineInfo(
    model_name="fake", max_model_len=4096, vocab_size=1000, block_size=16, num_blocks=64, max_num_seqs=8,
    max_num_waiting=8, device="sim", dtype="float32",
)  # fmt: skip


def token_at(prompt_token_ids: list[int], position: int) -> int:
    """The fake engine's output token of that index."""
    return (31 * sum(prompt_token_ids) + 7 * position) % 1000


class FakeCore:
    """One token a request and step; what comes next depends on prompt and position only."""

    def __init__(self, *, step_s: float = 0.001, tokens_a_step: int = 1) -> None:
        self.requests: dict[str, EngineRequest] = {}
        self.cancelled: list[str] = []
        self.added: list[str] = []
        self.handoffs: dict[str, SendKv | TakeKv] = {}
        """Of the requests that had one, by id."""
        self.expected: dict[str, list[int]] = {}
        """Prompts by ticket that was neither taken nor released."""
        self.taken: list[str] = []
        self.released: list[str] = []
        self.may_step = threading.Event()
        self.may_step.set()
        self.fails = False
        self.refuses: RefusalReason | None = None
        self.num_to_prepare = 1
        self.num_prepared = 0
        self._step_s = step_s
        self._tokens_a_step = tokens_a_step
        self._num_tokens = 0

    @property
    def info(self) -> EngineInfo:
        return INFO

    @property
    def step_costs(self) -> StepCosts | None:
        return None

    @property
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return []

    def poll(self) -> None:
        """Nothing comes from other engines here."""

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: EngineRequest) -> Refusal | None:
        if self.refuses is not None:
            return Refusal(request_id=request.request_id, reason=self.refuses, message="told to refuse")
        self.added.append(request.request_id)
        self.requests[request.request_id] = request
        if request.handoff is not None:
            self.handoffs[request.request_id] = request.handoff
        if isinstance(request.handoff, TakeKv) and self.expected.pop(request.handoff.ticket, None) is not None:
            self.taken.append(request.handoff.ticket)
        return None

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def expect(self, ticket: str, prompt_token_ids: list[int], cache_salt: str | None) -> None:
        self.expected[ticket] = prompt_token_ids

    def release(self, ticket: str) -> None:
        self.released.append(ticket)
        self.expected.pop(ticket, None)

    def step(self) -> list[RequestDelta]:
        self.may_step.wait()
        if self.fails:
            raise RuntimeError("told to fail")
        time.sleep(self._step_s)
        deltas = []
        for request_id, request in list(self.requests.items()):
            done = len(request.output_token_ids)
            assert request.params.max_tokens is not None
            num = min(self._tokens_a_step, request.params.max_tokens - done)
            tokens = [token_at(request.prompt_token_ids, done + i) for i in range(num)]
            request.output_token_ids = request.output_token_ids + tokens
            delta = RequestDelta(request_id=request_id, token_ids=tokens)
            self._num_tokens += num
            if done + num == request.params.max_tokens:
                delta.finish_reason = FinishReason.LENGTH
                del self.requests[request_id]
            deltas.append(delta)
        return deltas

    def watch(self, **told: Any) -> None:
        """Nobody is told anything here."""

    def prepare_more(self) -> bool:
        self.num_prepared += 1
        time.sleep(0.0005)
        return self.num_prepared < self.num_to_prepare

    def snapshot(self) -> Snapshot:
        return Snapshot(
            num_running=len(self.requests),
            num_blocks=64,
            num_generated_tokens=self._num_tokens,
            num_kv_leases=len(self.expected),
        )

    def take_cache_events(self) -> CacheEvents | None:
        return None

    def all_cache_events(self) -> CacheEvents:
        return CacheEvents(sequence=0, complete=True)


@dataclass
class Engine:
    """A core with its channel, running."""

    core: Core
    server: ChannelServer
    loop: EngineLoop
    thread: threading.Thread
    is_closed: bool = False

    def close(self) -> None:
        """As a process that ends: the connections break."""
        if not self.is_closed:
            self.is_closed = True
            self.loop.stop()
            self.thread.join()
            self.server.close()


@contextmanager
def engine(
    core: Core,
    client_key: bytes,
    *,
    info: EngineInfo = INFO,
    name: str = "r0",
    role: Role = Role.MIXED,
    **limits: Any,
) -> Iterator[Engine]:
    """Runs `core` until the end of the block, or until it is closed."""
    server = ChannelServer(name, info, client_key=client_key, **limits)
    loop = EngineLoop(core, server, role=role)
    running = Engine(core, server, loop, threading.Thread(target=loop.run, name=f"engine {name}"))
    running.thread.start()
    try:
        yield running
    finally:
        running.close()
