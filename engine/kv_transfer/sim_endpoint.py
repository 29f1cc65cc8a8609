"""A simulated device's end of KV transfers: nothing is copied, but everything takes its time and is told. Torch-free.

Takes the same orders and tells the same events as the real endpoint; what goes over the wire says that bytes arrived.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from .control import connected_socket, listening_socket, url_of
from .messages import (
    Accepted,
    KvAccept,
    KvEvent,
    KvOpen,
    KvOrder,
    KvPeer,
    KvRange,
    KvRevoke,
    KvStop,
    Received,
    Revoked,
    Sent,
    Stopped,
)

BANDWIDTH = 25e9
"""Bytes a second of the link between two engines: 200 Gbit/s. Assumed, not measured."""
_PURPOSE = "kv simulated"


class _Arrived(msgspec.Struct, array_like=True):
    generation: int
    is_last: bool


@dataclass(frozen=True)
class _Timed:
    order: KvOrder
    not_before_s: float


class SimEndpoint:
    """One thread, as the real one. `obey` is called by any thread and returns at once."""

    def __init__(
        self,
        *,
        key: bytes,
        on_event: Callable[[KvEvent], None],
        bytes_per_token: int,
        host: str = "127.0.0.1",
        bandwidth: float = BANDWIDTH,
    ) -> None:
        self._on_event = on_event
        self._token_s = bytes_per_token / bandwidth
        self._bytes_per_token = bytes_per_token
        self._context = zmq.Context()
        self._socket = listening_socket(self._context, zmq.PULL, key, _PURPOSE, host)
        self.url = url_of(self._socket)
        """Where other engines' endpoints say what arrived."""
        self._orders: deque[_Timed] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._targets: dict[str, zmq.Socket[bytes]] = {}
        self._free_at_s = 0.0
        self._open: dict[int, KvPeer] = {}
        self._accepted: dict[int, int] = {}
        """Generation to the tokens that are to come."""
        self._due: list[tuple[float, int, KvRange]] = []
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="manta-kv-sim", daemon=True)
        self._thread.start()

    def obey(self, order: KvOrder, *, not_before_s: float = 0.0) -> None:
        """`not_before_s`: on time.monotonic's clock, when the steps that a range is of are done."""
        self._orders.append(_Timed(order, not_before_s))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Stop at once. No event comes after it returned."""
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for socket in (self._socket, *self._targets.values()):
            socket.close()
        self._context.term()
        os.close(self._wake_fd)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._is_closing:
            wait_s = None if not self._due else max(0.0, self._due[0][0] - time.monotonic())
            ready = dict(poller.poll(None if wait_s is None else math.ceil(wait_s * 1e3)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._orders:
                self._take(self._orders.popleft())
            if self._socket in ready:
                self._arrived(msgspec.msgpack.decode(self._socket.recv(), type=_Arrived))
            while self._due and self._due[0][0] <= time.monotonic():
                self._transferred(heapq.heappop(self._due)[2])

    def _take(self, timed: _Timed) -> None:
        order = timed.order
        if isinstance(order, KvOpen):
            self._open[order.generation] = order.to
        elif isinstance(order, KvRange):
            begin_s = max(time.monotonic(), timed.not_before_s, self._free_at_s)
            self._free_at_s = begin_s + (order.end_token - order.first_token) * self._token_s
            heapq.heappush(self._due, (self._free_at_s, next(self._numbers), order))
        elif isinstance(order, KvStop):
            self._open.pop(order.generation, None)
            self._on_event(Stopped(order.generation))
        elif isinstance(order, KvAccept):
            self._accepted[order.generation] = order.num_tokens - order.first_token
            self._on_event(Accepted(order.generation))
        else:
            assert isinstance(order, KvRevoke)
            self._accepted.pop(order.generation, None)
            self._on_event(Revoked(order.generation))

    def _transferred(self, order: KvRange) -> None:
        peer = self._open.get(order.generation)
        if peer is None:
            return  # stopped meanwhile
        url = peer.rank_urls[0]
        target = self._targets.get(url)
        if target is None:
            target = self._targets[url] = connected_socket(self._context, zmq.PUSH, peer.key, _PURPOSE, url)
        target.send(msgspec.msgpack.encode(_Arrived(order.generation, order.is_last)))
        if order.is_last:
            del self._open[order.generation]
            self._on_event(Sent(order.generation))

    def _arrived(self, message: _Arrived) -> None:
        if message.is_last and message.generation in self._accepted:
            num_tokens = self._accepted.pop(message.generation)
            self._on_event(Received(message.generation, num_tokens * self._bytes_per_token))
