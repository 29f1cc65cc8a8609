"""Sums over ranks of one node through shared memory, for tensors on the host. Knows no model and no process groups.

Every rank writes its part into a slot of its own, says so, waits for the others and adds all parts in the same order:
one exchange, and the same bits on every rank. A library's sum over sockets takes several times as long (gloo: 0.4 to
1.5 ms for two ranks, whatever the size of a decode step). Two sets of slots alternate: who writes the next but one
sum has seen everybody begin the next one, so nobody still reads this one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
from typing import Protocol

import torch

from . import futex

SLOT_BYTES = 1 << 21
"""Larger tensors are summed in pieces."""

_LINE = 64
"""Bytes: the ranks' counts lie in different cache lines."""
_SLICE_S = 0.2
"""Longest wait between two looks at whether the others still live."""
_WRAP = 2**32


class Store(Protocol):
    """What is needed of torch.distributed's store. `get` waits until somebody sets the key."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


def can_share(device: torch.device) -> bool:
    """Whether sums may go this way: on the host, by a processor that shows its writes in order."""
    return device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")


class SharedSum:
    """An AllReduce (groups.py) among ranks of one node and one user."""

    def __init__(self, rank: int, size: int, store: Store, *, slot_bytes: int = SLOT_BYTES) -> None:
        """Every rank makes one, with a store of their own. Raises OSError when rank 0's process is gone."""
        self._rank = rank
        self._slot_bytes = slot_bytes
        total_bytes = _LINE * size + 2 * size * slot_bytes
        store.set(f"pid/{rank}", str(os.getpid()))
        if rank == 0:  # an anonymous file that vanishes with its last process
            descriptor = os.memfd_create("manta-sum", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, total_bytes)
            store.set("memory", f"/proc/{os.getpid()}/fd/{descriptor}")
            self._descriptor: int | None = descriptor  # others open it
        else:
            descriptor = os.open(store.get("memory").decode(), os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(descriptor, total_bytes)
        if rank:
            os.close(descriptor)
            self._descriptor = None
        self._counts = [ctypes.c_uint32.from_buffer(memory, _LINE * index) for index in range(size)]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_LINE * size)
        self._slots = slots.view(2, size, slot_bytes).unbind()
        self._count = 0
        self._peers = {index: os.pidfd_open(int(store.get(f"pid/{index}"))) for index in range(size) if index != rank}

    def __call__(self, x: torch.Tensor) -> None:
        """Replace `x` by the sum over all ranks. Raises RuntimeError when a rank's process has ended."""
        for piece in x.view(-1).split(self._slot_bytes // x.element_size()):
            self._sum(piece)

    def close(self) -> None:
        """Give back what the processes are watched with."""
        for descriptor in self._peers.values():
            os.close(descriptor)
        self._peers = {}
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _sum(self, piece: torch.Tensor) -> None:
        self._count = (self._count + 1) % _WRAP
        num_bytes = piece.numel() * piece.element_size()
        first, *others = (slot[:num_bytes].view(piece.dtype) for slot in self._slots[self._count % 2])
        (first, *others)[self._rank].copy_(piece)
        own = self._counts[self._rank]
        own.value = self._count
        futex.wake(own)
        for rank in self._peers:
            self._wait_for(rank)
        if piece.dtype == torch.float32:
            torch.add(first, others[0], out=piece)
            for part in others[1:]:
                piece.add_(part)
        else:
            wide = first.float()
            for part in others:
                wide += part
            piece.copy_(wide)

    def _wait_for(self, rank: int) -> None:
        word = self._counts[rank]
        while not self._has_reached(seen := word.value):
            futex.wait(word, seen, _SLICE_S)
            if word.value == seen and _has_ended(self._peers[rank]):
                raise RuntimeError(f"the process of rank {rank} of this stage has ended")

    def _has_reached(self, count: int) -> bool:
        """Whether a rank that is at `count` has written its part of this sum: it is there or one ahead."""
        return (count - self._count) % _WRAP < _WRAP // 2


def _has_ended(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
