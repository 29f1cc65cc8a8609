"""Buffers of fixed size through which blocks leave and arrive, on a CPU, a GPU and between GPUs. Knows no peer's state.

What is put on a GPU is over when the event that comes with it is; on a CPU it is over at once, and the event is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from . import cuda_ipc
from .block_store import DeviceStore, HostStore
from .frames import Staging, checksums
from .layout import Span


class Rectangle(NamedTuple):
    """Layers x heads x blocks of this rank."""

    layers: Span
    kv_heads: Span
    block_ids: Sequence[int]


class OutSlots(Protocol):
    """Numbered buffers for what leaves to one target."""

    num_slots: int
    slot_bytes: int
    is_shared: bool
    """Whether the target finds the bytes in its own staging; else they are sent as `payload`."""

    def fill(self, slot: int, part: Rectangle) -> tuple[int, torch.cuda.Event | None]:
        """Read blocks into a slot. How many bytes, and when they are there."""
        ...

    def payload(self, slot: int, num_bytes: int) -> np.ndarray:
        """A filled slot's bytes, on the host."""
        ...

    def close(self) -> None:
        """Let the memory go; nothing is under way."""
        ...


class HostOut:
    """From host memory into host memory."""

    is_shared = False

    def __init__(self, store: HostStore, *, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._store = store
        self._buffer = np.empty((num_slots, slot_bytes), np.uint8)

    def fill(self, slot: int, part: Rectangle) -> tuple[int, None]:
        return self._store.read(self._buffer[slot], part.layers, part.kv_heads, part.block_ids), None

    def payload(self, slot: int, num_bytes: int) -> np.ndarray:
        return self._buffer[slot, :num_bytes]

    def close(self) -> None:
        pass


class PinnedOut:
    """From a GPU into pinned host memory."""

    is_shared = False

    def __init__(self, store: DeviceStore, stream: torch.cuda.Stream, *, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._store, self._stream = store, stream
        self._device = _device_slots(num_slots, slot_bytes, stream)
        self._host = torch.empty((num_slots, slot_bytes), dtype=torch.uint8, pin_memory=True)

    def fill(self, slot: int, part: Rectangle) -> tuple[int, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            ids = self._store.ids(part.block_ids)
            size = self._store.read(self._device[slot], part.layers, part.kv_heads, ids)
            self._host[slot, :size].copy_(self._device[slot, :size], non_blocking=True)
            return size, _recorded()

    def payload(self, slot: int, num_bytes: int) -> np.ndarray:
        return self._host[slot, :num_bytes].numpy()

    def close(self) -> None:
        pass


class PeerOut:
    """From a GPU into the target's staging buffers on its GPU, which may be the same one."""

    is_shared = True

    def __init__(self, store: DeviceStore, stream: torch.cuda.Stream, staging: Staging, *, pid: int) -> None:
        """`pid`: of this process. Raises IpcUnavailable when the target's memory cannot be reached."""
        self.num_slots, self.slot_bytes = staging.num_slots, staging.slot_bytes
        self._store, self._stream = store, stream
        self._opened: cuda_ipc.OpenedBuffer | None = None
        self._address = staging.address
        if staging.pid != pid:  # a process cannot open what is its own
            self._opened = cuda_ipc.OpenedBuffer(staging.handle, store.device)
            self._address = self._opened.address
        # [slots, bytes]: gathered here first, so that one copy without gaps goes to the other GPU
        self._device = _device_slots(self.num_slots, self.slot_bytes, stream)

    def fill(self, slot: int, part: Rectangle) -> tuple[int, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            ids = self._store.ids(part.block_ids)
            size = self._store.read(self._device[slot], part.layers, part.kv_heads, ids)
            target = self._address + slot * self.slot_bytes
            cuda_ipc.copy_on_stream(target, self._device[slot], size, self._stream)
            return size, _recorded()

    def payload(self, slot: int, num_bytes: int) -> np.ndarray:
        return self._device[slot, :num_bytes].cpu().numpy()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class InShared:
    """A target's staging buffers for one sender of the same node."""

    def __init__(self, device: torch.device, *, num_slots: int, slot_bytes: int, pid: int) -> None:
        """`pid`: of this process. Raises IpcUnavailable."""
        self._buffer = cuda_ipc.SharedBuffer(num_slots * slot_bytes, device)
        self._slots = self._buffer.tensor().view(num_slots, slot_bytes)
        self.staging = Staging(self._buffer.handle, pid, self._buffer.address, slot_bytes, num_slots)

    def has(self, slot: int, num_bytes: int) -> bool:
        """Whether there is such a buffer and the bytes fit it."""
        return 0 <= slot < self.staging.num_slots and 0 < num_bytes <= self.staging.slot_bytes

    def slot(self, slot: int) -> torch.Tensor:
        """Its bytes, on the device."""
        return self._slots[slot]

    def close(self) -> None:
        """Let the memory go; nothing that this process put on the device still reads it."""
        self._buffer.close()


class Writer(Protocol):
    """Puts what arrived into blocks."""

    @property
    def can_write(self) -> bool:
        """Whether a payload would find a buffer now."""
        ...

    def write(self, source: np.ndarray | torch.Tensor, part: Rectangle) -> torch.cuda.Event | None:
        """Copy into blocks from host memory, or from a staging buffer on the device, which stays until the event."""
        ...


class HostWriter:
    """Into caches in host memory."""

    can_write = True

    def __init__(self, store: HostStore) -> None:
        self._store = store

    def write(self, source: np.ndarray | torch.Tensor, part: Rectangle) -> None:
        assert isinstance(source, np.ndarray), "no GPU here"
        self._store.write(source, part.layers, part.kv_heads, part.block_ids)


class DeviceWriter:
    """Into caches on a GPU, on a stream of its own."""

    def __init__(self, store: DeviceStore, *, num_buffers: int, buffer_bytes: int) -> None:
        self._store = store
        self._stream = torch.cuda.Stream(store.device)
        with torch.cuda.stream(self._stream):
            self._buffers = [_Pinned(buffer_bytes, store.device) for _ in range(num_buffers)]

    @property
    def can_write(self) -> bool:
        return any(buffer.is_free for buffer in self._buffers)

    def write(self, source: np.ndarray | torch.Tensor, part: Rectangle) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            ids = self._store.ids(part.block_ids)
            if isinstance(source, torch.Tensor):
                self._store.write(source, part.layers, part.kv_heads, ids)
                return _recorded()
            buffer = next(buffer for buffer in self._buffers if buffer.is_free)
            size = source.size
            buffer.host[:size].numpy()[:] = source
            buffer.device[:size].copy_(buffer.host[:size], non_blocking=True)
            self._store.write(buffer.device, part.layers, part.kv_heads, ids)
            buffer.used_until = _recorded()
            return buffer.used_until


class _Pinned:
    """A buffer on the host and one on the device, for the current stream."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.used_until: torch.cuda.Event | None = None

    @property
    def is_free(self) -> bool:
        return self.used_until is None or self.used_until.query()


def checksums_of(payload: np.ndarray, part: Rectangle) -> list[int]:
    """Of each block of a payload on the host."""
    num_layers = part.layers[1] - part.layers[0]
    return checksums(memoryview(payload.data), num_layers=num_layers, num_blocks=len(part.block_ids))


def _device_slots(num_slots: int, slot_bytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
    """[slots, bytes], for use on this stream: memory that was freed on another may still be read there."""
    with torch.cuda.stream(stream):
        return torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=stream.device)


def _recorded() -> torch.cuda.Event:
    """An event behind what the current stream holds."""
    event = torch.cuda.Event()
    event.record()
    return event
