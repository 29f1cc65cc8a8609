"""One-shot all-reduce over peer memory: every rank reads the parts of all and adds them in fp32, in the order of ranks.

Each rank has an arena that all others can address: flags, and two slots for its part. A program copies its tiles into
the own slot, tells the same program of every rank so by a flag in that rank's arena, waits for their flags in its own,
and adds up. One exchange, no host, the same bits on every rank. Two slots alternate: a rank that writes the next but
one part has been told by everybody that they began the next sum, so that nobody still reads this one. That needs the
launches of a rank in order on one stream, without programmatic dependent launch, always with the same number of
programs: each counts its sums (epochs) by itself in the device's memory, so that a CUDA graph may replay them.

A flag is written with release and read with acquire at system scope, over NVLink (whose peer access has atomics;
PCIe's has none). A rank that is dead never writes its flag: programs wait until the host writes the arena's abort word,
and end with results that mean nothing. The kernel bounds no wait by itself; who uses it watches the ranks. When the
process that waits ends, so does its kernel.

Which sizes go this way is the device's table's to say (`all_reduce`, by number of ranks). Without an entry none do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from . import runtime
from .runtime import jit

FLAGS_OFFSET = 64
"""Bytes: the abort word stands before it, in a line of its own."""


class Phase(IntEnum):
    """What a launch does. Tests that play all ranks one after the other take it apart."""

    ALL = 0
    PUBLISH = 1
    """Copy the own part and tell the others."""
    SUM = 2
    """Wait for the others and add up."""


@dataclass(frozen=True)
class SumTiles:
    """The same for all launches of a group. `programs` at most as many as multiprocessors: all must run at once."""

    programs: int = 64
    block: int = 4096
    """Elements."""
    num_warps: int = 8


@dataclass(frozen=True)
class Arenas:
    """The arenas of all ranks as one rank sees them."""

    rank: int
    addresses: torch.Tensor  # [ranks] int64, of each rank's arena in this process
    epochs: torch.Tensor  # [programs] int32, sums so far
    slot_bytes: int
    tiles: SumTiles

    @property
    def num_ranks(self) -> int:
        return len(self.addresses)


def arena_bytes(num_ranks: int, slot_bytes: int, tiles: SumTiles) -> int:
    """Of one rank. An arena begins as zeros; its first word is the abort word, int32."""
    return _slots_offset(num_ranks, tiles) + 2 * slot_bytes


def one_shot_plan(num_ranks: int, device: torch.device) -> tuple[SumTiles, int]:
    """How `num_ranks` GPUs of this kind sum, and up to how many bytes; 0 where nothing was measured."""
    entry: Any = runtime.tuned_table("all_reduce", device).get(str(num_ranks), {})
    return SumTiles(**entry.get("tiles", {})), int(entry.get("one_shot_max_bytes", 0))


def all_reduce_reference(parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of all ranks' parts, in fp32 and rounded; then with `residual`, in fp32 and rounded again.

    So it is the same whether the residual is added here or by itself: how many rows a step has may decide that.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total = total.to(parts[0].dtype)
    return total if residual is None else (total.float() + residual.float()).to(total.dtype)


def all_reduce(
    x: torch.Tensor, arenas: Arenas, residual: torch.Tensor | None = None, *, phase: Phase = Phase.ALL
) -> None:
    """Replace `x` by the sum over ranks, or with `residual` (of the same shape) add the sum to that and leave `x`.

    `x` is contiguous, of at most `slot_bytes`, a float type. Every rank calls it, in the same order, on one stream.
    """
    num_bytes = x.numel() * x.element_size()
    assert x.is_contiguous(), "a part lies without gaps"
    assert num_bytes <= arenas.slot_bytes, f"{num_bytes} bytes in a slot of {arenas.slot_bytes}"
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape), "residual is like the part"
    tiles = arenas.tiles
    _all_reduce_kernel[(tiles.programs,)](
        x,
        x if residual is None else residual,
        arenas.addresses,
        arenas.epochs,
        x.numel(),
        arenas.slot_bytes,
        RANK=arenas.rank,
        NUM_RANKS=arenas.num_ranks,
        BLOCK_RANKS=max(2, triton.next_power_of_2(arenas.num_ranks)),
        ADDS=residual is not None,
        BLOCK=tiles.block,
        FLAGS_OFFSET=FLAGS_OFFSET,
        SLOTS_OFFSET=_slots_offset(arenas.num_ranks, tiles),
        PHASE=int(phase),
        num_warps=tiles.num_warps,
    )


def _slots_offset(num_ranks: int, tiles: SumTiles) -> int:
    flags_bytes = 4 * num_ranks * tiles.programs
    return -(-(FLAGS_OFFSET + flags_bytes) // 256) * 256


@jit
def _how_far_behind(words, mask, is_own, epoch):
    """Negative while a rank has not published the sum `epoch`; 0 once all have, or when the abort word is set."""
    seen = tl.atomic_add(words, tl.zeros_like(words.to(tl.int64)).to(tl.int32), mask=mask, sem="acquire", scope="sys")
    is_aborted = tl.max(tl.where(is_own & (seen != 0), 1, 0), 0)
    behind = tl.min(tl.where(mask & ~is_own, seen - epoch, 0), 0)  # also right when counts wrap
    return tl.where(is_aborted != 0, 0, behind)


@jit
def _all_reduce_kernel(
    x_ptr,
    out_ptr,
    addresses_ptr,
    epochs_ptr,
    num_elements,
    slot_bytes,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS_OFFSET: tl.constexpr,
    SLOTS_OFFSET: tl.constexpr,
    PHASE: tl.constexpr,
):
    """One program: every programs-th tile. Its flags stand in each arena as [programs, ranks] int32."""
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(num_elements, BLOCK)
    offs = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 8), 8)
    offs_rank = tl.arange(0, BLOCK_RANKS)
    mask_rank = offs_rank < NUM_RANKS
    epoch = tl.load(epochs_ptr + pid) + 1
    slot_offset = SLOTS_OFFSET + (epoch & 1).to(tl.int64) * slot_bytes
    element = x_ptr.dtype

    if PHASE != 2:
        own_slot = (tl.load(addresses_ptr + RANK) + slot_offset).to(element)
        own_slot = tl.multiple_of(own_slot, 16)
        for tile in range(pid, num_tiles, num_programs):
            index = tile * BLOCK + offs
            mask = index < num_elements
            tl.store(own_slot + index, tl.load(x_ptr + index, mask=mask), mask=mask)
        tl.debug_barrier()  # what all threads wrote is published by the flag
        mask_other = mask_rank & (offs_rank != RANK)
        arenas = tl.load(addresses_ptr + offs_rank, mask=mask_other, other=0)
        flags = (arenas + FLAGS_OFFSET).to(tl.pointer_type(tl.int32)) + pid * NUM_RANKS + RANK
        tl.atomic_xchg(flags, tl.zeros([BLOCK_RANKS], tl.int32) + epoch, mask=mask_other, sem="release", scope="sys")

    if PHASE != 1:
        own_arena = tl.load(addresses_ptr + RANK)
        flags = (own_arena + FLAGS_OFFSET).to(tl.pointer_type(tl.int32)) + pid * NUM_RANKS + offs_rank
        # No rank waits for itself: in its place stands the abort word, so that all threads see it at once.
        words = tl.where(offs_rank == RANK, own_arena.to(tl.pointer_type(tl.int32)) + 0 * offs_rank, flags)
        behind = _how_far_behind(words, mask_rank, offs_rank == RANK, epoch)
        while behind < 0:
            behind = _how_far_behind(words, mask_rank, offs_rank == RANK, epoch)
        tl.debug_barrier()
        for tile in range(pid, num_tiles, num_programs):
            index = tile * BLOCK + offs
            mask = index < num_elements
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(NUM_RANKS):  # pyright: ignore[reportGeneralTypeIssues]
                slot = tl.multiple_of((tl.load(addresses_ptr + rank) + slot_offset).to(element), 16)
                total += tl.load(slot + index, mask=mask, cache_modifier=".cg").to(tl.float32)
            if ADDS:
                rounded = total.to(out_ptr.dtype.element_ty).to(tl.float32)
                total = rounded + tl.load(out_ptr + index, mask=mask).to(tl.float32)
            tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(epochs_ptr + pid, epoch)
