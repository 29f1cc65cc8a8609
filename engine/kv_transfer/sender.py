"""Sends ranges of generations to other engines' ranks, each block once. Knows links and readiness, no core, no lease.

Links take turns at their generations, so that one that is not ready, or whose target is slow, delays no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from manta.engine.errors import ConfigError

from .block_store import DeviceStore, HostStore
from .frames import cut
from .layout import Part, Span, parts_between
from .link import KvLink
from .messages import Failed, KvEvent, KvOpen, KvRange, KvShard, Sent, Stopped
from .staging import Rectangle

Ready = torch.cuda.Event | None
"""When what is to be read is in the cache; None: it is."""


@dataclass(frozen=True)
class RangeReady:
    """When a range is in the cache, as a whole or layer by layer."""

    all_layers: Ready = None
    by_layer: Sequence[torch.cuda.Event] | None = None


@dataclass(frozen=True)
class _Piece:
    """A frame to come."""

    layers: Span
    kv_heads: Span
    blocks: Span
    ready: Ready


@dataclass(eq=False)
class _Queue:
    """What a generation still has for one link."""

    link: KvLink
    parts: list[Part]
    ranges: deque[tuple[Span, RangeReady]] = field(default_factory=deque)
    pieces: Iterator[_Piece] = field(default_factory=lambda: iter(()))
    head: _Piece | None = None


@dataclass(eq=False)
class _Transfer:
    """A generation."""

    order: KvOpen
    queues: list[_Queue]
    num_sent_blocks: int = 0
    """Of the prompt's first ones: already asked for, or in the target's cache from the start."""
    num_reading: int = 0
    """Frames whose blocks are being read."""
    is_whole: bool = False
    """The last range was asked for."""
    is_stopping: bool = False
    reason: str | None = None
    """Why it failed."""


class Sender:
    """Used by the endpoint's thread, but for nothing else."""

    def __init__(
        self,
        store: HostStore | DeviceStore,
        shards: Sequence[KvShard],
        rank: int,
        *,
        connect: Callable[[str, bytes], KvLink],
        on_event: Callable[[KvEvent], None],
    ) -> None:
        """`connect(url, key)` begins a link."""
        self._store = store
        self._shards = shards
        self._rank = rank
        self._connect = connect
        self._on_event = on_event
        self._transfers: dict[int, _Transfer] = {}
        self._links: dict[tuple[str, bytes], KvLink] = {}
        self._broken: list[KvLink] = []
        """Given up, but blocks are still being read for them."""
        self._waiting: dict[KvLink, deque[tuple[int, _Queue]]] = {}
        """Generations that have something for the link, the one whose turn it is first."""
        self._num_reading = 0

    @property
    def links(self) -> list[KvLink]:
        """Those that live."""
        return list(self._links.values())

    @property
    def waits_for_device(self) -> bool:
        """Whether blocks are being read by a GPU now."""
        return self._num_reading > 0

    @property
    def waits_for_step(self) -> bool:
        """Whether a link could take more of what is not in the cache yet."""
        return any(link.has_room for link, queues in self._waiting.items() if queues)

    def open(self, order: KvOpen) -> None:
        """Learn what a generation is."""
        generation = order.generation
        transfer = self._transfers[generation] = _Transfer(order, [])
        try:
            parts = parts_between(self._shards, order.to.shards)
        except ConfigError as error:
            self._fail(transfer, str(error))
            return
        by_target: dict[int, list[Part]] = {}
        for part in parts:
            if part.source == self._rank:
                by_target.setdefault(part.target, []).append(part)
        for target, of_target in by_target.items():
            link = self._link(order.to.rank_urls[target], order.to.key)
            link.announce(generation)
            transfer.queues.append(_Queue(link, of_target))

    def send(self, order: KvRange, ready: RangeReady) -> None:
        """Ask for a range; the blocks that it completes are read once they are ready."""
        transfer = self._transfers.get(order.generation)
        if transfer is None or transfer.reason is not None or transfer.is_stopping:
            return
        block_size = self._store.geometry.block_size
        first = order.first_token // block_size
        end = -(-order.end_token // block_size) if order.is_last else order.end_token // block_size
        transfer.is_whole = order.is_last
        for queue in transfer.queues if end > first else ():
            queue.ranges.append(((first, end), ready))
            waiting = self._waiting.setdefault(queue.link, deque())
            if all(queue is not other for _, other in waiting):
                waiting.append((order.generation, queue))
        self._end_if_read(transfer)

    def stop(self, generation: int) -> None:
        """Read no more of a generation."""
        transfer = self._transfers.get(generation)
        if transfer is None:
            self._on_event(Stopped(generation))
            return
        transfer.is_stopping = True
        self._forget_pieces(transfer)
        self._end_if_read(transfer)

    def turn(self, now_s: float, readable: Container[object] = ()) -> None:
        """Do all that can be done now. `readable`: sockets of links that have something to read."""
        for key, link in list(self._links.items()):
            for drop in link.turn(now_s, readable):
                transfer = self._transfers.get(drop.generation)
                if transfer is not None and any(queue.link is link for queue in transfer.queues):
                    self._fail(transfer, f"{link.url} takes no more of it: {drop.reason}")
            if link.broken is not None:
                del self._links[key]
                self._give_up(link, link.broken)
            elif link.is_unused(now_s) and not self._is_needed(link):
                del self._links[key]
                self._give_up(link, "it is not used")
        for link in list(self._broken):
            link.turn(now_s, ())
            if not link.is_filling:
                self._broken.remove(link)
                link.let_go()
        for link, waiting in self._waiting.items():
            self._feed(link, waiting)

    def close(self) -> None:
        """Give everything up; nothing is being read any more."""
        for link in self._links.values():
            link.close()
        for link in [*self._links.values(), *self._broken]:
            link.let_go()
        self._links, self._broken = {}, []

    def _feed(self, link: KvLink, waiting: deque[tuple[int, _Queue]]) -> None:
        """Fill the link's buffers, one frame of each generation in turn, until none is free or none is ready."""
        num_not_ready = 0
        while waiting and num_not_ready < len(waiting) and link.has_room:
            generation, queue = waiting.popleft()
            piece = self._next_piece(queue)
            if piece is None:
                continue  # nothing left for now
            waiting.append((generation, queue))
            if piece.ready is not None and not piece.ready.query():
                num_not_ready += 1
                continue
            num_not_ready = 0
            queue.head = None
            self._put(self._transfers[generation], link, piece)

    def _put(self, transfer: _Transfer, link: KvLink, piece: _Piece) -> None:
        ids = transfer.order.source_block_ids[piece.blocks[0] : piece.blocks[1]]
        transfer.num_reading += 1
        self._num_reading += 1

        def on_read() -> None:
            transfer.num_reading -= 1
            self._num_reading -= 1
            self._end_if_read(transfer)

        link.put(transfer.order.generation, Rectangle(piece.layers, piece.kv_heads, ids), piece.blocks, on_read)

    def _next_piece(self, queue: _Queue) -> _Piece | None:
        while queue.head is None:
            queue.head = next(queue.pieces, None)
            if queue.head is None:
                if not queue.ranges:
                    return None
                queue.pieces = self._pieces(queue, *queue.ranges.popleft())
        return queue.head

    def _has_left(self, queue: _Queue) -> bool:
        # Pieces are cut to what a link takes, which is known once it is ready: no range is begun here.
        return queue.head is not None or bool(queue.ranges) or self._next_piece(queue) is not None

    def _pieces(self, queue: _Queue, blocks: Span, ready: RangeReady) -> Iterator[_Piece]:
        for part in queue.parts:
            sizes = {"block_bytes": self._store.block_bytes(part.kv_heads), "frame_bytes": queue.link.frame_bytes}
            if ready.by_layer is None:
                for layers, of_frame in cut(part.layers, blocks, **sizes):
                    yield _Piece(layers, part.kv_heads, of_frame, ready.all_layers)
                continue
            for layer in range(*part.layers):
                when = ready.by_layer[layer - self._store.shard.layers[0]]
                for layers, of_frame in cut((layer, layer + 1), blocks, **sizes):
                    yield _Piece(layers, part.kv_heads, of_frame, when)

    def _end_if_read(self, transfer: _Transfer) -> None:
        """Say Sent or Stopped when it is so; the generation is forgotten then."""
        generation = transfer.order.generation
        if self._transfers.get(generation) is not transfer or transfer.num_reading:
            return
        if transfer.is_stopping:
            del self._transfers[generation]
            self._on_event(Stopped(generation))
        elif transfer.is_whole and transfer.reason is None and not any(map(self._has_left, transfer.queues)):
            del self._transfers[generation]
            self._on_event(Sent(generation))

    def _give_up(self, link: KvLink, reason: str) -> None:
        link.close()
        self._broken.append(link)
        self._waiting.pop(link, None)
        for transfer in list(self._transfers.values()):
            if any(queue.link is link for queue in transfer.queues):
                self._fail(transfer, reason)

    def _is_needed(self, link: KvLink) -> bool:
        return any(queue.link is link for transfer in self._transfers.values() for queue in transfer.queues)

    def _fail(self, transfer: _Transfer, reason: str) -> None:
        if transfer.reason is None and not transfer.is_stopping:
            transfer.reason = reason
            self._forget_pieces(transfer)
            self._on_event(Failed(transfer.order.generation, reason))

    def _forget_pieces(self, transfer: _Transfer) -> None:
        for queue in transfer.queues:
            queue.ranges.clear()
            queue.pieces, queue.head = iter(()), None

    def _link(self, url: str, key: bytes) -> KvLink:
        link = self._links.get((url, key))
        if link is None:
            link = self._links[url, key] = self._connect(url, key)
        return link
