"""Messages from one process to others of the same node through shared memory. Knows not what the messages mean.

One writer, a fixed number of readers, each of which sees every message once and in order. The memory is an anonymous
file that vanishes with its last process; readers open it through /proc, which only the same user may. Messages longer
than a slot travel in pieces while the readers drain them. Waiting is a futex on the count of slots written: one call
wakes all readers. A reader that has a core to itself may look for a while before it sleeps in the kernel: waking a
core that has gone to sleep takes longer than the message.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import futex

SLICE_S = 0.2
"""Longest wait between two looks at whether the other side still lives."""

_LINE = 64
"""Bytes: counters of different writers lie in different cache lines."""
_LENGTH = struct.Struct("<Q")
"""Before a slot's bytes: bytes of the message that are still to come, its own among them."""

_WRAP = 2**32


@dataclass(frozen=True)
class RingAddress:
    """Where a ring lies, for the processes of one node."""

    pid: int
    descriptor: int
    num_slots: int
    slot_bytes: int
    num_readers: int


class _Ring:
    """The memory: the count of slots written, whether the writer waits, each reader's count, slots."""

    def __init__(self, descriptor: int, address: RingAddress) -> None:
        self._num_slots, self._slot_bytes = address.num_slots, address.slot_bytes
        self._num_readers = address.num_readers
        self._first_slot = _LINE * (2 + address.num_readers)
        self._memory = mmap.mmap(descriptor, ring_bytes(address))
        self._written = ctypes.c_uint32.from_buffer(self._memory, 0)
        self._writer_waits = ctypes.c_uint32.from_buffer(self._memory, _LINE)
        self._read = [
            ctypes.c_uint32.from_buffer(self._memory, _LINE * (2 + index)) for index in range(address.num_readers)
        ]

    def _slot(self, count: int) -> int:
        """Offset of the slot that is the `count`th to be written. The number of slots divides 2**32."""
        return self._first_slot + (count % self._num_slots) * (_LENGTH.size + self._slot_bytes)


class RingWriter(_Ring):
    """The end that sends. Used by one thread."""

    def __init__(self, num_readers: int, *, num_slots: int = 64, slot_bytes: int = 32768) -> None:
        """`num_slots` is a power of two."""
        assert num_slots & (num_slots - 1) == 0, "the number of slots divides 2**32"
        self._descriptor = os.memfd_create("manta-ring", os.MFD_CLOEXEC)
        self.address = RingAddress(os.getpid(), self._descriptor, num_slots, slot_bytes, num_readers)
        os.ftruncate(self._descriptor, ring_bytes(self.address))
        super().__init__(self._descriptor, self.address)

    def send(self, data: bytes, check: Callable[[], None]) -> None:
        """Write a message; waits while the slowest reader is `num_slots` behind. `check` is called in between and may
        raise when there is nobody left to wait for."""
        left = len(data)
        while True:
            self._wait_for_room(check)
            size = min(left, self._slot_bytes)
            start = self._slot(self._written.value)
            first = len(data) - left
            _LENGTH.pack_into(self._memory, start, left)
            start += _LENGTH.size
            self._memory[start : start + size] = data[first : first + size]
            self._written.value = (self._written.value + 1) % _WRAP
            futex.wake(self._written)
            left -= size
            if not left:
                return

    def close(self) -> None:
        """Give the memory up. Readers keep theirs."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _wait_for_room(self, check: Callable[[], None]) -> None:
        while True:
            for read in self._read:
                seen = read.value
                if (self._written.value - seen) % _WRAP >= self._num_slots:
                    break
            else:
                return
            check()
            self._writer_waits.value = 1
            # A reader that goes on between the two lines may miss that somebody waits: the wait is short.
            futex.wait(read, seen, min(SLICE_S, 0.02))
            self._writer_waits.value = 0


class RingReader(_Ring):
    """An end that receives, number `index` of the ring's readers. Used by one thread."""

    def __init__(self, address: RingAddress, index: int) -> None:
        """Raises OSError when the writer's process is gone."""
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(descriptor, address)
        finally:
            os.close(descriptor)
        self._mine = self._read[index]
        self.look_s = 0.0
        """How long a wait looks at the count before it sleeps, seconds; takes a core for as long."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, or None when none begins in time. A message that began is waited for to its end."""
        if not self._wait(timeout_s):
            return None
        (left,) = _LENGTH.unpack_from(self._memory, self._slot(self._mine.value))
        if left <= self._slot_bytes:
            return self._take(left)
        pieces = []
        while left:
            if self._wait(SLICE_S):
                size = min(left, self._slot_bytes)
                pieces.append(self._take(size))
                left -= size
        return b"".join(pieces)

    def _take(self, size: int) -> bytes:
        start = self._slot(self._mine.value) + _LENGTH.size
        data = self._memory[start : start + size]
        self._mine.value = (self._mine.value + 1) % _WRAP
        if self._writer_waits.value:
            futex.wake(self._mine)
        return data

    def _wait(self, timeout_s: float) -> bool:
        mine = self._mine.value
        if self._written.value != mine:
            return True
        now_s = time.monotonic()
        end_s, look_until_s = now_s + timeout_s, now_s + self.look_s
        while self._written.value == mine:
            left_s = end_s - (now_s := time.monotonic())
            if left_s <= 0:
                return False
            if now_s < look_until_s:
                time.sleep(0)  # other threads of this process go on
            else:
                futex.wait(self._written, mine, left_s)
        return True


def ring_bytes(address: RingAddress) -> int:
    """Size of the shared memory."""
    return _LINE * (2 + address.num_readers) + address.num_slots * (_LENGTH.size + address.slot_bytes)
