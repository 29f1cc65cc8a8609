"""Who attends to which keys in a decode batch: sequences cut on the device into parts of similar size.

A long sequence among short ones would keep a few programs busy while the device idles, and a small batch would not
fill it. So a batch gets `spare` programs beyond one a sequence, and all sequences are cut by one size that makes them
suffice. The number of programs follows from the number of rows alone, so that captured graphs stay valid; the cuts
follow from the lengths. Knows tables of configurations and workspaces, no attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl

from . import runtime
from .runtime import jit


@dataclass(frozen=True)
class DecodeShape:
    """What a table of configurations is for."""

    num_kv_heads: int
    group: int
    """Query heads a KV head."""
    head_dim: int
    itemsize: int
    page: int
    has_codes: bool = False
    """Whether the cache is one in 8 bits; `itemsize` is then that of the queries."""

    @property
    def operation(self) -> str:
        """Whose table has it."""
        return "attention_decode_codes" if self.has_codes else "attention_decode"

    @property
    def key(self) -> str:
        dtype = f"{8 * self.itemsize} bits" + (" over codes" if self.has_codes else "")
        return f"{self.num_kv_heads} kv heads x {self.group}, dim {self.head_dim}, {dtype}, page {self.page}"


@dataclass(frozen=True)
class DecodeConfig:
    """How a batch is cut and its programs compiled."""

    tile: int
    """Keys a step of the loop."""
    num_warps: int
    num_stages: int
    fill: int
    """At least so many spare parts for the batch,"""
    percent: int
    """and so many a hundred sequences."""
    swapped: bool = False
    """Keys are the rows of the matrix products, query heads the columns: Hopper's instructions take no fewer than 64
    rows, and keys come to them without passing through registers."""
    inline_ptx: bool = False
    """Block ids are read by assembly, which hides them from the pipeliner: it keeps more keys in flight."""
    merges_apart: bool = True
    """The parts of a sequence are merged by a kernel of its own instead of by the last part's program."""

    def spare(self, num_seqs: int) -> int:
        return max(1, self.fill, num_seqs * self.percent // 100)


def decode_config(num_seqs: int, shape: DecodeShape, device: torch.device) -> DecodeConfig:
    """The measured configuration for so many rows, padding counted, or the default for this kind of shape."""
    for entry in _entries(shape, device):
        if num_seqs <= entry.get("rows", num_seqs):
            return config_of(entry)
    return default_config(num_seqs, shape, runtime.num_multiprocessors(device))


def _entries(shape: DecodeShape, device: torch.device) -> list[Mapping[str, Any]]:
    return runtime.tuned_table(shape.operation, device).get(shape.key, [])


def config_of(entry: Mapping[str, Any]) -> DecodeConfig:
    """A table's entry; what it says beyond a configuration is for its readers."""
    names = {field.name for field in fields(DecodeConfig)}
    return DecodeConfig(**{name: value for name, value in entry.items() if name in names})


def default_config(num_seqs: int, shape: DecodeShape, multiprocessors: int) -> DecodeConfig:
    """Small batches are cut until they fill the device; in larger ones only what is 1.5 times the mean or longer is."""
    programs = num_seqs * shape.num_kv_heads
    is_large = programs > 1.5 * multiprocessors
    fill = 1 if is_large else -(-multiprocessors // shape.num_kv_heads)
    percent = 67 if is_large else 200
    if shape.itemsize > 2:
        return DecodeConfig(32 if shape.head_dim <= 64 else 16, 4, 2, fill, percent)
    is_wide = shape.head_dim > 128
    tile = 32 if is_wide else 64
    num_warps = 8 if is_wide and shape.has_codes else 4  # unpacked codes take registers
    num_stages = 3 if programs > 2 * multiprocessors else 5
    return DecodeConfig(tile, num_warps, num_stages, fill, percent, merges_apart=not is_large)


@dataclass(frozen=True)
class DecodeWorkspace:
    """What programs of a batch leave for each other, allocated once so that captured graphs find it in one place."""

    partial: torch.Tensor
    """[partial results, head_dim] fp32 at its fullest; every launch uses a prefix."""
    log_sum: torch.Tensor
    """One base-2 log-sum-exp per row of `partial`."""
    records: torch.Tensor
    """[max_num_seqs, 4] int32: first part, parts; first row of the shared prefix's partial results, their number."""
    arrivals: torch.Tensor
    """[max_num_seqs * kv_heads] int32: parts done. Zero between launches."""

    @staticmethod
    def allocate(
        *, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Room for every batch of 1 to `max_num_seqs` sequences, shared prefixes included."""
        group = num_heads // num_kv_heads
        shapes = _known_shapes(num_kv_heads, group, head_dim, device)
        most = max(num_partial(n, shape, device) for shape in shapes for n in range(1, max_num_seqs + 1))
        return DecodeWorkspace(
            torch.empty((most, head_dim), dtype=torch.float32, device=device),
            torch.empty(most, dtype=torch.float32, device=device),
            torch.empty((max_num_seqs, 4), dtype=torch.int32, device=device),
            torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device),
        )

    def check(self, num_seqs: int, partial_rows: int, num_kv_heads: int) -> None:
        assert num_seqs <= len(self.records), "the workspace is for fewer sequences"
        assert num_seqs * num_kv_heads <= len(self.arrivals)
        assert partial_rows <= len(self.log_sum), "the workspace is for other shapes"


def num_partial(num_seqs: int, shape: DecodeShape, device: torch.device) -> int:
    """Partial results that a batch may have: of its parts and, behind them, of a shared prefix."""
    parts = num_seqs + decode_config(num_seqs, shape, device).spare(num_seqs)
    tiles = prefix_tiles(shape, device)
    slots = prefix_slots(num_seqs, shape, tiles, runtime.num_multiprocessors(device))
    return parts * shape.num_kv_heads * shape.group + slots * shape.num_kv_heads * tiles.block_m


def _known_shapes(num_kv_heads: int, group: int, head_dim: int, device: torch.device) -> list[DecodeShape]:
    """Shapes that need workspaces of different sizes: those with tables, and one a size for all without."""
    shapes = [
        DecodeShape(num_kv_heads, group, head_dim, size, page, has_codes)
        for size in (2, 4)
        for page in (16, 32, 64)
        for has_codes in (False, True)
    ]
    operations = "attention_decode", "attention_decode_codes", "attention_shared_prefix"
    tables = [runtime.tuned_table(operation, device) for operation in operations]
    tuned = [shape for shape in shapes if any(shape.key in table for table in tables)]
    return tuned + [next(shape for shape in shapes if shape.itemsize == size) for size in (2, 4)]


@dataclass(frozen=True)
class PrefixTiles:
    """How the shared prefix is attended to: rows (queries times heads of a group) and keys a tile."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def prefix_tiles(shape: DecodeShape, device: torch.device) -> PrefixTiles:
    """The measured tiles or the default."""
    entry = runtime.tuned_table("attention_shared_prefix", device).get(shape.key)
    if entry is None:
        return default_prefix_tiles(shape)
    return PrefixTiles(entry["block_m"], entry["tile"], entry["num_warps"], entry["num_stages"])


def default_prefix_tiles(shape: DecodeShape) -> PrefixTiles:
    """Tiles of 64 rows, two programs of which share a multiprocessor."""
    rows = triton.next_power_of_2(shape.group)
    if shape.itemsize > 2:
        return PrefixTiles(max(32, rows), 16, 8, 2)
    block_m = max(64, rows)
    return PrefixTiles(block_m, 64 if shape.head_dim <= 128 else 32, 4 if shape.head_dim <= 128 else 8, 3)


def prefix_slots(num_seqs: int, shape: DecodeShape, tiles: PrefixTiles, multiprocessors: int) -> int:
    """Programs for the prefix and one KV head: one a tile of rows, or as many as fill the device with key parts."""
    queries = tiles.block_m // triton.next_power_of_2(shape.group)
    wanted = (2 if tiles.num_warps <= 4 else 1) * multiprocessors // shape.num_kv_heads
    return max(-(-num_seqs // queries), wanted, 1)


def block_seqs(num_seqs: int) -> int:
    """Rows that a program scans to find its part; few values, so that few kernels are compiled."""
    if num_seqs == 1:
        return 1
    return next((size for size in (32, 256) if num_seqs <= size), max(1024, triton.next_power_of_2(num_seqs)))


@jit
def find_part(
    pid_part,
    seq_lens_ptr,
    members_ptr,
    num_shared,
    num_seqs,
    fill,
    percent,
    TILE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
):
    """Return the sequence that part `pid_part` belongs to (`num_seqs`: none), its first part and number of parts.

    Members have their keys from num_shared on, others from 0. Parts are numbered through, sequence by sequence.
    """
    if BLOCK_SEQS == 1:
        first = pid_part * 0
        num_tiles = _own_tiles(seq_lens_ptr, members_ptr, num_shared, first, first < num_seqs, TILE)
        size = _part_size(num_tiles, 1, fill, percent)
        num_parts = tl.cdiv(num_tiles, size)
        seq = tl.where(pid_part < num_parts, 0, 1)
    else:
        offs = tl.arange(0, BLOCK_SEQS)
        tiles = _own_tiles(seq_lens_ptr, members_ptr, num_shared, offs, offs < num_seqs, TILE)
        size = _part_size(tl.sum(tiles, 0), tl.sum((tiles > 0).to(tl.int32), 0), fill, percent)
        parts = (tiles + size - 1) // size
        ends = tl.cumsum(parts, 0)
        is_before = (ends <= pid_part) & (offs < num_seqs)
        seq = tl.sum(is_before.to(tl.int32), 0)
        first = tl.max(tl.where(is_before, ends, 0), 0)
        num_tiles = _own_tiles(seq_lens_ptr, members_ptr, num_shared, seq, seq < num_seqs, TILE)
        num_parts = tl.cdiv(num_tiles, size)
    return seq, first, num_parts


@jit
def _own_tiles(seq_lens_ptr, members_ptr, num_shared, offs, mask, TILE: tl.constexpr):
    lengths = tl.load(seq_lens_ptr + offs, mask=mask, other=0)
    if members_ptr is not None:
        lengths -= num_shared * (tl.load(members_ptr + offs, mask=mask, other=0) != 0).to(tl.int32)
    return (tl.maximum(lengths, 0) + TILE - 1) // TILE


@jit
def _part_size(num_tiles, num_live, fill, percent):
    """Tiles a part such that at most `fill` or `percent` of `num_live` parts come on top of one a live sequence."""
    spare = tl.maximum(tl.maximum(fill, num_live * percent // 100), 1)
    return tl.maximum((num_tiles + spare - 1) // spare, 1)
