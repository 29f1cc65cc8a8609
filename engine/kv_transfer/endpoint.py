"""A rank's end of KV transfers: one thread that sends and receives blocks. Knows no request, no scheduler, no lease.

The core's orders (messages.KvOrder) go in by `obey`, from any thread, and never block; what comes of them is told by
`on_event`, on the endpoint's thread. Rank 0 and its followers have one each and use it alike.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import zmq

from manta.engine.layers.attention import LayerCache

from . import cuda_ipc
from .block_store import DeviceStore, HostStore
from .control import listening_socket, url_of
from .frames import PURPOSE, TransportLimits, Welcome
from .link import KvLink
from .messages import Failed, KvAccept, KvEvent, KvOpen, KvOrder, KvRange, KvRevoke, KvShard, KvStop, Revoked, Stopped
from .receiver import Receiver
from .sender import RangeReady, Sender
from .staging import DeviceWriter, HostOut, HostWriter, InShared, OutSlots, PeerOut, PinnedOut

logger = logging.getLogger(__name__)

_DEVICE_WAIT_S = 1e-4
"""Between two looks at copies on a GPU: no time that a frame would notice."""
_STEP_WAIT_MS = 1
"""Between two looks at whether a step is done, milliseconds."""
_CLOSE_S = 10.0

_Ready = torch.cuda.Event | None


@dataclass(frozen=True)
class _Connections:
    """Makes what leads to other ranks: links and the buffers behind them. Knows no endpoint, which holds who asks it:
    an endpoint that is let go frees caches and buffers at once, not when the collector comes by."""

    context: zmq.Context[zmq.Socket[bytes]]
    store: DeviceStore | HostStore
    limits: TransportLimits
    node: str | None
    checksums: bool
    slot_bytes: int
    read_stream: torch.cuda.Stream | None

    def connect(self, url: str, key: bytes) -> KvLink:
        return KvLink(
            self.context,
            url,
            key,
            limits=self.limits,
            geometry=self.store.geometry,
            node=self.node,
            make_slots=self.slots,
            checksums=self.checksums,
            now_s=time.monotonic(),
        )

    def slots(self, welcome: Welcome) -> OutSlots:
        sizes = {"num_slots": self.limits.num_slots, "slot_bytes": self.slot_bytes}
        if isinstance(self.store, HostStore):
            return HostOut(self.store, **sizes)
        assert self.read_stream is not None
        if welcome.staging is not None:
            try:
                return PeerOut(self.store, self.read_stream, welcome.staging, pid=os.getpid())
            except cuda_ipc.IpcUnavailable as error:
                logger.warning("KV to another GPU of this node goes through host memory: %s", error)
        return PinnedOut(self.store, self.read_stream, **sizes)

    def shared(self) -> InShared:
        assert isinstance(self.store, DeviceStore)
        shard = self.store.shard
        slot_bytes = max(self.limits.staging_bytes, self.store.block_bytes(shard.kv_heads))
        return InShared(self.store.device, num_slots=self.limits.num_staging, slot_bytes=slot_bytes, pid=os.getpid())


class KvEndpoint:
    """Sends this rank's part of blocks to other engines' ranks, and writes what their ranks send into its own blocks.

    - KvOpen, KvRange: each block of a generation is sent once and whole, to every rank of the target that holds a part
      of it: when a range ends at or behind the block's end, or is the last. Then Sent, once the last block was read.
    - KvStop: always answered by Stopped, once no block of the generation is read any more.
    - KvAccept: `block_ids` counts from token 0 (index = token // block_size); `first_token` is a multiple of the block
      size. Answered by Accepted once the blocks may be written; by Received once all bytes are there and kernels that
      are launched later see them.
    - KvRevoke: always answered by Revoked, once no block of the generation is written any more.
    - Failed, once a generation at most, and not after Sent or Received: a peer is dead, silent, refused or sent
      something wrong. It ends nothing by itself: Stopped or Revoked answers the order that follows.

    On a GPU reads and writes run on streams of the endpoint's own. They begin after what the calling thread's current
    stream held when the order came: call `obey` after the launch of the step that a range is of, and after the launch
    of whatever still uses the blocks that are accepted. On a CPU they begin at once.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        shards: Sequence[KvShard],
        rank: int,
        *,
        block_size: int,
        key: bytes,
        on_event: Callable[[KvEvent], None],
        host: str = "127.0.0.1",
        checksums: bool = False,
        shares_gpu_memory: bool = True,
        limits: TransportLimits | None = None,
    ) -> None:
        """`caches` has an entry for each layer of `shards[rank]`, `shards` one for each rank of this engine.

        `key`: 32 secret bytes, the same on all ranks of the engine (KvPeer.key). `host`: the address that other nodes
        reach this one by; a free port of it is listened at. `checksums`: each block sent carries one, which is looked
        at where it arrives whatever this says there. `shares_gpu_memory`: whether blocks may go from GPU to GPU inside
        a node; False: all go through host memory. Raises zmq.ZMQError when `host` is no address of this node.
        """
        assert caches[0][0].shape[1] == block_size, "caches hold blocks of this size"
        self._device = caches[0][0].device
        self._is_cuda = self._device.type == "cuda"
        self._limits = limits or TransportLimits.of(self._device.type)
        self._on_event = on_event
        self._orders: deque[tuple[KvOrder, _Ready, Sequence[torch.cuda.Event] | None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._lock = threading.Lock()
        node = cuda_ipc.node_name() if self._is_cuda and shares_gpu_memory else None
        store = (DeviceStore if self._is_cuda else HostStore)(caches, shards[rank])
        slot_bytes = max(self._limits.frame_bytes, store.block_bytes(shards[rank].kv_heads))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=self._limits.num_lanes)
        read_stream = torch.cuda.Stream(self._device) if self._is_cuda else None
        connections = _Connections(self._context, store, self._limits, node, checksums, slot_bytes, read_stream)
        self._router = listening_socket(self._context, zmq.ROUTER, key, PURPOSE, host)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a sender that is gone shows as an error
        self._url = url_of(self._router)
        self._receiver = Receiver(
            self._router,
            store,
            _writer(store, slot_bytes),
            limits=self._limits,
            node=node,
            make_shared=connections.shared if node is not None else None,
            on_event=on_event,
        )
        self._sender = Sender(store, shards, rank, connect=connections.connect, on_event=on_event)
        self._polled: list[KvLink] = []
        self._poller = self._new_poller([])
        self._thread = threading.Thread(target=self._run, name="manta-kv", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where other engines' ranks send blocks (KvPeer.rank_urls)."""
        return self._url

    @property
    def num_received_bytes(self) -> int:
        """Bytes written into blocks so far."""
        return self._receiver.num_bytes

    @property
    def num_shared_bytes(self) -> int:
        """Of these, what came from GPU to GPU inside the node."""
        return self._receiver.num_shared_bytes

    def obey(self, order: KvOrder, *, layers_ready: Sequence[torch.cuda.Event] | None = None) -> None:
        """Take an order; returns at once. Orders of one generation are obeyed one after the other.

        `layers_ready`, of a range on a GPU: an event for each of this rank's layers after which the range's tokens are
        in it, so that layers are sent while later ones are computed.
        """
        ready = None
        if self._is_cuda and layers_ready is None and isinstance(order, KvRange | KvAccept):
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        with self._lock:
            if not self._is_closing:
                self._orders.append((order, ready, layers_ready))
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Stop at once: peers see this end as dead. No event comes after it returned."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_CLOSE_S)
        os.close(self._wake_fd)

    @torch.inference_mode()
    def _run(self) -> None:
        if self._is_cuda:
            torch.cuda.set_device(self._device)
        try:
            self._serve()
        except Exception:
            logger.exception("The KV transfers of this rank end.")
            self._answer_without_transfers()
        if self._is_cuda:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)  # buffers may be let go then
        self._sender.close()
        self._receiver.close()
        self._router.close(linger=0)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        readable: set[object] = set()
        while not self._is_closing:
            self._take_orders()
            self._sender.turn(time.monotonic(), readable)
            has_more = self._receiver.turn(time.monotonic())
            readable = self._wait(has_more)

    def _take_orders(self) -> None:
        while self._orders:
            order, ready, layers_ready = self._orders[0]
            if isinstance(order, KvOpen):
                self._sender.open(order)
            elif isinstance(order, KvRange):
                self._sender.send(order, RangeReady(ready, layers_ready))
            elif isinstance(order, KvStop):
                self._sender.stop(order.generation)
            elif isinstance(order, KvAccept):
                self._receiver.accept(order, ready)
            else:
                self._receiver.revoke(order.generation)
            self._orders.popleft()

    def _wait(self, has_more: bool) -> set[object]:
        """Until there is something to do. The sockets that have something to read."""
        timeout_ms = int(self._limits.beat_s * 1e3)
        if has_more and self._receiver.can_take:
            timeout_ms = 0
        elif self._sender.waits_for_device or self._receiver.waits_for_device:
            time.sleep(_DEVICE_WAIT_S)  # the poller knows no shorter time than a millisecond
            timeout_ms = 0
        elif self._sender.waits_for_step or self._receiver.waits_for_step:
            timeout_ms = _STEP_WAIT_MS
        links = self._sender.links
        if links != self._polled:
            self._polled = links
            self._poller = self._new_poller(links)
        readable: set[object] = {socket for socket, _ in self._poller.poll(timeout_ms)}
        if self._wake_fd in readable:
            os.eventfd_read(self._wake_fd)
        return readable

    def _new_poller(self, links: Sequence[KvLink]) -> zmq.Poller:
        poller = zmq.Poller()
        for readable in (self._wake_fd, self._router, *(socket for link in links for socket in link.sockets)):
            poller.register(readable, zmq.POLLIN)
        return poller

    def _answer_without_transfers(self) -> None:
        """After an error that should not be: nothing is sent or written any more, and nobody waits for it."""
        if self._is_cuda:
            with contextlib.suppress(RuntimeError):  # a device that has failed does nothing more
                torch.cuda.synchronize(self._device)
        poller = self._new_poller([])
        poller.unregister(self._router)
        while not self._is_closing:
            while self._orders:
                order = self._orders.popleft()[0]
                if isinstance(order, KvStop):
                    self._on_event(Stopped(order.generation))
                elif isinstance(order, KvRevoke):
                    self._on_event(Revoked(order.generation))
                else:
                    reason = "the rank's KV transfers ended with an error; its log says why"
                    self._on_event(Failed(order.generation, reason))
            if poller.poll():
                os.eventfd_read(self._wake_fd)


def _writer(store: DeviceStore | HostStore, buffer_bytes: int) -> HostWriter | DeviceWriter:
    if isinstance(store, HostStore):
        return HostWriter(store)
    return DeviceWriter(store, num_buffers=4, buffer_bytes=buffer_bytes)
