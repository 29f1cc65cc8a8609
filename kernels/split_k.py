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
def sum_splits(
    acc, partial_ptr, counter_ptr, tile, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
):
    """Whether this program was the last of its tile's, and then the sum of all parts of `acc` [ROWS, COLUMNS] fp32."""
    offs = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    parts = partial_ptr + tile.to(tl.int64) * (SPLITS * ROWS * COLUMNS) + offs
    tl.store(parts + split * (ROWS * COLUMNS), acc)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    if is_last:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
            acc += tl.load(parts + part * (ROWS * COLUMNS), cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return is_last, acc


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
