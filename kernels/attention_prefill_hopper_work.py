"""What programs of the Hopper prefill kernel work on, in which order, and its copying warp. Knows no arithmetic.

See attention_prefill_hopper, whose computing warps wait for what is copied here.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_names import copy_box

# Gluon's stubs know neither plain values for constexpr parameters nor its own loops.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
jit: Any = gluon.jit


@jit
def find_tile(
    turn,
    batch,
    KV_HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):
    """What this program does in its `turn`: KV head, sequence, its first query's row, its number of queries, the tile's
    first query and the sequence's length. There is nothing to do where first_query >= query_len.

    Items are a head and a tile, numbered from the heaviest on; tiles have the numbers that they have in the other
    kernel. The order of programs turns around after each turn, so that all get the same sum of work.
    """
    query_start_ptr, seq_lens_ptr, num_tiles, num_seqs = batch
    num_programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), num_programs - 1 - gl.program_id(0))
    item = turn * num_programs + place
    if HEADS_FIRST:
        pid_kv = item % KV_HEADS
        pid_tile = num_tiles - 1 - item // KV_HEADS
    else:
        pid_kv = item // num_tiles
        pid_tile = gl.where(pid_kv < KV_HEADS, num_tiles - 1 - item % num_tiles, -1)
    low = item * 0
    high = low + num_seqs
    while high - low > 1:  # the last sequence whose first tile is not behind pid_tile
        middle = (low + high) // 2
        is_left = gl.load(query_start_ptr + middle) // QUERIES + middle <= pid_tile
        low = gl.where(is_left, middle, low)
        high = gl.where(is_left, high, middle)
    query_begin = gl.load(query_start_ptr + low)
    seq_len = gl.load(seq_lens_ptr + low)
    # Queries of a sequence without keys would wait for a tile that nobody copies.
    is_real = (pid_tile >= 0) & (seq_len > 0)
    query_len = gl.where(is_real, gl.load(query_start_ptr + low + 1) - query_begin, 0)
    first_query = gl.where(is_real, (pid_tile - (query_begin // QUERIES + low)) * QUERIES, 0)
    return pid_kv, low, query_begin, query_len, first_query, seq_len


@jit
def num_key_tiles_of(first_query, query_len, seq_len, QUERIES: gl.constexpr, TILE: gl.constexpr):
    """Tiles of keys up to the one that the last query of a tile sees last."""
    return (seq_len - query_len + gl.minimum(first_query + QUERIES, query_len) + TILE - 1) // TILE


@jit
def copy_keys_and_values(
    key_descriptor,
    value_descriptor,
    key_memory,
    value_memory,
    barriers,
    block_table_ptr,
    table_rows_ptr,
    table_stride,
    batch,
    KV_HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):
    """The copying warp: fill a stage when both groups have left it."""
    PARTS: gl.constexpr = TILE // 64
    keys_full, keys_empty, values_full, values_empty, _turns = barriers
    count = 0
    for turn in range((batch[2] * KV_HEADS + gl.num_programs(0) - 1) // gl.num_programs(0)):
        pid_kv, sequence, _, query_len, first_query, seq_len = find_tile(turn, batch, KV_HEADS, QUERIES, HEADS_FIRST)
        if first_query < query_len:
            row = sequence if table_rows_ptr is None else gl.load(table_rows_ptr + sequence)
            table_row = block_table_ptr + row.to(gl.int64) * table_stride
            num_pages = (seq_len + PAGE - 1) // PAGE
            head_offset = pid_kv * HEAD_DIM
            slot_0 = _slot_of(table_row, 0, num_pages, PAGE)
            slot_1 = _slot_of(table_row, TILE - 64, num_pages, PAGE)
            for tile in range(num_key_tiles_of(first_query, query_len, seq_len, QUERIES, TILE)):
                next_key = (tile + 1) * TILE  # its pages are read before the wait, so that they are there after it
                next_0 = _slot_of(table_row, next_key, num_pages, PAGE)
                next_1 = _slot_of(table_row, next_key + TILE - 64, num_pages, PAGE)
                stage = count % STAGES
                parity = (count // STAGES + 1) & 1
                mbarrier.wait(keys_empty.index(stage), parity)
                _copy_tile(key_descriptor, key_memory, keys_full, stage, head_offset, slot_0, slot_1, HEAD_DIM, PARTS)
                mbarrier.wait(values_empty.index(stage), parity)
                _copy_tile(
                    value_descriptor, value_memory, values_full, stage, head_offset, slot_0, slot_1, HEAD_DIM, PARTS
                )
                slot_0 = next_0
                slot_1 = next_1
                count += 1


@jit
def _slot_of(table_row, key, num_pages, PAGE: gl.constexpr):
    page = gl.load(table_row + gl.minimum(key // PAGE, num_pages - 1))
    return page * PAGE + key % PAGE


@jit
def _copy_tile(
    descriptor, memory, full, stage, head_offset, slot_0, slot_1, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr
):
    """Start the copies of one tile. Boxes stand column block by column block, as the matrix instructions expect."""
    mbarrier.expect(full.index(stage), PARTS * 64 * HEAD_DIM * 2)
    for column in gl.static_range(HEAD_DIM // 64):
        box = (stage * (HEAD_DIM // 64) + column) * PARTS
        copy_box(descriptor, [slot_0, head_offset + column * 64], full.index(stage), memory.index(box))
        if PARTS == 2:
            copy_box(descriptor, [slot_1, head_offset + column * 64], full.index(stage), memory.index(box + 1))
