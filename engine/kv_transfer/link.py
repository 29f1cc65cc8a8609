"""A sender's connections to one target endpoint, and the buffers of frames on their way. Knows no transfer.

The lanes of a link are encrypted by different threads; frames take them in turn and may arrive in any order. A buffer
is used again when the target has acknowledged its frame, which bounds what is on its way. Nothing here waits: a target
that is slow leaves no free buffer, one that is dead or silent breaks the link, and a broken link is given up for a new
one.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from .control import connected_socket
from .frames import (
    PURPOSE,
    Ack,
    Announce,
    Beat,
    Drop,
    Frame,
    Geometry,
    Hello,
    Refused,
    ToTarget,
    TransportLimits,
    Welcome,
    decode_to_sender,
    encode,
)
from .layout import Span
from .staging import OutSlots, Rectangle, checksums_of

UNUSED_S = 120.0
"""A link over which nothing was sent for so long may be closed: its target may be gone for good."""

_BROKEN = {
    zmq.EVENT_CONNECT_RETRIED: "it cannot be reached",
    zmq.EVENT_DISCONNECTED: "its connection ended",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this end's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it refused to talk",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak with this end's key",
}


@dataclass(eq=False)
class _Filling:
    """A frame whose bytes a GPU still brings together."""

    done: torch.cuda.Event | None
    frame: Frame
    slot: int
    part: Rectangle
    on_read: Callable[[], None]


class KvLink:
    """Used by the endpoint's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        url: str,
        key: bytes,
        *,
        limits: TransportLimits,
        geometry: Geometry,
        node: str | None,
        make_slots: Callable[[Welcome], OutSlots],
        checksums: bool,
        now_s: float,
    ) -> None:
        """Begins to connect. `key`: the target's (KvPeer.key). `make_slots` is called when the target has answered."""
        self.url = url
        self.broken: str | None = None
        """Why, once it is."""
        self._limits = limits
        self._make_slots = make_slots
        self._checksums = checksums
        self._slots: OutSlots | None = None
        self._free: list[int] = []
        self._frame_bytes = 0
        self._filling: deque[_Filling] = deque()
        self._in_flight: dict[int, int] = {}
        """Slots by sequence of the frame."""
        self._num_frames = 0
        self._beat_at_s = now_s
        self._heard_at_s = now_s
        self._used_at_s = now_s
        link_id = secrets.token_hex(8)
        self._lanes = [connected_socket(context, zmq.DEALER, key, PURPOSE, url) for _ in range(limits.num_lanes)]
        self._monitors = [
            lane.get_monitor_socket(sum(_BROKEN), f"inproc://kv-{link_id}-{number}")
            for number, lane in enumerate(self._lanes)
        ]
        for number in range(limits.num_lanes):
            self._say(Hello(link_id, number, geometry, node), lane=number)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for `turn`."""
        return [*self._lanes, *self._monitors]

    @property
    def is_ready(self) -> bool:
        """Whether the target has answered."""
        return self._slots is not None and self.broken is None

    @property
    def has_room(self) -> bool:
        """Whether a frame would find a buffer."""
        return self.is_ready and bool(self._free)

    @property
    def frame_bytes(self) -> int:
        """Of payload at most, unless one block of one layer takes more."""
        return self._frame_bytes

    @property
    def is_filling(self) -> bool:
        """Whether blocks are still being read for frames."""
        return bool(self._filling)

    def is_unused(self, now_s: float) -> bool:
        """Whether nothing was sent for long."""
        return now_s - self._used_at_s > UNUSED_S

    def announce(self, generation: int) -> None:
        """Tell the target that frames of the generation will come."""
        self._say(Announce(generation))

    def put(self, generation: int, part: Rectangle, blocks: Span, on_read: Callable[[], None]) -> None:
        """Read blocks into a free buffer and send them; `on_read` is called when they were read."""
        assert self._slots is not None, "has_room was asked"
        slot = self._free.pop()
        size, done = self._slots.fill(slot, part)
        self._num_frames += 1
        frame = Frame(
            self._num_frames,
            generation,
            part.layers,
            part.kv_heads,
            blocks,
            size,
            slot=slot if self._slots.is_shared else None,
        )
        self._filling.append(_Filling(done, frame, slot, part, on_read))
        self._send_filled()

    def turn(self, now_s: float, readable: Container[object]) -> list[Drop]:
        """Take what the target says, send what is filled, beat, look whether the target lives."""
        self._send_filled()
        if self._filling or self._in_flight:
            self._used_at_s = now_s
        drops = [] if self.broken else self._receive(now_s, readable)
        if self.broken is None:
            if now_s >= self._beat_at_s:
                self._beat_at_s = now_s + self._limits.beat_s
                self._say(Beat())
            waits = self._slots is None or bool(self._in_flight)
            if not waits:
                self._heard_at_s = now_s
            elif now_s - self._heard_at_s > self._limits.stall_s:
                what = "does not answer" if self._slots is None else "took no frame"
                self._break(f"it {what} for {self._limits.stall_s:g} s")
        return drops

    def close(self) -> None:
        """Give the connections up with all that is in them."""
        for lane, monitor in zip(self._lanes, self._monitors, strict=True):
            lane.disable_monitor()
            monitor.close(linger=0)
            lane.close(linger=0)
        self._lanes, self._monitors = [], []

    def let_go(self) -> None:
        """Let the buffers go; `is_filling` is over."""
        if self._slots is not None:
            self._slots.close()

    def _send_filled(self) -> None:
        while self._filling and ((done := self._filling[0].done) is None or done.query()):
            filled = self._filling.popleft()
            filled.on_read()
            if self.broken is None:
                self._send(filled)

    def _send(self, filled: _Filling) -> None:
        assert self._slots is not None
        frame, num_bytes = filled.frame, filled.frame.num_bytes
        if self._checksums:
            frame = _with_checksums(frame, checksums_of(self._slots.payload(filled.slot, num_bytes), filled.part))
        self._in_flight[frame.sequence] = filled.slot
        payload = None if self._slots.is_shared else self._slots.payload(filled.slot, num_bytes)
        self._say(frame, payload, lane=frame.sequence % len(self._lanes))

    def _receive(self, now_s: float, readable: Container[object]) -> list[Drop]:
        drops = []
        for lane in self._lanes:
            while lane in readable:
                try:
                    message = decode_to_sender(lane.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self._heard_at_s = now_s
                if isinstance(message, Ack):
                    slot = self._in_flight.pop(message.sequence, None)
                    if slot is not None:
                        self._free.append(slot)
                elif isinstance(message, Drop):
                    drops.append(message)
                elif isinstance(message, Welcome):
                    self._welcome(message)
                elif isinstance(message, Refused):
                    self._break(message.reason)
        self._watch_connections(readable)
        return drops

    def _welcome(self, welcome: Welcome) -> None:
        try:
            slots = self._slots = self._make_slots(welcome)
        except torch.OutOfMemoryError as error:
            self._break(f"there is no memory for buffers: {error}")
            return
        self._free = list(range(slots.num_slots))
        self._frame_bytes = slots.slot_bytes if slots.is_shared else min(slots.slot_bytes, welcome.frame_bytes)

    def _watch_connections(self, readable: Container[object]) -> None:
        for monitor in self._monitors:
            while monitor in readable:
                try:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                if (kind := zmq.Event(event["event"])) in _BROKEN:
                    self._break(_BROKEN[kind])

    def _say(self, message: ToTarget, payload: object = None, *, lane: int = 0) -> None:
        parts = [encode(message)] if payload is None else [encode(message), payload]
        try:
            # The payload is not copied: its buffer is not used again before the target has it.
            self._lanes[lane].send_multipart(parts, zmq.NOBLOCK, copy=payload is None)
        except zmq.Again:
            self._break("it takes no messages")

    def _break(self, reason: str) -> None:
        if self.broken is None:
            self.broken = f"{self.url} is lost: {reason}"


def _with_checksums(frame: Frame, checksums: list[int]) -> Frame:
    return Frame(
        frame.sequence,
        frame.generation,
        frame.layers,
        frame.kv_heads,
        frame.blocks,
        frame.num_bytes,
        checksums,
        frame.slot,
    )
