"""Which configurations of the quantized products are worth a measurement: few, since all are measured in minutes.

What trial kernels liked on an H200, and their neighbours. Knows no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton

from manta.kernels.gemm import GemmTiles
from manta.kernels.quantized.block_gemm_plan import BlockTiles
from manta.kernels.quantized.eight_bit import SwappedTiles
from manta.kernels.quantized.layout import Format
from manta.kernels.quantized.weight_only import WeightOnlyTiles

from .kernel_linears import Layer
from .kernel_quantized import Scheme

TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)


def candidates(scheme: Scheme, layer: Layer, rows: int) -> list[Any]:
    """Configurations for `rows` rows; None, the library, is not among them."""
    found = _weight_only(scheme, layer, rows) if scheme.activations is None else _eight_bit(scheme, layer, rows)
    return list(dict.fromkeys(found))


def fallback(tiles: Any) -> Any:
    """What to try where these were wrong: the same without assembly, or None."""
    return replace(tiles, inline_ptx=False) if isinstance(tiles, WeightOnlyTiles) and tiles.inline_ptx else None


def usual_splits(layer: Layer) -> int:
    """Until programs of 64 rows fill the device twice."""
    splits = 1
    while triton.cdiv(layer.n_size, 64) * splits < 256 and layer.k_size >= 2048 * splits:
        splits *= 2
    return splits


def _weight_only(scheme: Scheme, layer: Layer, rows: int) -> list[WeightOnlyTiles]:
    splits = usual_splits(layer)
    block_m = 8 if rows <= 8 else min(64, triton.next_power_of_2(rows))
    if rows > 256:
        return []
    if rows > 64:
        return [WeightOnlyTiles(64, 64, 128, 4, 3, max(1, splits // 2)), WeightOnlyTiles(128, 64, 64, 8, 3, 1)]
    first = WeightOnlyTiles(64, block_m, 128, 4, 3, splits)
    # Two warps take the instruction of one warp (HMMA), as tiles of 8 rows do; a warpgroup's waits for the unpacking.
    narrow, small = replace(first, block_n=32, num_warps=2), replace(first, num_warps=2)
    twice = [replace(tiles, splits=2 * splits) for tiles in (first, narrow, small)]
    if scheme.format is Format.INT4:
        if rows == 64:
            return [first, replace(first, splits=max(1, splits // 2)), replace(first, block_n=128, num_warps=8)]
        flat = replace(twice[1], num_stages=2)
        found = [first, narrow, *twice[:2], flat]
        if rows == 16:
            return [*found, small, twice[2], replace(small, num_stages=4), replace(twice[2], num_stages=4)]
        return [*found, replace(twice[0], num_stages=2), replace(first, num_stages=4), small]
    deep = replace(first, num_stages=4 if rows < 64 else 3)
    plain = replace(deep, inline_ptx=False)
    if rows > 32:
        return [deep, plain, replace(plain, splits=max(1, splits // 2))]
    small = replace(small, num_stages=4)
    if rows == 16:
        longer = [replace(narrow, block_k=256, num_stages=4), replace(twice[1], block_k=256, num_stages=2)]
        found = [narrow, small, replace(narrow, num_stages=4), twice[1], *(longer if scheme.group is None else [])]
        return [*found, *(replace(tiles, inline_ptx=False) for tiles in found[:5])]
    wider = [replace(plain, block_k=256, num_stages=3)] if scheme.group is None and rows <= 16 else []
    others = [small, narrow, *twice[:2]]
    if rows <= 8:
        others = [replace(tiles, inline_ptx=False) for tiles in others]
    return [deep, plain, *others, *wider]


def _eight_bit(scheme: Scheme, layer: Layer, rows: int) -> list[Any]:
    splits = usual_splits(layer)
    fewer = max(1, splits // 2)
    grouped = scheme.group is not None
    if rows <= 64:
        block_m = max(16, triton.next_power_of_2(rows))
        if not grouped:
            first = SwappedTiles(64, block_m, 256 if rows < 64 else 128, 4, 4, splits)
            halves = replace(first, splits=fewer)
            slim = [replace(tiles, block_m=8) for tiles in (first, halves)] if rows <= 8 else []
            return [first, halves, replace(first, block_k=128, num_stages=6), *slim, *_by_tma(first)]
        first = SwappedTiles(64, block_m, 128, 4, 4, splits)
        two = replace(first, num_stages=3, unroll=2)  # scales two groups ahead; a stage holds both groups' tiles
        if rows == 64:  # tiles of blocks are for Hopper GPUs: on others they fail, and are left out
            wide = [replace(tiles, num_warps=8) for tiles in (two, replace(two, splits=fewer))]
            deep = [replace(first, num_stages=6, num_warps=warps) for warps in (4, 8)]
            return [first, two, replace(two, splits=fewer), *wide, *deep, BlockTiles(8, 64, 2)]
        wide = [replace(tiles, block_n=128, num_warps=8) for tiles in (first, two)]
        others = _weight_only(scheme, layer, rows)[:5] if rows <= 16 else []
        return [first, two, replace(two, splits=fewer), replace(two, num_stages=4), *wide, *others]
    if grouped:
        # Two programs a multiprocessor: one multiplies while the other adds up a group's sums.
        beside = [GemmTiles(64, 128, 128, 4, stages, programs=2) for stages in (3, 4)]
        blocks = [BlockTiles(6), BlockTiles(4), BlockTiles(6, 64)]
        tiled: list[Any] = [GemmTiles(128, 128, 128, 8, 4), GemmTiles(64, 128, 128, 4, 5), *beside, *blocks]
    else:
        tiled = [GemmTiles(128, 128, 128, 4, 4), GemmTiles(128, 256, 128, 8, 3, subtiles=2)]
        if scheme.format is Format.INT8:
            tiled[1] = GemmTiles(128, 256, 128, 8, 3, subtiles=1 if layer.kind == "plain" else 2)
    if rows <= 256 and grouped:
        swapped = SwappedTiles(64, 64, 128, 4, 3, fewer, unroll=2)
        return [swapped, replace(swapped, num_warps=8), *tiled[1:], BlockTiles(8, 64, 2), BlockTiles(6, 128, 2)]
    if rows <= 256:
        return [SwappedTiles(128, 128, 128, 8, 4, fewer), GemmTiles(64, 128, 128, 4, 5), tiled[0]]
    return [*tiled, GemmTiles(128, 128, 128, 8, 4)]


def _by_tma(first: SwappedTiles) -> list[SwappedTiles]:
    """What fetches more bytes with fewer instructions; it pays for wide layers alone."""
    tiles = replace(first, tma=True)
    return [tiles, replace(tiles, num_stages=3), replace(tiles, block_n=128, num_stages=3)]
