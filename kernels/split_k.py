"""Sums the parts of a matrix product whose K was split over programs, always in the same order. Knows no product.

Each program stores its part; the last one to arrive at a tile adds all parts up, from the first to the last, so that
results do not depend on who came last. Arrivals are counted in memory that is zero before and after each launch: a
captured graph can be replayed without clearing anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from .runtime import jit

_NUM_STREAMS = 64
_MAX_TILES = 4096


@jit
def store_part(acc, partial_ptr, counter_ptr, tile, split, num_rows, TRANSPOSED: tl.constexpr, SPLITS: tl.constexpr):
    """Keep one part of a tile, `acc` fp32 [rows, columns] or TRANSPOSED; whether it was the last of SPLITS to come.

    Only the first `num_rows` rows are kept.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    part = partial_ptr + (tile.to(tl.int64) * SPLITS + split) * SIZE
    offs_0 = tl.arange(0, acc.shape[0])[:, None]
    offs_1 = tl.arange(0, acc.shape[1])[None, :]
    if TRANSPOSED:
        tl.store(part + offs_1 * acc.shape[0] + offs_0, acc, mask=offs_1 < num_rows)
    else:
        tl.store(part + offs_0 * acc.shape[1] + offs_1, acc, mask=offs_0 < num_rows)
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1


@jit
def finish_tile(
    partial_ptr,
    counter_ptr,
    bias_ptr,
    out_ptr,
    tile,
    row,
    column,
    num_rows,
    n_size,
    out_stride,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add up the parts of the tile [ROWS, COLUMNS] at (row, column) of x W^T; bias, gate or residual; store.

    A few rows at a time: the accumulator's layout, and registers for a whole tile, are behind us.
    """
    STEP: tl.constexpr = ROWS if ROWS * COLUMNS <= 2048 else 2048 // COLUMNS
    offs_n = tl.arange(0, COLUMNS)
    parts = partial_ptr + tile.to(tl.int64) * (SPLITS * ROWS * COLUMNS)
    for first in range(0, tl.minimum(ROWS, num_rows - row), STEP):
        offs_m = first + tl.arange(0, STEP)
        mask_m = row + offs_m < num_rows
        offs = offs_m[:, None] * COLUMNS + offs_n[None, :]
        out = tl.zeros([STEP, COLUMNS], tl.float32)
        for part in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
            out += tl.load(parts + part * (ROWS * COLUMNS) + offs, mask=mask_m[:, None], cache_modifier=".cg")
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column + offs_n, mask=column + offs_n < n_size, other=0.0)
            out += bias.to(tl.float32)[None, :]
        if GATED:
            gate, up = out.reshape(STEP, COLUMNS // 2, 2).split()
            out = gate * tl.sigmoid(gate) * up
            offs_out = column // 2 + tl.arange(0, COLUMNS // 2)
            mask = mask_m[:, None] & (offs_out < n_size // 2)[None, :]
        else:
            offs_out = column + offs_n
            mask = mask_m[:, None] & (offs_out < n_size)[None, :]
        places = out_ptr + (row + offs_m).to(tl.int64)[:, None] * out_stride + offs_out[None, :]
        if RESIDUAL:
            out += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(counter_ptr + tile, 0)


@cache
def _all_counters(device: torch.device) -> torch.Tensor:
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run a product once before capturing"
    zeros = torch.zeros(_NUM_STREAMS, _MAX_TILES, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams will use parts of it
    return zeros


_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(device: torch.device, num_tiles: int) -> torch.Tensor:
    """Arrival counters [at least `num_tiles`] int32, zero between launches, for launches on the current stream.

    Streams that run at the same time have different ones (up to 64 streams a device). The first call on a device
    allocates and must not happen during graph capture; a launch that compiles the kernel is never captured either.
    """
    assert num_tiles <= _MAX_TILES
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream)
    found = _of_streams.get(key)
    if found is None:
        found = _all_counters(device)[len(_of_streams) % _NUM_STREAMS]
        _of_streams[key] = found
    return found


def workspace(
    device: torch.device, num_tiles: int, splits: int, tile_size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Room for the parts of `num_tiles` tiles of `tile_size` elements, and counters; None where K is not split."""
    if splits == 1:
        return None, None
    partial = torch.empty(num_tiles * splits * tile_size, dtype=torch.float32, device=device)
    return partial, counters(device, num_tiles)
