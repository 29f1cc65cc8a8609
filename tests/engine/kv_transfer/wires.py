"""Engines without a model whose transfers go over a wire of this process: a test says when, and if, something arrives.

The endpoints keep the contract of the real one, and write down which blocks they may read or write at any moment.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from manta.engine.core import EngineCore
from manta.engine.kv_transfer.handovers import HandOvers, HandOverTimes
from manta.engine.kv_transfer.leases import LeaseTimes
from manta.engine.kv_transfer.messages import (
    Accepted,
    Failed,
    KvAccept,
    KvEvent,
    KvOpen,
    KvOrder,
    KvPeer,
    KvRange,
    KvRevoke,
    KvShard,
    KvStop,
    Received,
    Revoked,
    Sent,
    Stopped,
    ToDecode,
    ToPrefill,
)
from manta.engine.kv_transfer.sends import SendTimes
from manta.engine.sim import SimRunner
from manta.engine.stats import EngineInfo
from tests.engine.engines import make_scheduler

TIMES = HandOverTimes(LeaseTimes(expected_s=30.0, early_s=1.0, lease_s=6.0, wait_s=2.0), SendTimes(3.0, 6.0, 1.0))


class Wire:
    """All messages and frames between the engines of a test, and the time that it is."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.now_s = 0.0
        self.loses = 0.0
        """Share of what is lost: of messages for good, of frames with a Failed at the sender."""
        self.num_lost = 0
        self.engines: dict[str, WiredEngine] = {}
        self._links: dict[tuple[str, str], deque[Callable[[], None]]] = {}

    def post(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """What goes one way between two ends stays in order."""
        self._links.setdefault((source, target), deque()).append(arrive)

    def is_lost(self) -> bool:
        lost = self.rng.random() < self.loses
        self.num_lost += lost
        return lost

    def deliver(self, most: int | None = None) -> None:
        """What is on its way, and what comes of that; with `most`, only so much of it, of links by chance."""
        while most is None or most > 0:
            links = [key for key, queue in self._links.items() if queue]
            if not links:
                return
            self._links[self.rng.choice(links)].popleft()()
            most = None if most is None else most - 1


class WiredControl:
    """KvControl over the wire."""

    def __init__(self, wire: Wire, engine: WiredEngine) -> None:
        self._wire, self._engine = wire, engine
        self._asked: deque[tuple[bytes, ToDecode]] = deque()
        self._answers: deque[tuple[KvPeer, ToPrefill]] = deque()
        self.pollables: list[Any] = []

    def ask(self, peer: KvPeer, message: ToDecode) -> None:
        target, source = self._wire.engines[peer.control_url].control, self._engine.name
        if not self._wire.is_lost():
            self._wire.post(source, peer.control_url, lambda: target._asked.append((source.encode(), message)))

    def answer(self, peer: bytes, message: ToPrefill) -> None:
        target, own = self._wire.engines[peer.decode()].control, self._engine.peer
        if not self._wire.is_lost():
            self._wire.post(self._engine.name, peer.decode(), lambda: target._answers.append((own, message)))

    def asked(self) -> Iterator[tuple[bytes, ToDecode]]:
        while self._asked:
            yield self._asked.popleft()

    def answers(self) -> Iterator[tuple[KvPeer, ToPrefill]]:
        while self._answers:
            yield self._answers.popleft()

    def close_unused(self, now_s: float) -> None: ...
    def close(self) -> None: ...


class WiredRank:
    """One rank's endpoint. Rank r sends to rank r of the target, or to its last; the first also to those beyond."""

    def __init__(self, wire: Wire, engine: WiredEngine, rank: int) -> None:
        self._wire, self._engine, self._rank = wire, engine, rank
        self.name = f"{engine.name}/{rank}"
        self.reads: dict[int, KvOpen] = {}
        self.writes: dict[int, KvAccept] = {}
        self._ended: set[int] = set()

    def obey(self, order: KvOrder) -> None:
        """Takes its time, as the real one."""
        self._wire.post(self.name, self.name, lambda: self._obey(order))

    def _tell(self, event: KvEvent) -> None:
        self._wire.post(self.name, self._engine.name, lambda: self._engine.told.append((self._rank, event)))

    def _obey(self, order: KvOrder) -> None:
        if isinstance(order, KvOpen):
            if order.generation not in self._ended:
                self.reads[order.generation] = order
        elif isinstance(order, KvRange):
            self._send(order)
        elif isinstance(order, KvStop):
            self._ended.add(order.generation)
            self.reads.pop(order.generation, None)
            self._tell(Stopped(order.generation))
        elif isinstance(order, KvAccept):
            assert order.generation not in self._ended
            self.writes[order.generation] = order
            self._tell(Accepted(order.generation))
        else:
            assert isinstance(order, KvRevoke)
            self._ended.add(order.generation)
            self.writes.pop(order.generation, None)
            self._tell(Revoked(order.generation))

    def _send(self, order: KvRange) -> None:
        opened = self.reads.get(order.generation)
        if opened is None:
            return
        targets = self._wire.engines[opened.to.control_url].ranks
        mine = targets[self._rank : self._rank + 1] if self._rank else [targets[0], *targets[self._engine.num_ranks :]]
        for target in mine:
            if self._wire.is_lost():
                self._tell(Failed(order.generation, "lost"))
            else:
                self._wire.post(self.name, target.name, lambda target=target: target._arrive(order))
        if order.is_last:
            del self.reads[order.generation]
            self._tell(Sent(order.generation))

    def _arrive(self, order: KvRange) -> None:
        if order.generation in self.writes and order.is_last:
            accepted = self.writes.pop(order.generation)
            self._tell(Received(order.generation, 8 * (accepted.num_tokens - accepted.first_token)))


class WiredEngine:
    """A core of `num_ranks` ranks with the real scheduler, leases and sends."""

    def __init__(self, wire: Wire, name: str, *, num_ranks: int = 1, **sizes: Any) -> None:
        self.name, self.num_ranks = name, num_ranks
        self.told: list[tuple[int, KvEvent]] = []
        self.pollables: list[Any] = []
        wire.engines[name] = self
        self.ranks = [WiredRank(wire, self, rank) for rank in range(num_ranks)]
        self.control = WiredControl(wire, self)
        self.peer = KvPeer(
            control_url=name,
            rank_urls=[rank.name for rank in self.ranks],
            shards=[KvShard((0, 1), (6 * rank // num_ranks, 6 * (rank + 1) // num_ranks)) for rank in range(num_ranks)],
            model="m",
            block_size=4,
            head_dim=8,
            dtype="float32",
            key=b"k" * 32,
        )
        scheduler = make_scheduler(**sizes)
        runner = SimRunner(lambda step: 0.0, vocab_size=1000, clock=lambda: 0.0)
        runner.obey = self._obey  # type: ignore[method-assign]
        self.handovers = HandOvers(
            scheduler,
            self,
            self.control,  # type: ignore[arg-type]
            self.peer,
            runner.obey,
            first_generation=wire.rng.randrange(2**62),
            times=TIMES,
            clock=lambda: wire.now_s,
        )
        info = EngineInfo(
            model_name="sim",
            max_model_len=scheduler.limits.max_model_len,
            vocab_size=1000,
            block_size=4,
            num_blocks=scheduler.cache.pool.num_blocks,
            max_num_seqs=scheduler.limits.max_num_seqs,
            max_num_waiting=scheduler.limits.max_num_waiting,
            device="sim",
            dtype="float32",
            kv=self.peer,
        )
        self.core = EngineCore(scheduler, runner, info, self.handovers)

    def events(self) -> list[tuple[int, KvEvent]]:
        told, self.told = self.told, []
        return told

    def close(self) -> None: ...

    def _obey(self, order: KvOrder) -> None:
        for rank in self.ranks:
            rank.obey(order)

    def check(self) -> None:
        """The core's own books, and that no block is given away while a rank may read or write it."""
        self.core.check()
        set_aside, busy = self.core.scheduler.set_aside, Counter[int]()
        for rank in self.ranks:
            read = {block_id for opened in rank.reads.values() for block_id in opened.source_block_ids}
            written = Counter(block_id for accepted in rank.writes.values() for block_id in _written(accepted))
            assert all(count == 1 for count in written.values()), "two transfers write into one block"
            assert all(set_aside.references(block_id) for block_id in read), "a block that is read was given away"
            busy.update(written)
        pool = self.core.scheduler.cache.pool
        for block_id in busy:
            assert set_aside.references(block_id) == 1, "a block that is written was given away"
            assert pool.num_references(block_id) == 1, "a block that is written is used"


def _written(accepted: KvAccept) -> list[int]:
    """The blocks that the tokens which are to come are in."""
    return accepted.block_ids[accepted.first_token // 4 : -(-accepted.num_tokens // 4)]
