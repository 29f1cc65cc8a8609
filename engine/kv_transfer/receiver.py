"""Takes frames from other engines' ranks and writes them into blocks that were accepted. Knows no lease and no request.

Only this side writes into its caches: what a sender does, or does no more, cannot touch a block. Frames of generations
that were revoked, or were never accepted, are read, thrown away and acknowledged like others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import msgspec
import numpy as np
import torch
import zmq

from .block_store import DeviceStore, HostStore
from .cuda_ipc import IpcUnavailable
from .frames import (
    Ack,
    Announce,
    Drop,
    Frame,
    Hello,
    Refused,
    Staging,
    ToSender,
    TransportLimits,
    Welcome,
    decode_to_target,
    encode,
)
from .messages import Accepted, Failed, KvAccept, KvEvent, Received, Revoked
from .staging import InShared, Rectangle, Writer, checksums_of

logger = logging.getLogger(__name__)

_MOST_MESSAGES = 32
"""Taken in one turn, so that orders and sending come to their turn."""


@dataclass(eq=False)
class _Entry:
    """A generation that was accepted and is neither complete nor revoked."""

    order: KvAccept
    blocks: tuple[int, int]
    """Positions that are to come."""
    ready: torch.cuda.Event | None
    """When the blocks may be written."""
    missing: np.ndarray
    """[layers, heads, blocks], of this rank: what no frame has brought."""
    num_left: int
    """How many of these have not been written yet."""
    is_accepted: bool = False
    is_revoked: bool = False
    num_writing: int = 0
    num_bytes: int = 0
    reason: str | None = None
    """Why it failed."""


@dataclass(eq=False)
class _Source:
    """A sender's link."""

    link_id: str
    heard_at_s: float
    lanes: dict[int, bytes] = field(default_factory=dict)
    """Identities of connections."""
    shared: InShared | None = None
    is_gone: bool = False
    """Its connection ended."""
    generations: set[int] = field(default_factory=set)
    """Announced and still open."""


@dataclass(eq=False)
class _Writing:
    """A frame that a GPU still writes."""

    done: torch.cuda.Event | None
    entry: _Entry
    num_cells: int
    frame: Frame
    identity: bytes
    source: _Source


class Receiver:
    """Used by the endpoint's thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        store: HostStore | DeviceStore,
        writer: Writer,
        *,
        limits: TransportLimits,
        node: str | None,
        make_shared: Callable[[], InShared] | None,
        on_event: Callable[[KvEvent], None],
    ) -> None:
        """`socket`: a ROUTER that listens. `node`: senders of the same one get staging buffers by `make_shared`."""
        self._socket = socket
        self._store = store
        self._writer = writer
        self._limits = limits
        self._node = node
        self._make_shared = make_shared
        self._on_event = on_event
        self._entries: dict[int, _Entry] = {}
        self._sources: dict[str, _Source] = {}
        self._by_identity: dict[bytes, _Source] = {}
        self._writing: deque[_Writing] = deque()
        self._retired: list[InShared] = []
        """Staging buffers of senders that are gone, while something is being written."""
        self.num_bytes = 0
        """Written into blocks so far."""
        self.num_shared_bytes = 0
        """Of these, what came from GPU to GPU."""

    @property
    def waits_for_device(self) -> bool:
        """Whether a GPU is writing now."""
        return bool(self._writing)

    @property
    def waits_for_step(self) -> bool:
        """Whether blocks may still be used by a step, and are not accepted yet."""
        return any(not entry.is_accepted for entry in self._entries.values())

    @property
    def can_take(self) -> bool:
        """Whether a frame would find a buffer now."""
        return self._writer.can_write

    def accept(self, order: KvAccept, ready: torch.cuda.Event | None) -> None:
        """Take a generation's frames, once `ready` is over."""
        block_size = self._store.geometry.block_size
        blocks = order.first_token // block_size, -(-order.num_tokens // block_size)
        shard = self._store.shard
        sizes = [end - first for first, end in (shard.layers, shard.kv_heads, blocks)]
        entry = _Entry(order, blocks, ready, np.ones(sizes, np.bool_), prod(sizes))
        self._entries[order.generation] = entry
        self._accept_if_ready(entry)

    def revoke(self, generation: int) -> None:
        """Throw away what still comes of a generation."""
        entry = self._entries.get(generation)
        if entry is None:
            self._on_event(Revoked(generation))
            return
        entry.is_revoked = True
        for source in list(self._sources.values()):
            if generation in source.generations:
                self._tell(next(iter(source.lanes.values())), Drop(generation, "it was withdrawn"))
        self._end_if_written(entry)

    def turn(self, now_s: float) -> bool:
        """Do all that can be done now. Whether messages are left."""
        for entry in list(self._entries.values()):
            self._accept_if_ready(entry)
        self._finish_writes()
        has_more = self._receive(now_s)
        for source in list(self._sources.values()):
            if source.is_gone:
                if not has_more:  # what it sent before was taken
                    self._forget(source, "its sender is gone")
            elif now_s - source.heard_at_s > self._limits.silence_s:
                self._forget(source, f"its sender is not heard of for {self._limits.silence_s:g} s")
        if self._retired and not self._writing:
            for shared in self._retired:
                shared.close()
            self._retired = []
        return has_more

    def close(self) -> None:
        """Let all buffers go; nothing is being written any more."""
        for source in self._sources.values():
            if source.shared is not None:
                source.shared.close()
        for shared in self._retired:
            shared.close()
        self._sources, self._retired = {}, []

    def _accept_if_ready(self, entry: _Entry) -> None:
        if entry.is_accepted or entry.is_revoked or (entry.ready is not None and not entry.ready.query()):
            return
        entry.is_accepted = True
        self._on_event(Accepted(entry.order.generation))
        self._end_if_written(entry)  # nothing may have been left to send

    def _receive(self, now_s: float) -> bool:
        for _ in range(_MOST_MESSAGES):
            if not self._writer.can_write:
                return True
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            identity = parts[0].bytes
            try:
                message = decode_to_target(parts[1].buffer)
            except msgspec.DecodeError as error:
                logger.warning("An endpoint sent what is no message: %s", error)
                self._tell(identity, Refused("it does not speak this version's language"))
                continue
            if isinstance(message, Hello):
                self._greet(identity, message, now_s)
                continue
            source = self._by_identity.get(identity)
            if source is None:
                self._tell(identity, Refused("it was silent for too long"))
                continue
            source.heard_at_s = now_s
            if isinstance(message, Announce):
                self._announced(source, identity, message.generation)
            elif isinstance(message, Frame):
                self._take(source, identity, message, parts[2].buffer if len(parts) > 2 else None)
        return True

    def _greet(self, identity: bytes, hello: Hello, now_s: float) -> None:
        if hello.geometry != self._store.geometry:
            reason = f"its blocks are {hello.geometry}, here they are {self._store.geometry}"
            logger.warning("KV of another engine is refused, prompts are computed again here: %s", reason)
            self._tell(identity, Refused(reason))
            return
        source = self._sources.get(hello.link_id)
        if source is None:
            source = self._sources[hello.link_id] = _Source(hello.link_id, now_s)
        source.lanes[hello.lane] = identity
        self._by_identity[identity] = source
        if hello.lane == 0:
            self._tell(identity, Welcome(self._limits.frame_bytes, self._share(source, hello)))

    def _share(self, source: _Source, hello: Hello) -> Staging | None:
        if self._make_shared is None or hello.node is None or hello.node != self._node:
            return None
        try:
            source.shared = self._make_shared()
        except IpcUnavailable as error:
            logger.warning("KV from this node goes through host memory: GPU memory cannot be shared: %s", error)
            return None
        return source.shared.staging

    def _announced(self, source: _Source, identity: bytes, generation: int) -> None:
        entry = self._entries.get(generation)
        if entry is None or entry.is_revoked:
            self._tell(identity, Drop(generation, "it was not accepted, or withdrawn"))
        else:
            source.generations.add(generation)

    def _take(self, source: _Source, identity: bytes, frame: Frame, payload: memoryview | None) -> None:
        entry = self._entries.get(frame.generation)
        if entry is None or entry.is_revoked or entry.reason is not None:
            self._tell(identity, Ack(frame.sequence))  # drained
            return
        part = self._part(entry, frame)
        if part is None:
            self._reject(entry, source, identity, frame, f"{frame} is no part of what is still to come")
            return
        content: np.ndarray | torch.Tensor | None = None
        if frame.slot is None:
            if payload is not None and len(payload) == frame.num_bytes:
                content = np.frombuffer(payload, np.uint8)
        elif source.shared is not None and source.shared.has(frame.slot, frame.num_bytes):
            content = source.shared.slot(frame.slot)
        if content is None:
            self._reject(entry, source, identity, frame, f"the bytes of {frame} are not there")
            return
        if frame.checksums is not None and checksums_of(_on_host(content, frame.num_bytes), part) != frame.checksums:
            self._reject(entry, source, identity, frame, f"the checksums of {frame} do not fit its bytes")
            return
        self._missing(entry, frame)[:] = False
        done = self._writer.write(content, part)
        entry.num_writing += 1
        self._writing.append(_Writing(done, entry, _num_cells(frame), frame, identity, source))
        self._finish_writes()

    def _part(self, entry: _Entry, frame: Frame) -> Rectangle | None:
        """Where a frame goes, if it is what was accepted."""
        first, end = frame.blocks
        if not (entry.blocks[0] <= first < end <= entry.blocks[1]):
            return None
        if not self._store.holds(frame.layers, frame.kv_heads) or not self._missing(entry, frame).all():
            return None
        num_layers = frame.layers[1] - frame.layers[0]
        if frame.num_bytes != num_layers * (end - first) * self._store.block_bytes(frame.kv_heads):
            return None
        return Rectangle(frame.layers, frame.kv_heads, entry.order.block_ids[first:end])

    def _missing(self, entry: _Entry, frame: Frame) -> np.ndarray:
        """The frame's part of what is still to come."""
        shard = self._store.shard
        firsts = shard.layers[0], shard.kv_heads[0], entry.blocks[0]
        spans = zip((frame.layers, frame.kv_heads, frame.blocks), firsts, strict=True)
        return entry.missing[tuple(slice(begin - first, end - first) for (begin, end), first in spans)]

    def _finish_writes(self) -> None:
        while self._writing and ((done := self._writing[0].done) is None or done.query()):
            written = self._writing.popleft()
            entry = written.entry
            entry.num_writing -= 1
            entry.num_left -= written.num_cells
            entry.num_bytes += written.frame.num_bytes
            self.num_bytes += written.frame.num_bytes
            self.num_shared_bytes += 0 if written.frame.slot is None else written.frame.num_bytes
            self._tell(written.identity, Ack(written.frame.sequence))
            self._end_if_written(entry)

    def _end_if_written(self, entry: _Entry) -> None:
        """Say Received or Revoked when it is so; the generation is forgotten then."""
        generation = entry.order.generation
        if entry.num_writing or self._entries.get(generation) is not entry:
            return
        if entry.is_revoked:
            self._drop(generation)
            self._on_event(Revoked(generation))
        elif entry.is_accepted and not entry.num_left and entry.reason is None:
            self._drop(generation)
            self._on_event(Received(generation, entry.num_bytes))

    def _drop(self, generation: int) -> None:
        del self._entries[generation]
        for source in self._sources.values():
            source.generations.discard(generation)

    def _reject(self, entry: _Entry, source: _Source, identity: bytes, frame: Frame, reason: str) -> None:
        self._tell(identity, Ack(frame.sequence))
        self._tell(identity, Drop(frame.generation, reason))
        source.generations.discard(frame.generation)
        self._fail(entry, reason)

    def _fail(self, entry: _Entry, reason: str) -> None:
        if entry.reason is None and not entry.is_revoked:
            entry.reason = reason
            self._on_event(Failed(entry.order.generation, reason))

    def _forget(self, source: _Source, reason: str) -> None:
        del self._sources[source.link_id]
        for identity in source.lanes.values():
            del self._by_identity[identity]
        if source.shared is not None:
            self._retired.append(source.shared)
        for generation in source.generations:
            entry = self._entries.get(generation)
            if entry is not None:
                self._fail(entry, reason)

    def _tell(self, identity: bytes, message: ToSender) -> None:
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            source = self._by_identity.get(identity)
            if source is not None:
                source.is_gone = True


def _num_cells(frame: Frame) -> int:
    """Layers x heads x blocks."""
    return (
        (frame.layers[1] - frame.layers[0])
        * (frame.kv_heads[1] - frame.kv_heads[0])
        * (frame.blocks[1] - frame.blocks[0])
    )


def _on_host(source: np.ndarray | torch.Tensor, num_bytes: int) -> np.ndarray:
    return source if isinstance(source, np.ndarray) else source[:num_bytes].cpu().numpy()
