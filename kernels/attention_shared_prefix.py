"""Decode attention of rows that share their first tokens: the shared part is read once for all of them.

The members' queries, packed with the heads of their groups, attend to the prefix as the rows of large tiles, so that
each tile of keys is read once a tile of queries; the rest of every row is attended to as in plain decode; both are
merged by their log-sum-exp (cascade attention). Knows the cache's layout, no model and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from . import decode_schedule, runtime
from .attention_decode import LOG2_E, attention_decode_reference, launch_parts, page_of
from .decode_schedule import DecodeShape, DecodeWorkspace
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .merge_parts import launch_merge
from .quantized.kv_cache import CacheScales, check_scales, head_values
from .runtime import jit


@dataclass(frozen=True)
class SharedPrefix:
    """Which rows share what, on the device, so that one captured graph serves any lengths and memberships."""

    num_tokens: torch.Tensor
    """[1] int32, a multiple of the block size; 0: nothing is shared."""
    table_row: torch.Tensor
    """[1] int32, the row of the block table that names the shared blocks."""
    members: torch.Tensor
    """[seqs] int32: 1 where a row's first tokens are the shared ones. Rows of length 0 may be marked either way."""


MIN_MEMBERS = 4
MIN_SAVED_TOKENS = 16384


def pays(num_members: int, num_prefix_tokens: int, num_rows: int) -> bool:
    """Whether attending to the prefix once is faster than for each row, by measurements on an H200.

    The pass over the prefix and the merge cost about as much as reading MIN_SAVED_TOKENS of Llama-3.1-8B's cache.
    """
    del num_rows  # members are packed on the device: other rows cost next to nothing
    return num_members >= MIN_MEMBERS and (num_members - 1) * num_prefix_tokens >= MIN_SAVED_TOKENS


@jit(
    do_not_specialize=["num_seqs", "num_slots", "prefix_begin", "table_stride"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "members_ptr", "table_row_ptr", "num_shared_ptr"],
)
def _shared_prefix_kernel(
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    table_row_ptr,
    seq_lens_ptr,
    members_ptr,
    num_shared_ptr,
    partial_ptr,
    log_sum_ptr,
    records_ptr,
    scale_log2,
    q_stride,
    q_head_stride,
    table_stride,
    num_seqs,
    num_slots,
    prefix_begin,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    CODES_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one KV head, a tile of members' queries with the heads of the group, one part of the prefix.

    As many parts as the `num_slots` programs allow for the tiles that there are. Leaves partial results at row
    prefix_begin + (slot * kv_heads + kv_head) * BLOCK_M + row of the tile, and for each member a record of where.
    With `key_scales_ptr` the cache has codes, times those scales, as in plain decode.
    """
    pid_kv = tl.program_id(0)
    pid_slot = tl.program_id(1)
    QUERIES: tl.constexpr = BLOCK_M // BLOCK_GROUP
    if PDL:
        wait_for_predecessor()
    num_shared = tl.load(num_shared_ptr)
    num_members = pid_slot * 0
    for begin in range(0, num_seqs, BLOCK_SEQS):
        is_member = _is_member(members_ptr, seq_lens_ptr, begin + tl.arange(0, BLOCK_SEQS), num_seqs)
        num_members += tl.sum(is_member, 0)
    num_query_tiles = tl.cdiv(num_members, QUERIES)
    num_key_tiles = tl.cdiv(num_shared, TILE)
    num_parts = tl.minimum(num_slots // tl.maximum(num_query_tiles, 1), num_key_tiles)
    query_tile = pid_slot // tl.maximum(num_parts, 1)
    if num_parts == 0 or query_tile >= num_query_tiles:
        return
    part = pid_slot % num_parts

    query = query_tile * QUERIES + tl.arange(0, QUERIES)
    seqs = tl.zeros([QUERIES], tl.int32)
    num_before = pid_slot * 0
    for begin in range(0, num_seqs, BLOCK_SEQS):  # the row of the tile's i-th member
        offs = begin + tl.arange(0, BLOCK_SEQS)
        is_member = _is_member(members_ptr, seq_lens_ptr, offs, num_seqs)
        rank = num_before + tl.cumsum(is_member, 0) - 1
        is_it = (rank[None, :] == query[:, None]) & (is_member[None, :] != 0)
        seqs += tl.sum(tl.where(is_it, offs[None, :], 0), 1)
        num_before += tl.sum(is_member, 0)
    mask_query = query < num_members
    record = records_ptr + seqs * 4
    slot_row = query_tile * num_parts * (KV_HEADS * BLOCK_M) + tl.arange(0, QUERIES) * BLOCK_GROUP
    if part == 0 and pid_kv == 0:
        tl.store(record + 2, slot_row, mask=mask_query)
        tl.store(record + 3, slot_row * 0 + num_parts, mask=mask_query)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_tile = tl.arange(0, TILE)
    mask_d = offs_d < HEAD_DIM
    row_seq = tl.reshape(tl.broadcast_to(seqs[:, None], [QUERIES, BLOCK_GROUP]), [BLOCK_M])
    head = pid_kv * GROUP + offs_m % BLOCK_GROUP
    mask_m = (query_tile * QUERIES + offs_m // BLOCK_GROUP < num_members) & (offs_m % BLOCK_GROUP < GROUP)
    q_offset = row_seq.to(tl.int64)[:, None] * q_stride + head[:, None] * q_head_stride + offs_d[None, :]
    q = tl.load(q_ptr + q_offset, mask=mask_m[:, None] & mask_d[None, :], other=0.0)  # [queries * group, dim]

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
    table_row = block_table_ptr + tl.load(table_row_ptr).to(tl.int64) * table_stride
    last_page = (num_shared - 1) // PAGE
    offs_kv = (pid_kv * HEAD_DIM + offs_d)[None, :]
    key_begin = part * num_key_tiles // num_parts * TILE
    key_end = (part + 1) * num_key_tiles // num_parts * TILE
    for start in range(key_begin, key_end, TILE):
        if PAGE % TILE == 0:  # whole tiles, each inside one page
            page = page_of(table_row, tl.minimum(start // PAGE, last_page), INLINE_PTX)
            tile_begin = (page * PAGE + start % PAGE) * SLOT  # pyright: ignore[reportOperatorIssue]
            k_ptrs = key_cache_ptr + tile_begin + (offs_tile[:, None] * SLOT + offs_kv)
            v_ptrs = value_cache_ptr + tile_begin + (offs_tile[:, None] * SLOT + offs_kv)
            if BLOCK_D == HEAD_DIM:
                k = tl.load(k_ptrs)  # [tile, dim]
                v = tl.load(v_ptrs)
            else:
                k = tl.load(k_ptrs, mask=mask_d[None, :], other=0.0)
                v = tl.load(v_ptrs, mask=mask_d[None, :], other=0.0)
            mask_key = offs_tile < TILE
            tile_scales = (page * KV_HEADS + pid_kv) * PAGE + start % PAGE  # pyright: ignore[reportOperatorIssue]
            offs_scale = tile_scales + offs_tile
        else:
            key_pos = start + offs_tile
            page = tl.load(table_row + tl.minimum(key_pos // PAGE, last_page)).to(tl.int64)
            slot = page * PAGE + key_pos % PAGE
            mask_key = key_pos < num_shared
            mask_kv = mask_key[:, None] & mask_d[None, :]
            offs_scale = (page * KV_HEADS + pid_kv) * PAGE + key_pos % PAGE
            k = tl.load(key_cache_ptr + (slot[:, None] * SLOT + offs_kv), mask=mask_kv, other=0.0)
            v = tl.load(value_cache_ptr + (slot[:, None] * SLOT + offs_kv), mask=mask_kv, other=0.0)
        if key_scales_ptr is None:
            score_scales = scale_log2
        else:
            k = head_values(k, q.dtype, CODES_PTX)
            v = head_values(v, q.dtype, CODES_PTX)
            score_scales = tl.load(key_scales_ptr + offs_scale, mask=mask_key, other=0.0)[None, :] * scale_log2
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scales  # [rows, tile]
        if PAGE % TILE != 0:
            scores = tl.where(mask_key[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if value_scales_ptr is not None:
            weights = weights * tl.load(value_scales_ptr + offs_scale, mask=mask_key, other=0.0)[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max

    if PDL:
        let_successor_start()
    row = prefix_begin + (pid_slot * KV_HEADS + pid_kv).to(tl.int64) * BLOCK_M + offs_m
    mask_out = mask_m[:, None] & mask_d[None, :]
    tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], acc / running_sum[:, None], mask=mask_out)
    tl.store(log_sum_ptr + row, running_max + tl.log2(running_sum), mask=mask_m)


@jit
def _is_member(members_ptr, seq_lens_ptr, offs, num_seqs):
    mask = offs < num_seqs
    is_member = tl.load(members_ptr + offs, mask=mask, other=0) != 0
    return (is_member & (tl.load(seq_lens_ptr + offs, mask=mask, other=0) > 0)).to(tl.int32)


def attention_shared_prefix(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace | None,
    max_seq_len: int,
    table_rows: torch.Tensor | None,
    prefix: SharedPrefix,
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """As `attention_decode`, for a batch in which many rows share their first tokens; equal to it up to rounding.

    A member's length includes the prefix and is at least as long. The grid follows from the number of rows alone.
    """
    num_seqs, num_heads, head_dim = q.shape
    page, num_kv_heads = key_cache.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert max_seq_len <= block_table.shape[1] * page
    if not runtime.use_triton(q):
        places = block_table, seq_lens, scale, out, table_rows
        return attention_decode_reference(q, key_cache, value_cache, *places, scales)
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if num_seqs == 0:
        return out
    if scales is not None:
        check_scales(scales, key_cache)
    shape = DecodeShape(
        num_kv_heads, num_heads // num_kv_heads, head_dim, q.element_size(), page, has_codes=scales is not None
    )
    config = replace(decode_schedule.decode_config(num_seqs, shape, q.device), merges_apart=True)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            max_num_seqs=num_seqs,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=q.device,
        )
    tiles = decode_schedule.prefix_tiles(shape, q.device)
    num_slots = decode_schedule.prefix_slots(num_seqs, shape, tiles, runtime.num_multiprocessors(q.device))
    prefix_begin = (num_seqs + config.spare(num_seqs)) * num_heads
    workspace.check(num_seqs, prefix_begin + num_slots * num_kv_heads * tiles.block_m, num_kv_heads)
    dependent = has_dependent_launch(q)
    _shared_prefix_kernel[(num_kv_heads, num_slots)](
        q,
        key_cache,
        value_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        block_table,
        prefix.table_row,
        seq_lens,
        prefix.members,
        prefix.num_tokens,
        workspace.partial,
        workspace.log_sum,
        workspace.records,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        num_seqs,
        num_slots,
        prefix_begin,
        KV_HEADS=num_kv_heads,
        GROUP=shape.group,
        HEAD_DIM=head_dim,
        PAGE=page,
        BLOCK_SEQS=128,
        BLOCK_GROUP=triton.next_power_of_2(shape.group),
        BLOCK_M=tiles.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        TILE=tiles.tile,
        INLINE_PTX=runtime.has_inline_ptx(q),
        CODES_PTX=scales is not None and runtime.has_inline_ptx(q),
        PDL=dependent,
        launch_pdl=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    launch_parts(
        q, key_cache, value_cache, block_table, seq_lens, scale, out, workspace=workspace, table_rows=table_rows,
        shape=shape, config=config, members=prefix.members, num_shared=prefix.num_tokens, scales=scales,
    )  # fmt: skip
    launch_merge(
        seq_lens, out, workspace=workspace, shape=shape, members=prefix.members, num_shared=prefix.num_tokens,
        prefix_begin=prefix_begin, prefix_rows=tiles.block_m,
    )  # fmt: skip
    return out
