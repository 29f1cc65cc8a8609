"""The processes of `manta bench handoff`: bare endpoints with caches, and whole engines. Knows no workload.

Each is a child with a pipe; times are of one clock for all processes of a Linux machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import zmq

from manta.engine.config import EngineConfig
from manta.engine.errors import EngineFailed
from manta.engine.kv_transfer.messages import KvEvent, KvOrder, KvPeer, KvShard
from manta.engine.model_shape import ModelShape
from manta.engine.request import EngineRequest
from manta.engine.stats import EngineInfo, Snapshot

START_S = 600.0
ANSWER_S = 120.0
CLOSE_S = 60.0
_IDLE_MS = 20

T = TypeVar("T")


@dataclass(frozen=True)
class CacheOrder:
    """A cache to send from, or into."""

    shape: ModelShape
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    gpu_sharing: bool
    seed: int


@dataclass(frozen=True)
class Expect:
    """Core.expect."""

    ticket: str
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class Digest:
    """Asks for a digest of blocks."""

    block_ids: list[int]


@dataclass(frozen=True)
class Ready(Generic[T]):
    """The child's first message."""

    about: T


@dataclass(frozen=True)
class Failure:
    """The child's last message, when it ends by an error."""

    text: str


@dataclass(frozen=True)
class Obeyed:
    at_s: float


@dataclass(frozen=True)
class Happened:
    at_s: float
    event: KvEvent


@dataclass(frozen=True)
class Tokens:
    """What one step brought: (request id, tokens, why it ended or None)."""

    at_s: float
    deltas: list[tuple[str, list[int], str | None]] = field(default_factory=list)


class Child(Generic[T]):
    """The parent's end of a process. Ends it when closed."""

    def __init__(self, run: Callable[..., None], *arguments: object) -> None:
        """`run(pipe, *arguments)` is called in the child, and says Ready first. Raises EngineFailed."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        ready = self.receive(START_S)
        assert isinstance(ready, Ready), ready
        self.about: T = ready.about

    def send(self, message: object) -> None:
        self.pipe.send(message)

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """The next message. Raises EngineFailed when the child has ended, or says nothing for so long."""
        try:
            if not self.pipe.poll(timeout_s):
                raise EngineFailed(f"A process of the benchmark said nothing for {timeout_s:.0f} s.")
            message = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise EngineFailed("A process of the benchmark ended; its messages above say why.") from None
        if isinstance(message, Failure):
            raise EngineFailed(f"A process of the benchmark failed: {message.text}")
        return message

    def close(self) -> None:
        """What the child still says is dropped: while it writes to a full pipe it does not see that it shall end."""
        end_s = time.monotonic() + CLOSE_S
        with contextlib.suppress(EOFError, ConnectionError):
            self.pipe.send(None)
            while (left_s := end_s - time.monotonic()) > 0 and self.pipe in wait(
                [self.pipe, self._process.sentinel], left_s
            ):
                self.pipe.recv()
        self._process.join(max(0.0, end_s - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()


def first_ready(children: Sequence[Child[Any]], timeout_s: float) -> list[Child[Any]]:
    """Those that have something to say, after at most so long."""
    by_pipe: Mapping[Any, Child[Any]] = {child.pipe: child for child in children}
    return [by_pipe[pipe] for pipe in wait(list(by_pipe), max(0.0, timeout_s))]


def run_endpoint(pipe: Connection, order: CacheOrder) -> None:
    """A cache without a model: orders in, events out."""
    _guarded(pipe, lambda: _endpoint(pipe, order))


def run_engine(pipe: Connection, config: EngineConfig) -> None:
    """An engine: Expect and EngineRequest in, Tokens out; `Snapshot` (the type) asks for one."""
    _guarded(pipe, lambda: _engine(pipe, config))


def _guarded(pipe: Connection, run: Callable[[], None]) -> None:
    try:
        run()
    except (EOFError, KeyboardInterrupt):
        pass  # the parent is gone
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}"))
        raise


def _endpoint(pipe: Connection, order: CacheOrder) -> None:
    import torch

    from manta.engine.kv_cache import CacheLayout
    from manta.engine.kv_transfer.endpoint import KvEndpoint

    device = torch.device(order.device)
    layout = CacheLayout.of(order.shape, block_size=order.block_size, dtype=getattr(torch, order.dtype))
    caches = layout.allocate(order.num_blocks, device)
    if order.seed:
        torch.manual_seed(order.seed)
        for side in (side for layer in caches for side in layer.tensors):
            side.normal_()
    shards = [KvShard((0, order.shape.num_layers), (0, order.shape.num_kv_heads))]
    key = hashlib.blake2b(b"bench handoff", digest_size=32).digest()
    endpoint = KvEndpoint(
        caches,
        shards,
        0,
        block_size=order.block_size,
        key=key,
        on_event=lambda event: pipe.send(Happened(time.monotonic(), event)),
        shares_gpu_memory=order.gpu_sharing,
    )
    peer = KvPeer(
        control_url="",
        rank_urls=[endpoint.url],
        shards=shards,
        model="",
        block_size=order.block_size,
        head_dim=order.shape.head_dim,
        dtype=order.dtype,
        key=key,
    )
    with closing(endpoint):
        pipe.send(Ready(peer))
        while (message := pipe.recv()) is not None:
            if isinstance(message, Digest):
                pipe.send(_digest(caches, message.block_ids))
                continue
            orders: list[KvOrder] = message
            pipe.send(Obeyed(time.monotonic()))
            for one in orders:
                endpoint.obey(one)


def _digest(caches: Any, block_ids: list[int]) -> str:
    import torch

    found = hashlib.blake2b(digest_size=16)
    for side in (side for layer in caches for side in layer.tensors):
        found.update(side[block_ids].view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def _engine(pipe: Connection, config: EngineConfig) -> None:
    from manta.engine.loop_gc import LoopGc
    from manta.engine.startup import start_engine

    from .drive import prepare

    core = start_engine(config)
    try:
        prepare(core)
        about: EngineInfo = core.info
        pipe.send(Ready(about))
        with LoopGc() as collector:
            while True:
                while pipe.poll(0):
                    message = pipe.recv()
                    if message is None:
                        return
                    if message is Snapshot:
                        pipe.send(core.snapshot())
                    elif isinstance(message, Expect):
                        core.expect(message.ticket, message.prompt_token_ids)
                    else:
                        _add(core, message)
                if not core.has_work:
                    poller = zmq.Poller()
                    for one in (pipe.fileno(), *core.pollables):
                        poller.register(one, zmq.POLLIN)
                    poller.poll(_IDLE_MS)
                    core.poll()
                    continue
                deltas = core.step()
                collector.step_done()
                if deltas:
                    at_s = time.monotonic()
                    pipe.send(Tokens(at_s, [(d.request_id, d.token_ids, d.finish_reason) for d in deltas]))
    finally:
        core.close()


def _add(core: Any, request: EngineRequest) -> None:
    refusal = core.add(request)
    if refusal is not None:
        raise EngineFailed(f"a request of the workload was refused: {refusal.message}")
