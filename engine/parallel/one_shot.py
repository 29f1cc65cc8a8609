"""Sums over ranks of one node by a kernel of our own that reads the peers' memory. Knows no model, no process groups.

Ranks exchange handles of their arenas (CUDA IPC) over a store when the gang is made, and settle together whether all
could open all. Which tensors go this way is the device's measured table's to say; without an entry none do, and the
library sums.
"""

from __future__ import annotations

import logging
import os
from typing import Protocol

import torch

from manta.engine.kv_transfer.cuda_ipc import IpcUnavailable, OpenedBuffer, SharedBuffer
from manta.kernels.all_reduce import Arenas, SumTiles, all_reduce, arena_bytes, one_shot_plan

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Store(Protocol):
    """What is needed of torch.distributed's store. `get` waits until somebody sets the key."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


def open_one_shot(
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    *,
    max_bytes: int | None = None,
    tiles: SumTiles | None = None,
) -> OneShotSum | None:
    """Called by all ranks of a stage, each a process with a GPU of its own on one node. None on all of them where the
    table has no sizes for so many ranks, or where one rank's memory cannot be reached by another.

    `max_bytes` and `tiles` (all ranks give the same): in place of the table's.
    """
    planned_tiles, planned_bytes = one_shot_plan(size, device)
    max_bytes, tiles = planned_bytes if max_bytes is None else max_bytes, tiles or planned_tiles
    store.set(f"plan/{rank}", f"{max_bytes} {tiles}")
    plans = {store.get(f"plan/{other}") for other in range(size)}
    if len(plans) > 1:
        logger.warning("Sums over ranks go through NCCL alone: their tables differ: %s", plans)
    if len(plans) > 1 or not max_bytes:
        return None
    opened, problem = None, ""
    try:
        arena = _Arena(rank, size, store, device, max_bytes, tiles)
    except IpcUnavailable as error:
        arena, problem = None, str(error)
        store.set(f"arena/{rank}", "")
    if arena is not None:
        try:
            opened = OneShotSum(rank, size, arena, store)
        except IpcUnavailable as error:
            problem = str(error)
    store.set(f"opened/{rank}", problem)
    problems = [store.get(f"opened/{other}").decode() for other in range(size)]
    if not any(problems):
        return opened
    if rank == 0:
        logger.warning("Sums over ranks go through NCCL alone: %s", next(filter(None, problems)))
    if opened is not None:
        opened.close()
    elif arena is not None:
        arena.buffer.close()
    return None


class _Arena:
    """This rank's memory that the others read."""

    def __init__(
        self, rank: int, size: int, store: Store, device: torch.device, max_bytes: int, tiles: SumTiles
    ) -> None:
        """Raises IpcUnavailable."""
        self.slot_bytes, self.tiles, self.device = -(-max_bytes // 256) * 256, tiles, device
        self.buffer = SharedBuffer(arena_bytes(size, self.slot_bytes, tiles), device)
        self.words = self.buffer.tensor().view(torch.int32)
        self.words.zero_()
        torch.cuda.synchronize(device)  # others may write flags as soon as they have the handle
        store.set(f"arena/{rank}", f"{os.getpid()} {self.buffer.handle.hex()}")


class OneShotSum:
    """An AllReduce (groups.py) for what `takes` says. Every rank makes one; all of them sum in the same order."""

    def __init__(self, rank: int, size: int, arena: _Arena, store: Store) -> None:
        """Raises IpcUnavailable when another rank's arena cannot be reached."""
        self._arena = arena
        self._opened: list[OpenedBuffer] = []
        addresses = []
        try:
            for other in range(size):
                addresses.append(arena.buffer.address if other == rank else self._open(store.get(f"arena/{other}")))
        except IpcUnavailable:
            self._let_go()
            raise
        device = arena.device
        epochs = torch.zeros(arena.tiles.programs, dtype=torch.int32, device=device)
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._arenas = Arenas(rank, table, epochs, arena.slot_bytes, arena.tiles)
        self._abort_stream = torch.cuda.Stream(device)
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._is_closed = False
        torch.cuda.synchronize(device)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a tensor goes this way; the same answer on all ranks."""
        fits = 0 < x.numel() * x.element_size() <= self._arena.slot_bytes
        return fits and x.dtype in _DTYPES and x.is_contiguous()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Replace `x` by the sum over ranks, or add the sum to `residual`."""
        all_reduce(x, self._arenas, residual)

    def abort(self) -> None:
        """End the kernels that wait for others, with results that mean nothing. Called by any thread; for good."""
        if not self._is_closed:
            with torch.cuda.stream(self._abort_stream):  # a copy: kernels that wait may hold the multiprocessors
                self._arena.words[:1].copy_(self._one, non_blocking=True)

    def close(self) -> None:
        """Let the memory go. Nothing on this device may still use it; other ranks may not read this one's any more."""
        if not self._is_closed:
            self._is_closed = True
            torch.cuda.synchronize(self._arena.device)
            self._let_go()

    def _open(self, said: bytes) -> int:
        if not said:
            raise IpcUnavailable("another rank has no memory to share")
        pid, handle = said.decode().split()
        if int(pid) == os.getpid():
            raise IpcUnavailable("ranks of one process do not open each other's memory")
        self._opened.append(OpenedBuffer(bytes.fromhex(handle), self._arena.device))
        return self._opened[-1].address

    def _let_go(self) -> None:
        for opened in self._opened:
            opened.close()
        self._opened = []
        self._arena.buffer.close()
