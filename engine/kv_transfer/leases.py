"""Blocks that are lent to other engines: who may write into them, until when, and when they are free again. Pure.

Knows tickets, generations, ranks and times; no sockets, no tensors, no scheduler: what is to be done is told to a
LeaseDesk. A ticket is expected, then begun (blocks are reserved and every rank accepts), granted, complete when every
rank has all bytes, and taken by its request. Wherever it ends before that, it is revoked first: blocks that a rank may
still write into are nobody's until all ranks have said that they will not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from manta.engine.set_aside import Reserved

from .messages import (
    Accepted,
    Begin,
    Failed,
    Granted,
    KvAccept,
    KvEvent,
    KvOrder,
    KvRevoke,
    NotGranted,
    Received,
    Revoked,
    ToPrefill,
    Withdrawn,
)

MOST_EXPECTED = 65536
"""Tickets and early begins that are remembered; an edge that never releases cannot make them more."""


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds."""

    expected_s: float = 600.0
    """From Expect to Begin: the queue before the prefill. Nothing is reserved meanwhile."""
    early_s: float = 2.0
    """How long a Begin may come before its Expect, which takes another way."""
    lease_s: float = 30.0
    """Since the last sign of the other side."""
    wait_s: float = 5.0
    """How long a request that has its first token waits for the rest of its KV before it is computed here."""


class LeaseDesk(Protocol):
    """What Leases asks for."""

    def reserve(self, token_ids: list[int], salt: str | None) -> Reserved | None:
        """Blocks, or None when there is no room."""
        ...

    def give_back(self, reserved: Reserved) -> None:
        """The blocks are free."""
        ...

    def order(self, order: KvOrder) -> None:
        """To every rank of this engine."""
        ...

    def answer(self, peer: bytes, message: ToPrefill) -> None:
        """To the core that began."""
        ...

    def settle(self, request_id: str, reserved: Reserved | None) -> None:
        """A request that waited may run: with its tokens' KV, or None to compute it."""
        ...


class _State(enum.Enum):
    EXPECTED = enum.auto()
    BEGUN = enum.auto()
    """Reserved; not every rank accepts yet."""
    GRANTED = enum.auto()
    COMPLETE = enum.auto()


@dataclass(eq=False)
class _Lease:
    ticket: str
    token_ids: list[int]
    salt: str | None
    until_s: float
    state: _State = _State.EXPECTED
    peer: bytes = b""
    generation: int = 0
    reserved: Reserved | None = None
    ranks: set[int] = field(default_factory=set)
    """Those that have answered the state's question: accepted, then received."""
    request_id: str | None = None
    """The request that waits for it."""
    taken_by_s: float | None = None
    """When that is given up."""


@dataclass(eq=False)
class _Revoked:
    reserved: Reserved
    ranks: set[int] = field(default_factory=set)


class Leases:
    """One engine's. One thread owns it; `now_s` never goes back."""

    def __init__(self, desk: LeaseDesk, *, num_ranks: int, first_generation: int, times: LeaseTimes) -> None:
        """`first_generation`: random, so that generations are unique over engines and their restarts."""
        self.times = times
        self.num_expired = 0
        """Leases that ended because nothing was heard of them."""
        self._desk = desk
        self._all_ranks = set(range(num_ranks))
        self._next_generation = first_generation
        self._leases: dict[str, _Lease] = {}
        self._granted: dict[int, _Lease] = {}
        """By generation, until all ranks have received."""
        self._revoked: dict[int, _Revoked] = {}
        self._early: dict[str, tuple[bytes, Begin, float]] = {}
        self._waiting: dict[str, _Lease] = {}
        """By the id of the request that waits."""
        self._num_reserved = 0

    @property
    def num_leases(self) -> int:
        """Sets of blocks that are reserved: begun, granted, complete but not taken, or not yet let go by all ranks."""
        return self._num_reserved

    @property
    def is_idle(self) -> bool:
        """Whether nothing is remembered at all."""
        return not (self._leases or self._revoked or self._early)

    def expect(self, ticket: str, token_ids: list[int], salt: str | None, now_s: float) -> None:
        """Another engine is about to compute these tokens. A ticket that is known already stays as it is."""
        if ticket in self._leases:
            return
        while len(self._leases) >= MOST_EXPECTED:
            self._drop(next(iter(self._leases.values())), "too many tickets are expected")
        self._leases[ticket] = _Lease(ticket, token_ids, salt, now_s + self.times.expected_s)
        early = self._early.pop(ticket, None)
        if early is not None:
            self.begin(early[0], early[1], now_s)

    def begin(self, peer: bytes, begin: Begin, now_s: float) -> None:
        """A core computes what is expected, or will be in a moment. It is answered, at once or later."""
        lease = self._leases.get(begin.ticket)
        if lease is None:
            if begin.ticket not in self._early and len(self._early) < MOST_EXPECTED:
                self._early[begin.ticket] = (peer, begin, now_s + self.times.early_s)
            else:
                self._refuse(peer, begin.ticket, "it was begun already")
            return
        if lease.state is not _State.EXPECTED:
            self._refuse(peer, begin.ticket, "it was begun already")
            return
        if begin.num_tokens != len(lease.token_ids):
            self._refuse(peer, begin.ticket, f"{len(lease.token_ids)} tokens are expected, not {begin.num_tokens}")
            self._forget(lease)
            return
        reserved = self._desk.reserve(lease.token_ids, lease.salt)
        if reserved is None:
            self._refuse(peer, begin.ticket, "there is no room")
            self._forget(lease)
            return
        self._num_reserved += 1
        lease.peer, lease.reserved, lease.until_s = peer, reserved, now_s + self.times.lease_s
        lease.generation = self._next_generation
        self._next_generation += 1
        if reserved.num_cached_tokens >= begin.num_tokens:  # nothing has to come
            self._grant(lease)
            self._complete(lease)
            return
        lease.state = _State.BEGUN
        self._granted[lease.generation] = lease
        self._desk.order(KvAccept(lease.generation, reserved.block_ids, reserved.num_cached_tokens, begin.num_tokens))

    def heard(self, generation: int, now_s: float) -> None:
        """The other side goes on with it."""
        lease = self._granted.get(generation)
        if lease is not None:
            lease.until_s = now_s + self.times.lease_s

    def given_up(self, peer: bytes, ticket: str, reason: str) -> None:
        """The other side will not complete it."""
        early = self._early.get(ticket)
        if early is not None and early[0] == peer:
            del self._early[ticket]
        lease = self._leases.get(ticket)
        if lease is not None and lease.peer == peer and lease.state in (_State.BEGUN, _State.GRANTED):
            self._drop(lease, reason)

    def happened(self, rank: int, event: KvEvent, now_s: float) -> None:
        """What a rank of this engine says about a generation; what is not of a lease is ignored."""
        if isinstance(event, Revoked):
            self._let_go(rank, event.generation)
            return
        lease = self._granted.get(event.generation)
        if lease is None:
            return
        if isinstance(event, Failed):
            self._drop(lease, event.reason)
        elif isinstance(event, Accepted) and lease.state is _State.BEGUN:
            lease.ranks.add(rank)
            if lease.ranks == self._all_ranks:
                lease.until_s = now_s + self.times.lease_s
                self._grant(lease)
        elif isinstance(event, Received) and lease.state is _State.GRANTED:
            lease.ranks.add(rank)
            lease.until_s = now_s + self.times.lease_s
            if lease.ranks == self._all_ranks:
                self._complete(lease)

    def take(self, ticket: str, request_id: str, token_ids: Sequence[int], now_s: float) -> None:
        """A request whose tokens begin with those that were expected: it is settled now, or as soon as all is there.

        One whose ticket is not known, or was for other tokens, is settled to be computed.
        """
        lease = self._leases.get(ticket)
        if lease is None or lease.request_id is not None:
            self._desk.settle(request_id, None)
        elif len(lease.token_ids) >= len(token_ids) or list(token_ids[: len(lease.token_ids)]) != lease.token_ids:
            self._desk.settle(request_id, None)
            self._drop(lease, "the request has other tokens")
        elif lease.state is _State.COMPLETE:
            del self._leases[ticket]
            self._hand_out(request_id, lease)
        else:
            lease.request_id, lease.taken_by_s = request_id, now_s + self.times.wait_s
            self._waiting[request_id] = lease

    def cancelled(self, request_id: str) -> None:
        """A request that may wait will not run."""
        lease = self._waiting.pop(request_id, None)
        if lease is not None:
            lease.request_id = None
            self._drop(lease, "the request was cancelled")

    def release(self, ticket: str) -> None:
        """Nobody will take it. Unknown tickets are ignored: it may be over."""
        early = self._early.pop(ticket, None)
        if early is not None:
            self._refuse(early[0], ticket, "it was released")
        lease = self._leases.get(ticket)
        if lease is not None:
            self._drop(lease, "it was released")

    def expire(self, now_s: float) -> None:
        """End what is overdue. Call it now and then."""
        for ticket, (peer, _, until_s) in list(self._early.items()):
            if now_s >= until_s:
                del self._early[ticket]
                self._refuse(peer, ticket, "it is not expected")
        for lease in list(self._leases.values()):
            if now_s >= lease.until_s:
                self.num_expired += 1
                self._drop(lease, "its lease is over")
            elif lease.taken_by_s is not None and now_s >= lease.taken_by_s:
                self.num_expired += 1
                self._drop(lease, "its request waited too long")

    def check(self) -> None:
        """Assert that the books agree (for tests)."""
        for generation, lease in self._granted.items():
            assert self._leases[lease.ticket] is lease
            assert lease.generation == generation
            assert lease.state in (_State.BEGUN, _State.GRANTED)
            assert lease.ranks < self._all_ranks
        for request_id, lease in self._waiting.items():
            assert lease.request_id == request_id
            assert self._leases[lease.ticket] is lease
            assert lease.state is not _State.COMPLETE
        for lease in self._leases.values():
            assert (lease.reserved is None) == (lease.state is _State.EXPECTED)
            assert (lease.request_id is None) == (lease.taken_by_s is None)
        assert not self._early.keys() & self._leases.keys()
        assert len(self.reserved) == self._num_reserved

    @property
    def reserved(self) -> list[Reserved]:
        """All blocks that are lent or not yet back (for tests)."""
        lent = [lease.reserved for lease in self._leases.values() if lease.reserved is not None]
        return lent + [revoked.reserved for revoked in self._revoked.values()]

    def _refuse(self, peer: bytes, ticket: str, reason: str) -> None:
        self._desk.answer(peer, NotGranted(ticket, reason))

    def _grant(self, lease: _Lease) -> None:
        assert lease.reserved is not None
        lease.state, lease.ranks = _State.GRANTED, set()
        granted = Granted(lease.ticket, lease.generation, lease.reserved.block_ids, lease.reserved.num_cached_tokens)
        self._desk.answer(lease.peer, granted)

    def _complete(self, lease: _Lease) -> None:
        lease.state = _State.COMPLETE
        self._granted.pop(lease.generation, None)
        if lease.request_id is not None:
            del self._leases[lease.ticket]
            del self._waiting[lease.request_id]
            self._hand_out(lease.request_id, lease)

    def _hand_out(self, request_id: str, lease: _Lease) -> None:
        assert lease.reserved is not None
        self._num_reserved -= 1
        self._desk.settle(request_id, lease.reserved)

    def _give_back(self, reserved: Reserved) -> None:
        self._num_reserved -= 1
        self._desk.give_back(reserved)

    def _drop(self, lease: _Lease, reason: str) -> None:
        """End a lease that will not be taken; its blocks come back at once only if no rank may write into them."""
        if lease.state is _State.COMPLETE:
            assert lease.reserved is not None
            self._give_back(lease.reserved)
        elif lease.reserved is not None:
            del self._granted[lease.generation]
            self._revoked[lease.generation] = _Revoked(lease.reserved)
            self._desk.order(KvRevoke(lease.generation))
            if lease.state is _State.GRANTED:
                self._desk.answer(lease.peer, Withdrawn(lease.generation, reason))
            else:
                self._refuse(lease.peer, lease.ticket, reason)
        self._forget(lease)

    def _forget(self, lease: _Lease) -> None:
        del self._leases[lease.ticket]
        if lease.request_id is not None:
            del self._waiting[lease.request_id]
            self._desk.settle(lease.request_id, None)

    def _let_go(self, rank: int, generation: int) -> None:
        revoked = self._revoked.get(generation)
        if revoked is None:
            return
        revoked.ranks.add(rank)
        if revoked.ranks == self._all_ranks:
            del self._revoked[generation]
            self._give_back(revoked.reserved)
