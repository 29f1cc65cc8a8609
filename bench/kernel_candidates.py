"""Which configurations of the matrix products are worth a measurement: a rough model of time orders them. Knows no GPU.

The model knows waves of programs, a multiprocessor's share of tensor cores and of L2, and what a split costs; it need
only keep the winner among the first dozen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

import triton

from manta.kernels.gemm import GemmTiles
from manta.kernels.gemm_skinny import SkinnyTiles, padded_rows
from manta.kernels.gemv import GemvTiles
from manta.kernels.linear import Tiles

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, sm_90."""
_FLOP_PER_S, _READ_BYTES_PER_S, _L2_BYTES_PER_S = 790e12, 4.5e12, 17e12
_FETCH_BYTES_PER_S = 125e9
"""By one multiprocessor: 64 bytes a cycle."""
_SPLIT_S = 1.5e-6
NUM_SKINNY, NUM_TILED, NUM_ALIKE = 12, 12, 2
"""How many of each are measured at most, and how many that differ in block_k, warps and stages alone."""

_SPLITS = (1, 2, 3, 4, 8)
_GEMV = [
    GemvTiles(block_n, block_k, num_warps)
    for block_n, block_k, num_warps in (
        (2, 512, 1), (2, 512, 2), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 512, 2), (4, 512, 4), (4, 1024, 4),
        (4, 1024, 8), (8, 256, 4), (8, 512, 4), (8, 512, 8), (8, 1024, 8),
    )
]  # fmt: skip
_SKINNY = [
    # block_n, block_k, warps, stages
    (64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 4, 3), (64, 256, 4, 3), (64, 64, 4, 6),
    (128, 128, 4, 3), (128, 128, 4, 4), (128, 64, 4, 6), (128, 128, 8, 3), (128, 64, 8, 6),
]  # fmt: skip
_SKINNY_WIDE = [
    # from 64 rows on: two programs on a multiprocessor, or a deep pipeline in one
    (64, 128, 4, 3), (64, 128, 4, 6), (64, 64, 4, 6), (64, 128, 4, 4),
    (128, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 8, 6),
]  # fmt: skip
_TILED = [
    # block_m, block_n, block_k, warps, stages
    (64, 32, 128, 4, 5), (64, 64, 128, 4, 5), (64, 64, 128, 4, 3), (64, 128, 128, 4, 4), (64, 128, 64, 4, 4),
    (64, 256, 64, 8, 4), (64, 256, 64, 4, 4), (128, 32, 128, 4, 4), (128, 64, 128, 4, 4), (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 6), (128, 128, 64, 4, 3), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
    (256, 64, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
]  # fmt: skip


def candidates(kind: str, n_size: int, k_size: int, rows: int, multiprocessors: int) -> list[Tiles]:
    """Configurations for `rows` rows times a weight [n_size, k_size]; `kind` as in the tables."""
    if rows == 1:
        return [tiles for tiles in _GEMV if tiles.block_k <= k_size]
    chosen: list[Tiles] = []
    for all_tiles, count in (
        (_skinny(n_size, k_size, rows, multiprocessors), NUM_SKINNY),
        (_tiled(kind, n_size, k_size, rows, multiprocessors), NUM_TILED),
    ):
        # Within 10 % the order of the lists above stands: what was good elsewhere comes first.
        ordered = sorted(
            all_tiles,
            key=lambda tiles: round(10 * math.log(predicted_s(tiles, n_size, k_size, rows, multiprocessors))),
        )
        chosen += _varied(ordered)[:count]
    return chosen


def _varied(ordered: list[Tiles]) -> list[Tiles]:
    """The same, with those behind all others that differ from `NUM_ALIKE` before them in schedule alone."""
    alike: Counter[tuple[int, ...]] = Counter()
    kept: list[Tiles] = []
    others: list[Tiles] = []
    for tiles in ordered:
        assert not isinstance(tiles, GemvTiles)
        key = (tiles.block_n, tiles.splits)
        if isinstance(tiles, GemmTiles):
            key = (*key, tiles.block_m, tiles.programs)
        alike[key] += 1
        (kept if alike[key] <= NUM_ALIKE else others).append(tiles)
    return kept + others


def _skinny(n_size: int, k_size: int, rows: int, multiprocessors: int) -> Iterator[Tiles]:
    if rows > 128:
        return
    width = padded_rows(rows)
    for block_n, block_k, num_warps, num_stages in _SKINNY if width < 64 else _SKINNY_WIDE:
        if not fits(SkinnyTiles(block_n, block_k, num_warps, num_stages, 1), rows):
            continue
        blocks = triton.cdiv(n_size, block_n)
        for splits in _SPLITS:
            if splits == 1 or (k_size // splits >= 4 * block_k and blocks * splits <= 4 * multiprocessors):
                yield SkinnyTiles(block_n, block_k, num_warps, num_stages, splits)


def fits(tiles: Tiles, rows: int) -> bool:
    """Whether a configuration that is right for other numbers of rows has room on a multiprocessor for these."""
    if not isinstance(tiles, SkinnyTiles):
        return True
    width = padded_rows(rows)
    shared = 2 * tiles.num_stages * tiles.block_k * (tiles.block_n + width)
    return shared <= SHARED_BYTES and tiles.block_n * width // (32 * tiles.num_warps) <= 64


def _tiled(kind: str, n_size: int, k_size: int, rows: int, multiprocessors: int) -> Iterator[Tiles]:
    if rows <= 16:
        return
    for block_m, block_n, block_k, num_warps, num_stages in _TILED:
        if block_m >= 2 * rows and block_m > 64:
            continue
        blocks = triton.cdiv(rows, block_m) * triton.cdiv(n_size, block_n)
        if rows >= 1024 and block_m * block_n < 128 * 128:
            continue
        for subtiles, programs in product((1, 2), (1, 2)):
            if (subtiles == 2 and block_m * block_n < 128 * 256) or programs * block_m * block_n > 256 * 128:
                continue
            for splits in _SPLITS if programs == subtiles == 1 else (1,):
                if splits > 1 and (k_size // splits < 4 * block_k or blocks * splits > 4 * multiprocessors):
                    continue
                tiles = GemmTiles(block_m, block_n, block_k, num_warps, num_stages, splits, subtiles, programs)
                if programs * _shared_bytes(kind, tiles) <= SHARED_BYTES:
                    yield tiles


def _shared_bytes(kind: str, tiles: GemmTiles) -> int:
    """Operands in flight and the tile on its way out; a residual on its way in needs as much again."""
    tile = 2 * tiles.block_m * tiles.block_n // tiles.subtiles
    epilogue = tile if tiles.splits > 1 else {"gated": tile // 2, "plain": tile, "add": 2 * tile}[kind]
    return 2 * tiles.num_stages * tiles.block_k * (tiles.block_m + tiles.block_n) + epilogue + 512


def predicted_s(tiles: Tiles, n_size: int, k_size: int, rows: int, multiprocessors: int) -> float:
    """Seconds by the rough model."""
    assert not isinstance(tiles, GemvTiles)
    if isinstance(tiles, SkinnyTiles):
        block_m, splits = padded_rows(rows), tiles.splits
        shared = 2 * tiles.num_stages * tiles.block_k * (tiles.block_n + block_m)
        resident = max(1, min(4, SHARED_BYTES // (shared + 1024)))
        blocks = triton.cdiv(n_size, tiles.block_n)
    else:
        block_m, splits = tiles.block_m, tiles.splits
        shared = _shared_bytes("plain", tiles)
        resident = tiles.programs if splits == 1 else max(1, min(2, SHARED_BYTES // (shared + 1024)))
        blocks = triton.cdiv(n_size, tiles.block_n) * triton.cdiv(rows, block_m)
    programs = blocks * splits
    waves = triton.cdiv(programs, resident * multiprocessors)
    sharing = min(resident, triton.cdiv(programs, multiprocessors))
    k_part = triton.cdiv(k_size, splits)
    compute_s = 2 * block_m * tiles.block_n * k_part / (_FLOP_PER_S / multiprocessors) * sharing
    fetched = 2 * (block_m + tiles.block_n) * k_part * sharing
    fetch_s = fetched / min(_L2_BYTES_PER_S / multiprocessors, _FETCH_BYTES_PER_S)
    split_s = _SPLIT_S + 8 * programs * block_m * tiles.block_n / _L2_BYTES_PER_S if splits > 1 else 0.0
    read_s = 2 * n_size * k_size / _READ_BYTES_PER_S
    return max(waves * max(compute_s, fetch_s), read_s) + 0.1 * waves * (compute_s + fetch_s) + split_s
