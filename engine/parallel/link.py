"""Brings plans from rank 0 to the others and reports back: messages in order, none lost. Knows not what they mean.

Ranks on rank 0's node read a ring in shared memory. Ranks on other nodes have a ZeroMQ connection, encrypted with CURVE
keys that follow from the gang's secret: the server's public key is never sent, so that only who knows the secret can
connect. The rank that samples reports the same two ways. Who is dead is found out elsewhere (watch.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils import z85

from .member import GangMember
from .ring import SLICE_S, RingAddress, RingReader, RingWriter
from .watch import Store

_PLANS_RING, _REPORTS_RING = "link/plans", "link/reports"
_PLANS_URL, _REPORTS_URL = "link/plans-url", "link/reports-url"

LOOK_S = 0.05
"""How long a rank with a core to itself looks for the next plan before it sleeps: longer than most steps take."""

Check = Callable[[], None]
"""Called while waiting; raises when there is nobody left to wait for."""


class DriverLink:
    """Rank 0's end. One thread sends and receives."""

    def __init__(self, member: GangMember, store: Store) -> None:
        """Says through `store` where the others find it."""
        place = member.place
        near = _near_followers(member)
        self._far = [str(rank).encode() for rank in range(1, place.world_size) if rank not in near]
        self._store = store
        self._reports_near = place.sampling_rank in near
        self._ring = RingWriter(len(near)) if near else None
        if self._ring is not None:
            store.set(_PLANS_RING, msgspec.json.encode(self._ring.address).decode())
        self._context = zmq.Context() if self._far else None
        self._router = self._pull = None
        if self._context is not None:
            self._router = _listen(self._context, zmq.ROUTER, member, "plans")
            store.set(_PLANS_URL, _url_of(self._router))
            if place.sampling_rank and not self._reports_near:
                self._pull = _listen(self._context, zmq.PULL, member, "reports")
                store.set(_REPORTS_URL, _url_of(self._pull))
        self._reports: RingReader | None = None

    def wait_for_followers(self, timeout_s: float, check: Check) -> None:
        """Until all others have opened their end. Raises TimeoutError naming the ranks that have not."""
        if self._reports_near:
            self._reports = RingReader(_ring_address(self._store.get(_REPORTS_RING)), 0)
        missing = set(self._far)
        end_s = time.monotonic() + timeout_s
        while missing:
            assert self._router is not None
            check()
            if self._router.poll(int(SLICE_S * 1e3)):
                missing.discard(self._router.recv_multipart()[0])
            elif time.monotonic() > end_s:
                late = ", ".join(sorted(rank.decode() for rank in missing))
                raise TimeoutError(f"ranks {late} did not open their end of the link within {timeout_s:.0f} s")

    def send(self, data: bytes, check: Check) -> None:
        """To all others. Waits while a rank of this node is far behind."""
        for rank in self._far:  # these take longer to arrive
            assert self._router is not None
            self._router.send_multipart((rank, data))
        if self._ring is not None:
            self._ring.send(data, check)

    def receive(self, check: Check) -> bytes:
        """The sampling rank's next report."""
        while True:
            data = None
            if self._reports is not None:
                data = self._reports.receive(SLICE_S)
            elif self._pull is not None and self._pull.poll(int(SLICE_S * 1e3)):
                data = self._pull.recv()
            if data is not None:
                return data
            check()

    def close(self) -> None:
        """Ranks of this node still read what was sent; others get it while they are connected."""
        if self._ring is not None:
            self._ring.close()
        _close(self._context, self._router, self._pull)


class FollowerLink:
    """Another rank's end. One thread receives, one may report."""

    def __init__(self, member: GangMember, store: Store) -> None:
        """Waits for rank 0 to say where it is. Raises OSError when rank 0's process is gone meanwhile."""
        place = member.place
        self._plans: RingReader | None = None
        self._dealer = self._push = self._context = None
        self._report_ring: RingWriter | None = None
        samples = place.samples
        if member.is_beside_driver:
            index = _near_followers(member).index(place.rank)
            self._plans = RingReader(_ring_address(store.get(_PLANS_RING)), index)
            if samples:
                self._report_ring = RingWriter(1)
                store.set(_REPORTS_RING, msgspec.json.encode(self._report_ring.address).decode())
            return
        self._context = zmq.Context()
        self._dealer = _connect(self._context, zmq.DEALER, member, "plans", store.get(_PLANS_URL).decode())
        self._dealer.send(b"")
        if samples:
            self._push = _connect(self._context, zmq.PUSH, member, "reports", store.get(_REPORTS_URL).decode())

    def look_for_plans(self, member: GangMember) -> bool:
        """Look for rank 0's next message before sleeping, where every rank of this node has two cores. Whether it does.

        For ranks whose steps run on a GPU; those that compute on the cores leave them to the computing.
        """
        has_cores = len(os.sched_getaffinity(0)) >= 2 * len(member.ranks_on_node)
        if self._plans is not None and has_cores:
            self._plans.look_s = LOOK_S
        return self._plans is not None and has_cores

    def receive(self, timeout_s: float) -> bytes | None:
        """Rank 0's next message; None when none comes in time."""
        if self._plans is not None:
            return self._plans.receive(timeout_s)
        assert self._dealer is not None
        return self._dealer.recv() if self._dealer.poll(int(timeout_s * 1e3)) else None

    def report(self, data: bytes, check: Check) -> None:
        """To rank 0. Only the sampling rank reports."""
        if self._report_ring is not None:
            self._report_ring.send(data, check)
        else:
            assert self._push is not None, "only the sampling rank reports"
            self._push.send(data)

    def close(self) -> None:
        """Give the connections up."""
        if self._report_ring is not None:
            self._report_ring.close()
        _close(self._context, self._dealer, self._push)


def _near_followers(member: GangMember) -> list[int]:
    """The ranks that share rank 0's node."""
    return [rank for rank in range(1, member.place.world_size) if member.hosts[rank] == member.hosts[0]]


def _ring_address(data: bytes) -> RingAddress:
    return msgspec.json.decode(data, type=RingAddress)


def _curve_keys(member: GangMember, role: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key of a role, Z85-encoded, the same on every rank."""
    secret = _z85(member.key(f"link {role}"))
    return zmq.curve_public(secret), secret


def _z85(raw: bytes) -> bytes:
    """ZeroMQ's printable form of 32 bytes."""
    return z85.encode(raw)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def _listen(context: zmq.Context[zmq.Socket[bytes]], kind: int, member: GangMember, purpose: str) -> zmq.Socket[bytes]:
    socket = _socket(context, kind)
    _, secret = _curve_keys(member, purpose)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    host = f"[{member.hosts[0]}]" if ":" in member.hosts[0] else member.hosts[0]
    socket.bind(f"tcp://{host}:*")
    return socket


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, member: GangMember, purpose: str, url: str
) -> zmq.Socket[bytes]:
    socket = _socket(context, kind)
    server_public, _ = _curve_keys(member, purpose)
    public, secret = _curve_keys(member, f"{purpose} {member.place.rank}")
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.ROUTING_ID, str(member.place.rank).encode())
    socket.connect(url)
    return socket


def _url_of(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def _close(context: zmq.Context[zmq.Socket[bytes]] | None, *sockets: zmq.Socket[bytes] | None) -> None:
    for socket in sockets:
        if socket is not None:
            socket.close()
    if context is not None:
        context.term()
