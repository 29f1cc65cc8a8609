"""Which configurations of the quantized products are worth a measurement: few, since all are measured in minutes.

What trial kernels liked on an H200, and their neighbours. Knows no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton

from manta.kernels.gemm import GemmTiles
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
        wide = WeightOnlyTiles(128, 128, 64, 8, 2, 1)
        return [WeightOnlyTiles(64, 64, 128, 4, 3, max(1, splits // 2)), wide]
    first = WeightOnlyTiles(64, block_m, 128, 4, 3, splits)
    # Two warps take the instruction of one warp (HMMA), as tiles of 8 rows do; a warpgroup's waits for the unpacking.
    small = [replace(first, block_n=32, num_warps=2, num_stages=stages) for stages in (3, 4)]
    # Of so few weight rows that K need not be split, where parts cost as much as the product: 8 rows of x.
    tiny = [
        replace(first, block_n=16, num_warps=1, num_stages=4, splits=1),
        replace(first, block_n=16, num_warps=1, num_stages=4, splits=max(1, splits // 2)),
        replace(first, block_n=32, num_warps=2, num_stages=4, splits=max(1, splits // 2)),
    ]
    tiny = tiny if rows <= 8 else []
    if scheme.format is Format.INT4:
        if rows == 64:
            return [first, replace(first, splits=max(1, splits // 2)), replace(first, block_n=128, num_warps=8)]
        if rows == 32:
            return [first, replace(first, splits=2 * splits), replace(first, block_n=128), *small]
        more = [replace(first, splits=4 * splits), replace(first, num_stages=4), *(small if rows == 16 else [])]
        return [first, replace(first, splits=2 * splits), *more, *tiny, replace(first, splits=2 * splits, num_stages=4)]
    deep = replace(first, num_stages=4 if rows < 64 else 3)
    plain = replace(deep, inline_ptx=False)
    small = [replace(tiles, inline_ptx=False) for tiles in small]
    if rows > 16:
        return [deep, plain, replace(plain, splits=max(1, splits // 2)), *(small if rows == 32 else [])]
    wider = [replace(plain, block_k=256, num_stages=3)] if scheme.group is None else []
    # Of 16 rows: the weight's tiles twice, from L2, instead of tiles of 16 columns.
    halves = [replace(plain, block_m=8, num_stages=3), *small] if rows == 16 else []
    tiny = [replace(tiles, inline_ptx=False) for tiles in tiny]
    if scheme.group is None:
        tiny += [replace(tiles, block_k=256, num_stages=3) for tiles in tiny[:2]]
    return [deep, plain, replace(plain, splits=2 * splits), *wider, *halves, *tiny]


def _eight_bit(scheme: Scheme, layer: Layer, rows: int) -> list[WeightOnlyTiles | SwappedTiles | GemmTiles]:
    splits = usual_splits(layer)
    grouped = scheme.group is not None
    if rows <= 64:
        block_m = max(16, triton.next_power_of_2(rows))
        block_k = 128 if grouped or rows == 64 else 256
        first = SwappedTiles(64, block_m, block_k, 4, 6 if grouped else 4, splits)
        halves = replace(first, splits=max(1, splits // 2))
        if not grouped:
            narrow = [replace(tiles, block_m=8) for tiles in (first, halves)] if rows <= 8 else []
            return [first, halves, replace(first, block_k=128, num_stages=6), *narrow, *_by_tma(first)]
        more = [replace(first, num_stages=4), replace(first, num_warps=8)]
        return [first, halves, *more, *(_weight_only(scheme, layer, rows) if rows <= 16 else [])]
    if grouped:
        tiled = [GemmTiles(128, 128, 128, 8, 4), GemmTiles(64, 128, 128, 4, 5)]
    else:
        tiled = [GemmTiles(128, 128, 128, 4, 4), GemmTiles(128, 256, 128, 8, 3, subtiles=2)]
        if scheme.format is Format.INT8:
            tiled[1] = GemmTiles(128, 256, 128, 8, 3, subtiles=1 if layer.kind == "plain" else 2)
    if rows <= 256:
        block_m = 64 if grouped else 128
        swapped = SwappedTiles(64 if grouped else 128, block_m, 128, 4 if grouped else 8, 4, max(1, splits // 2))
        return [swapped, GemmTiles(64, 128, 128, 4, 5), tiled[0]]
    return [*tiled, GemmTiles(128, 128, 128, 8, 4)]


def _by_tma(first: SwappedTiles) -> list[SwappedTiles]:
    """What fetches more bytes with fewer instructions; it pays for wide layers alone."""
    tiles = replace(first, tma=True)
    return [tiles, replace(tiles, num_stages=3), replace(tiles, block_n=128, num_stages=3)]
