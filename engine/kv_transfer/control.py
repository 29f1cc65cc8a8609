"""Core to core about KV that moves between their engines: small messages over ZeroMQ, encrypted with CURVE. Torch-free.

Each core listens at one socket, where others begin, and connects to the cores to which it sends. The keys follow from
the secret in the listener's KvPeer, so that only who was given that can connect. What followers' endpoints have to say
comes in the same way. One thread, the core's, owns all of it; `pollables` wake it. Knows nothing of what is said.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import zmq
from zmq.utils import z85

from .messages import KvEvent, KvPeer, ToDecode, ToPrefill

UNUSED_S = 120.0
"""A connection to another core is closed when nothing was said over it for so long."""

M = TypeVar("M")

_Socket = zmq.Socket[bytes]

_encode = msgspec.msgpack.Encoder().encode
_decode_to_decode = msgspec.msgpack.Decoder(ToDecode).decode
_decode_to_prefill = msgspec.msgpack.Decoder(ToPrefill).decode


class EventInbox:
    """Where endpoints' threads leave their events for the core's thread, which `fd` wakes."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while there are events."""
        self._events: deque[tuple[int, KvEvent]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, rank: int, event: KvEvent) -> None:
        """From any thread."""
        with self._lock:
            if not self._is_closed:
                self._events.append((rank, event))
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[int, KvEvent]]:
        """All events so far, with the ranks that they come from, in order."""
        if not self._events:
            return []
        with self._lock:
            os.eventfd_read(self.fd)
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """What comes later is dropped."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)


class KvControl:
    """One core's connections to others."""

    def __init__(self, key: bytes, *, host: str) -> None:
        """Listens on a free port of `host`; `key` are the secret bytes of the own KvPeer."""
        self._context = zmq.Context()
        self._router = listening_socket(self._context, zmq.ROUTER, key, "kv control", host)
        self.url = url_of(self._router)
        self._dealers: dict[str, _Dealer] = {}

    @property
    def pollables(self) -> list[_Socket]:
        """Sockets that are readable when something has come."""
        return [self._router, *(dealer.socket for dealer in self._dealers.values())]

    def ask(self, peer: KvPeer, message: ToDecode) -> None:
        """To the core at `peer`. Never blocks; what cannot be delivered is lost, as its answer may be."""
        dealer = self._dealers.get(peer.control_url)
        if dealer is None:
            socket = connected_socket(self._context, zmq.DEALER, peer.key, "kv control", peer.control_url)
            dealer = self._dealers[peer.control_url] = _Dealer(socket, peer)
        dealer.used_at_s = time.monotonic()
        _send(dealer.socket, _encode(message))

    def answer(self, peer: bytes, message: ToPrefill) -> None:
        """To a core that asked; dropped when it is gone."""
        _send(self._router, peer, _encode(message))

    def asked(self) -> Iterator[tuple[bytes, ToDecode]]:
        """What other cores have asked for, with where to answer."""
        while (parts := _receive(self._router)) is not None:
            message = _decoded(_decode_to_decode, parts[-1])
            if message is not None:
                yield parts[0], message

    def answers(self) -> Iterator[tuple[KvPeer, ToPrefill]]:
        """What other cores have answered."""
        for dealer in list(self._dealers.values()):
            while (parts := _receive(dealer.socket)) is not None:
                message = _decoded(_decode_to_prefill, parts[-1])
                if message is not None:
                    dealer.used_at_s = time.monotonic()
                    yield dealer.peer, message

    def close_unused(self, now_s: float) -> None:
        """Close connections that were of no use for a while: their other end may be gone for good."""
        for url, dealer in list(self._dealers.items()):
            if now_s >= dealer.used_at_s + UNUSED_S:
                dealer.socket.close()
                del self._dealers[url]

    def close(self) -> None:
        """Others notice nothing but silence."""
        self._router.close()
        for dealer in self._dealers.values():
            dealer.socket.close()
        self._context.term()


class _Dealer:
    def __init__(self, socket: _Socket, peer: KvPeer) -> None:
        self.socket, self.peer = socket, peer
        self.used_at_s = 0.0


def listening_socket(context: zmq.Context[_Socket], kind: int, key: bytes, purpose: str, host: str) -> _Socket:
    """A socket on a free port of `host` to which only who knows `key` can connect."""
    socket = _new_socket(context, kind, host)
    _, secret = _curve_keys(key, purpose)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    url_host = f"[{host}]" if ":" in host else host
    socket.bind(f"tcp://{url_host}:*")
    return socket


def connected_socket(context: zmq.Context[_Socket], kind: int, key: bytes, purpose: str, url: str) -> _Socket:
    """The other end of a listening socket."""
    socket = _new_socket(context, kind, url)
    server_public, _ = _curve_keys(key, purpose)
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.connect(url)
    return socket


def url_of(socket: _Socket) -> str:
    """Where a listening socket listens."""
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def _new_socket(context: zmq.Context[_Socket], kind: int, host: str) -> _Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, int("[" in host or host.count(":") > 2))
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
    return socket


def _curve_keys(key: bytes, purpose: str) -> tuple[bytes, bytes]:
    """A server's public and secret CURVE key, Z85-encoded. The public one is never sent."""
    secret = z85.encode(hashlib.blake2b(purpose.encode(), key=key, digest_size=32).digest())
    return zmq.curve_public(secret), secret


def _send(socket: _Socket, *parts: bytes) -> None:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return  # nobody is connected yet and the queue is full: as if it were lost


def _receive(socket: _Socket) -> list[bytes] | None:
    has_some = socket.getsockopt(zmq.EVENTS) & zmq.POLLIN  # type: ignore[operator]
    return socket.recv_multipart(zmq.NOBLOCK) if has_some else None


def _decoded(decode: Callable[[bytes], M], data: bytes) -> M | None:
    try:
        return decode(data)
    except msgspec.DecodeError:
        return None
