"""What this engine computes for others: which blocks must stay, what of them was sent, when they are free. Pure.

Knows numbers of sequences, tickets, generations, ranks and times; no sockets, no tensors, no scheduler: what is to be
done is told to a SendDesk. A sequence's blocks are held from its first step until every rank has read what it sends, or
has said that it reads no more. What is computed before the grant is sent when it comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .messages import (
    Begin,
    Failed,
    GivenUp,
    Granted,
    KvEvent,
    KvOpen,
    KvOrder,
    KvPeer,
    KvRange,
    KvStop,
    NotGranted,
    Sending,
    SendKv,
    Sent,
    Stopped,
    ToDecode,
    Withdrawn,
)


@dataclass(frozen=True)
class SendTimes:
    """Seconds."""

    answer_s: float = 10.0
    """From Begin to its answer."""
    send_s: float = 30.0
    """From the request's last tokens to the end of their transfer."""
    renew_s: float = 1.0
    """Between two signs to the other side while a transfer is not over."""


class SendDesk(Protocol):
    """What Sends asks for."""

    def hold(self, block_ids: list[int]) -> None:
        """Keep blocks that a running request holds from being freed with it."""
        ...

    def let_go(self, block_ids: list[int]) -> None:
        """Undo `hold`."""
        ...

    def order(self, order: KvOrder) -> None:
        """To every rank of this engine, behind the steps that were launched."""
        ...

    def ask(self, peer: KvPeer, message: ToDecode) -> None:
        """To the core that will decode."""
        ...


@dataclass(eq=False)
class _Sending:
    sequence_id: int
    handoff: SendKv
    block_ids: list[int]
    num_tokens: int
    num_computed: int
    """By the steps that are launched."""
    until_s: float
    generation: int | None = None
    num_ordered: int = 0
    """Tokens that need no further order: the other side has them, or the ranks were told to send them."""
    renewed_at_s: float = 0.0
    is_stopping: bool = False
    ranks: set[int] = field(default_factory=set)
    """Those that have sent all; once it is stopping, those that have stopped."""

    @property
    def is_ordered(self) -> bool:
        return self.num_ordered >= self.num_tokens


class Sends:
    """One engine's. One thread owns it; `now_s` never goes back."""

    def __init__(self, desk: SendDesk, *, num_ranks: int, times: SendTimes) -> None:
        self.times = times
        self.num_sent = 0
        """Requests whose tokens the other side has."""
        self.num_given_up = 0
        """Requests that were begun and not sent."""
        self._desk = desk
        self._all_ranks = set(range(num_ranks))
        self._by_sequence: dict[int, _Sending] = {}
        """Those that may still be computed or ordered."""
        self._by_ticket: dict[str, _Sending] = {}
        """Those without an answer."""
        self._by_generation: dict[int, _Sending] = {}

    @property
    def num_held(self) -> int:
        """Sets of blocks that are held."""
        return len(self._by_ticket) + len(self._by_generation)

    @property
    def held(self) -> list[list[int]]:
        """Their blocks (for tests)."""
        return [one.block_ids for one in (*self._by_ticket.values(), *self._by_generation.values())]

    def begin(
        self,
        sequence_id: int,
        handoff: SendKv,
        block_ids: list[int],
        *,
        num_tokens: int,
        num_cached: int,
        now_s: float,
    ) -> None:
        """A sequence gets its first step. `block_ids` are for all its tokens; `num_cached` of them need no step."""
        if handoff.ticket in self._by_ticket:
            return  # the same ticket twice is nobody's: the second request is computed as any other
        self._desk.hold(block_ids)
        sending = _Sending(sequence_id, handoff, block_ids, num_tokens, num_cached, until_s=now_s + self.times.answer_s)
        self._by_sequence[sequence_id] = self._by_ticket[handoff.ticket] = sending
        self._desk.ask(handoff.to, Begin(handoff.ticket, num_tokens))

    def computed(self, sequence_id: int, end_token: int, now_s: float) -> KvRange | None:
        """The next step computes the sequence's tokens up to `end_token`. Returns what to send after it."""
        sending = self._by_sequence.get(sequence_id)
        if sending is None:
            return None
        sending.num_computed = end_token
        if sending.generation is None:
            return None
        return self._next_range(sending, now_s)

    def answered(self, message: Granted | NotGranted, now_s: float, *, peer: KvPeer | None = None) -> None:
        """The other core's answer to Begin. `peer`: who answered, to decline what comes too late."""
        sending = self._by_ticket.pop(message.ticket, None)
        if sending is None:
            if isinstance(message, Granted) and peer is not None:
                self._desk.ask(peer, GivenUp(message.ticket, "the grant came too late"))
            return
        if isinstance(message, NotGranted):
            self.num_given_up += 1
            self._end(sending)
            return
        sending.generation, sending.num_ordered = message.generation, message.num_cached_tokens
        if sending.is_ordered:  # the other side has everything
            self.num_sent += 1
            self._end(sending)
            return
        sending.renewed_at_s, sending.until_s = now_s, now_s + self.times.send_s
        self._by_generation[message.generation] = sending
        targets = message.block_ids[: len(sending.block_ids)]
        sources = sending.block_ids[: len(targets)]
        self._desk.order(KvOpen(message.generation, sending.handoff.to, sources, targets))
        ready = self._next_range(sending, now_s)
        if ready is not None:
            self._desk.order(ready)

    def withdrawn(self, message: Withdrawn) -> None:
        """The other core wants no more of it."""
        sending = self._by_generation.get(message.generation)
        if sending is not None and not sending.is_stopping:
            self._stop(sending)

    def abandoned(self, sequence_id: int, reason: str) -> None:
        """A sequence ends, or loses its blocks, before all its tokens were computed here."""
        sending = self._by_sequence.get(sequence_id)
        if sending is not None:
            self._give_up(sending, reason)

    def happened(self, rank: int, event: KvEvent) -> None:
        """What a rank of this engine says about a generation; what is not of a transfer is ignored."""
        sending = self._by_generation.get(event.generation)
        if sending is None:
            return
        if isinstance(event, Failed) and not sending.is_stopping:
            self._give_up(sending, event.reason)
        elif isinstance(event, Stopped if sending.is_stopping else Sent):
            sending.ranks.add(rank)
            if sending.ranks == self._all_ranks:
                self.num_sent += not sending.is_stopping
                self._end(sending)

    def expire(self, now_s: float) -> None:
        """End what is overdue, and tell the other side of what goes on. Call it now and then."""
        for sending in [*self._by_ticket.values(), *self._by_generation.values()]:
            if sending.is_stopping:
                continue
            is_answered = sending.generation is not None
            if now_s >= sending.until_s and (sending.is_ordered or not is_answered):
                self._give_up(sending, "the transfer takes too long" if is_answered else "no answer came")
            elif is_answered and now_s >= sending.renewed_at_s + self.times.renew_s:
                assert sending.generation is not None
                sending.renewed_at_s = now_s
                self._desk.ask(sending.handoff.to, Sending(sending.generation))

    def check(self) -> None:
        """Assert that the books agree (for tests)."""
        for generation, sending in self._by_generation.items():
            assert sending.generation == generation
            assert sending.ranks < self._all_ranks
        for ticket, sending in self._by_ticket.items():
            assert sending.handoff.ticket == ticket
            assert sending.generation is None
            assert self._by_sequence[sending.sequence_id] is sending
        for sequence_id, sending in self._by_sequence.items():
            assert sending.sequence_id == sequence_id
            assert not sending.is_stopping
            assert sending.handoff.ticket in self._by_ticket or sending.generation in self._by_generation
            assert not sending.is_ordered

    def _next_range(self, sending: _Sending, now_s: float) -> KvRange | None:
        first, end = sending.num_ordered, sending.num_computed
        if sending.is_stopping or end <= first:
            return None
        assert sending.generation is not None
        sending.num_ordered = end
        sending.until_s = now_s + self.times.send_s
        if sending.is_ordered:
            self._forget_sequence(sending)
        return KvRange(sending.generation, first, end, is_last=sending.is_ordered)

    def _give_up(self, sending: _Sending, reason: str) -> None:
        self.num_given_up += 1
        self._desk.ask(sending.handoff.to, GivenUp(sending.handoff.ticket, reason))
        if sending.generation is None:
            del self._by_ticket[sending.handoff.ticket]
            self._end(sending)
        else:
            self._stop(sending)

    def _stop(self, sending: _Sending) -> None:
        assert sending.generation is not None
        sending.is_stopping, sending.ranks = True, set()
        self._forget_sequence(sending)
        self._desk.order(KvStop(sending.generation))

    def _end(self, sending: _Sending) -> None:
        if sending.generation is not None:
            self._by_generation.pop(sending.generation, None)
        self._forget_sequence(sending)
        self._desk.let_go(sending.block_ids)

    def _forget_sequence(self, sending: _Sending) -> None:
        if self._by_sequence.get(sending.sequence_id) is sending:
            del self._by_sequence[sending.sequence_id]
