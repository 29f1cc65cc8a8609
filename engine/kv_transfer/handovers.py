"""An engine core's part in hand-overs, both ways: joins scheduler, leases, sends, the ranks and the other cores.

Everything happens in the core's thread and nothing waits. Knows no tensors and no edge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from manta.engine.plan import StepPlan
from manta.engine.request import EngineRequest, Refusal
from manta.engine.scheduler import Scheduler, Sequence
from manta.engine.set_aside import Reserved

from .control import KvControl
from .leases import Leases, LeaseTimes
from .messages import (
    Begin,
    Granted,
    KvEvent,
    KvOrder,
    KvPeer,
    NotGranted,
    Received,
    Sending,
    SendKv,
    TakeKv,
    ToDecode,
    ToPrefill,
)
from .sends import Sends, SendTimes

EXPIRE_S = 0.05
"""How often it is looked what is overdue."""


class KvRanks(Protocol):
    """The endpoints of all of the engine's ranks, as the core's thread sees them."""

    @property
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Sockets and file descriptors that are readable when there are events."""
        ...

    def events(self) -> list[tuple[int, KvEvent]]:
        """What the ranks have said since the last call, each with its number."""
        ...

    def close(self) -> None:
        """No event is asked for any more."""
        ...


@dataclass(frozen=True)
class HandOverTimes:
    """Of both directions."""

    lease: LeaseTimes = field(default_factory=LeaseTimes)
    send: SendTimes = field(default_factory=SendTimes)


class HandOvers:
    """One core's. Implements what Leases and Sends ask for."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: KvRanks,
        control: KvControl,
        own: KvPeer,
        order: Callable[[KvOrder], None],
        *,
        first_generation: int,
        times: HandOverTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`order` gives an order to every rank behind the steps that were launched; `own` is what others know of us."""
        times = times or HandOverTimes()
        self.own = own
        self.num_received = 0
        self.num_recomputed = 0
        self.num_received_bytes = 0
        self._scheduler = scheduler
        self._ranks = ranks
        self._control = control
        self._order = order
        self._clock = clock
        num_ranks = len(own.shards)
        self._leases = Leases(self, num_ranks=num_ranks, first_generation=first_generation, times=times.lease)
        self._sends = Sends(self, num_ranks=num_ranks, times=times.send)
        self._expire_at_s = clock()
        self._has_news = False
        scheduler.on_lost = self._lost

    @property
    def num_leases(self) -> int:
        """Sets of blocks that are lent to other engines or held until they have them."""
        return self._leases.num_leases + self._sends.num_held

    def counts(self) -> dict[str, int]:
        """What Snapshot says about transfers, by its names."""
        return {
            "num_kv_leases": self.num_leases,
            "num_kv_sent": self._sends.num_sent,
            "num_kv_received": self.num_received,
            "num_kv_recomputed": self.num_recomputed,
            "num_kv_bytes": self.num_received_bytes,
        }

    @property
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """What wakes a thread that waits for news."""
        return [*self._control.pollables, *self._ranks.pollables]

    def expect(self, ticket: str, token_ids: list[int], salt: str | None) -> None:
        """Another engine is about to compute these tokens for this one."""
        self._leases.expect(ticket, token_ids, salt, self._clock())

    def release(self, ticket: str) -> None:
        """Nobody will take them here."""
        self._leases.release(ticket)
        self._has_news = True

    def add(self, request: EngineRequest) -> Refusal | None:
        """Queue a request; one that takes KV runs when that is there, or when it is clear that it will not be."""
        handoff = request.handoff
        if not isinstance(handoff, TakeKv):
            return self._scheduler.add(request)
        refusal = self._scheduler.add(request, is_ready=False)
        if refusal is not None:
            self._leases.release(handoff.ticket)
            return refusal
        token_ids = request.prompt_token_ids + request.output_token_ids
        self._leases.take(handoff.ticket, request.request_id, token_ids, self._clock())
        return None

    def planned(self, plan: StepPlan) -> None:
        """A step is about to be launched: add to it what its ranks send when it is done."""
        sequences, rows = self._scheduler.sequences_of(plan), plan.rows
        new_slots = {new.slot for new in plan.new}
        for index in range(len(rows) - 1, -1, -1):
            row = rows[index]
            if row.is_decode:  # they come first, and send nothing
                return
            sequence = sequences[index]
            handoff = sequence.request.handoff
            if not isinstance(handoff, SendKv):
                continue
            now_s = self._clock()
            if row.slot in new_slots:
                self._begin(sequence, handoff, row.start, now_s)
            to_send = self._sends.computed(sequence.arrival, row.start + row.num_tokens, now_s)
            if to_send is not None:
                plan.sends.append(to_send)

    def poll(self) -> bool:
        """Bring in what others said, and end what is overdue. Returns whether requests may go on because of it."""
        now_s = self._clock()
        for peer, asked in self._control.asked():
            self._asked(peer, asked, now_s)
        for peer, answer in self._control.answers():
            self._answered(peer, answer, now_s)
        for rank, event in self._ranks.events():
            if isinstance(event, Received):
                self.num_received_bytes += event.num_bytes
            self._leases.happened(rank, event, now_s)
            self._sends.happened(rank, event)
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRE_S
            self._leases.expire(now_s)
            self._sends.expire(now_s)
            self._control.close_unused(now_s)
        has_news, self._has_news = self._has_news, False
        return has_news

    def check(self) -> None:
        """Assert that all blocks that are set aside are somebody's (for tests: after any step)."""
        self._leases.check()
        self._sends.check()
        num_reserved = len(self._leases.reserved) + len(self._scheduler.provided)
        assert num_reserved == self._scheduler.set_aside.num_reserved
        held = [block_id for block_ids in self._sends.held for block_id in block_ids]
        held += [block_id for reserved in self._leases.reserved for block_id in reserved.block_ids]
        held += [block_id for reserved in self._scheduler.provided for block_id in reserved.block_ids]
        for block_id in range(self._scheduler.cache.pool.num_blocks):
            assert held.count(block_id) == self._scheduler.set_aside.references(block_id)

    def close(self) -> None:
        """Give the connections up. The ranks' endpoints are closed by their runners."""
        self._ranks.close()
        self._control.close()

    # What Leases and Sends ask for.

    def reserve(self, token_ids: list[int], salt: str | None) -> Reserved | None:
        return self._scheduler.reserve(token_ids, salt=salt)

    def give_back(self, reserved: Reserved) -> None:
        self._scheduler.set_aside.give_back(reserved)
        self._has_news = True

    def hold(self, block_ids: list[int]) -> None:
        self._scheduler.set_aside.hold(block_ids)

    def let_go(self, block_ids: list[int]) -> None:
        self._scheduler.set_aside.let_go(block_ids)
        self._has_news = True

    def order(self, order: KvOrder) -> None:
        self._order(order)

    def ask(self, peer: KvPeer, message: ToDecode) -> None:
        self._control.ask(peer, message)

    def answer(self, peer: bytes, message: ToPrefill) -> None:
        self._control.answer(peer, message)

    def settle(self, request_id: str, reserved: Reserved | None) -> None:
        if self._scheduler.make_ready(request_id, reserved):
            self.num_received += 1
        else:
            self.num_recomputed += 1
        self._has_news = True

    def _begin(self, sequence: Sequence, handoff: SendKv, num_cached: int, now_s: float) -> None:
        if self.own.mismatch(handoff.to) is not None:
            return  # refused where engines are paired; here nothing is sent
        self._sends.begin(
            sequence.arrival,
            handoff,
            list(sequence.block_ids),
            num_tokens=len(sequence.token_ids),
            num_cached=num_cached,
            now_s=now_s,
        )

    def _lost(self, sequence: Sequence) -> None:
        """A sequence is preempted or cancelled."""
        handoff = sequence.request.handoff
        if isinstance(handoff, SendKv):
            self._sends.abandoned(sequence.arrival, "the request ended or lost its blocks")
            sequence.request.handoff = None  # should it run again, it is for itself
        elif isinstance(handoff, TakeKv):
            self._leases.cancelled(sequence.request.request_id)

    def _asked(self, peer: bytes, message: ToDecode, now_s: float) -> None:
        if isinstance(message, Begin):
            self._leases.begin(peer, message, now_s)
        elif isinstance(message, Sending):
            self._leases.heard(message.generation, now_s)
        else:
            self._leases.given_up(peer, message.ticket, message.reason)

    def _answered(self, peer: KvPeer, message: ToPrefill, now_s: float) -> None:
        if isinstance(message, Granted | NotGranted):
            self._sends.answered(message, now_s, peer=peer)
        else:
            self._sends.withdrawn(message)
