"""Attention of one query a sequence over the paged cache, with the keys split over programs (flash decoding).

Knows the cache's layout [num_blocks, block_size, kv_heads, head_dim], no model and no scheduler. Which program takes
which keys is said by kernels/decode_schedule; partial results are put together by kernels/merge_parts. Where new tokens
come along (`NewTokens`), queries and keys are turned here and the cache is written before it is read: a kernel less in
each layer of a decode step.

Of a cache in 8 bits (kernels/quantized/kv_cache) the products take the codes, which 16 bits hold exactly; the scales of
keys multiply the scores and those of values the weights, so that no tile is multiplied out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import decode_schedule, runtime
from .decode_schedule import DecodeConfig, DecodeShape, DecodeWorkspace, find_part
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .merge_parts import launch_merge, merge_group
from .quantized.kv_cache import CacheScales, check_scales, dequantized_blocks, head_values
from .rope import rope_and_store_reference, turn
from .runtime import jit

LOG2_E = 1.4426950408889634


class NewTokens(NamedTuple):
    """What the sequences' last tokens add to the cache, and the angles by position, as `rope_and_store` takes them."""

    keys: torch.Tensor
    """[seqs, kv_heads, dim], not turned."""
    values: torch.Tensor
    """[seqs, kv_heads, dim], with the strides of the keys and q's row stride."""
    cos_sin: torch.Tensor
    """[max_position, rot_dim] fp32: cosines, then sines."""


def attention_decode_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
    scales: CacheScales | None = None,
    new: NewTokens | None = None,
) -> torch.Tensor:
    """See `attention_decode`. Sequences of similar length share one padded call."""
    block_table = block_table if table_rows is None else block_table.index_select(0, table_rows)
    if new is not None:
        q, keys = q.clone(), new.keys.clone()
        positions = seq_lens.long().clamp_min(1) - 1
        block_size = key_cache.shape[1]
        blocks = block_table.long().gather(1, positions[:, None] // block_size)[:, 0]
        slots = torch.where(seq_lens > 0, blocks * block_size + positions % block_size, -1)
        rope_and_store_reference(q, keys, new.values, positions, new.cos_sin, key_cache, value_cache, slots)
    if scales is not None:
        places = block_table, seq_lens
        key_cache, value_cache, block_table = dequantized_blocks(key_cache, value_cache, scales, *places)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lengths: list[int] = seq_lens.tolist()
    for rows in _groups_of_similar_length(lengths):
        whole = len(rows) == q.shape[0]
        index = slice(None) if whole else torch.tensor(rows, device=q.device)
        longest = max(lengths[row] for row in rows)
        if min(lengths[row] for row in rows) == longest:
            keys, values = gather_equal(key_cache, value_cache, block_table[index], longest)
            mask = None
        else:
            keys, values, mask = _gather_padded(key_cache, value_cache, block_table[index], seq_lens[index], longest)
        out[index] = _grouped_attention(q[index], keys, values, scale, mask).to(out.dtype)
    return out


def _groups_of_similar_length(lengths: list[int]) -> list[list[int]]:
    """Rows whose padded lengths waste at most about half of the work, empty rows left out."""
    rows = [row for row, length in enumerate(lengths) if length > 0]
    if not rows:
        return []
    if len(rows) * max(lengths) <= 2 * sum(lengths):
        return [rows]
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(lengths[row].bit_length(), []).append(row)
    return list(groups.values())


def gather_equal(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_table: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [rows, length, kv_heads, dim] of sequences of one length, for reading only.

    A copy, or a view where a single sequence's blocks lie side by side.
    """
    num_blocks = -(-length // key_cache.shape[1])
    ids = block_table[:, :num_blocks]
    if ids.shape[0] == 1 and (block_ids := ids[0].tolist()) == list(range(block_ids[0], block_ids[0] + num_blocks)):
        chosen = slice(block_ids[0], block_ids[0] + num_blocks)
        keys, values = key_cache[chosen], value_cache[chosen]
    else:
        keys, values = key_cache.index_select(0, ids.reshape(-1)), value_cache.index_select(0, ids.reshape(-1))
    shape = (ids.shape[0], -1, *key_cache.shape[2:])
    return keys.view(shape)[:, :length], values.view(shape)[:, :length]


def _gather_padded(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [rows, longest, kv_heads, dim] and the mask [rows, 1, 1, longest] of the real ones.

    Padding repeats the sequence's first token: what lies in unwritten slots could be NaN, which no mask would silence.
    """
    block_size = key_cache.shape[1]
    token = torch.arange(longest, device=key_cache.device)
    mask = token < seq_lens[:, None]
    token = torch.where(mask, token, 0)
    slots = (block_table.long().gather(1, token // block_size) * block_size + token % block_size).reshape(-1)
    shape = (len(seq_lens), longest, *key_cache.shape[2:])
    keys = key_cache.view(-1, *key_cache.shape[2:]).index_select(0, slots).view(shape)
    values = value_cache.view(-1, *value_cache.shape[2:]).index_select(0, slots).view(shape)
    return keys, values, mask[:, None, None, :]


def _grouped_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """[rows, heads, dim] over [rows, length, kv_heads, dim]: the query heads of a group act as its queries."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
    attended = torch.nn.functional.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2).float(), values.transpose(1, 2).float(), attn_mask=mask, scale=scale
    )
    return attended.reshape(num_rows, num_heads, head_dim)


@jit
def page_of(table_row, index, INLINE_PTX: tl.constexpr):
    """Read one block id."""
    if INLINE_PTX:
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [table_row + index], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(table_row + index)
    return page.to(tl.int64)


@jit(
    do_not_specialize=["num_seqs", "fill", "percent", "table_stride"],
    do_not_specialize_on_alignment=["table_rows_ptr", "seq_lens_ptr", "members_ptr", "num_shared_ptr"],
)
def _attention_decode_kernel(
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    members_ptr,
    num_shared_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    records_ptr,
    arrivals_ptr,
    new_keys_ptr,
    new_values_ptr,
    cos_sin_ptr,
    scale_log2,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    new_head_stride,
    table_stride,
    num_seqs,
    fill,
    percent,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SWAPPED: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    CODES_PTX: tl.constexpr,
    MERGES_APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one part of one sequence, one KV head with its group of query heads.

    The only part of a sequence writes its output. Others leave partial results, merged by the part that is done last
    or, MERGES_APART, by a kernel of its own. With `members_ptr`, the keys of a member start behind the shared prefix
    and its parts always leave partial results. With `key_scales_ptr` the cache has codes, times those scales. With
    `new_keys_ptr` the program of a sequence's last part writes its last key and value before it reads them.
    """
    pid_kv = tl.program_id(0)
    pid_part = tl.program_id(1)
    num_shared = pid_kv * 0
    if members_ptr is not None:
        num_shared = tl.load(num_shared_ptr)
    seq, first_part, num_parts = find_part(
        pid_part, seq_lens_ptr, members_ptr, num_shared, num_seqs, fill, percent, TILE, BLOCK_SEQS
    )
    seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=1)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    if new_keys_ptr is not None:
        HALF: tl.constexpr = ROT_DIM // 2
        is_first = offs_d < HALF
        offs_other = tl.where(is_first, offs_d + HALF, offs_d - HALF)
        mask_turn = offs_d < ROT_DIM
        angles = cos_sin_ptr + (seq_len - 1).to(tl.int64) * ROT_DIM + tl.where(is_first, offs_d, offs_other)
        cos = tl.load(angles, mask=mask_turn, other=1.0)
        sin = tl.load(angles + HALF, mask=mask_turn, other=0.0)
        sin = tl.where(is_first, -sin, sin)
    if PDL:
        wait_for_predecessor()
    if seq >= num_seqs:
        return
    if members_ptr is not None:
        num_shared = tl.where(tl.load(members_ptr + seq) != 0, num_shared, 0)
    part = pid_part - first_part
    num_tiles = tl.cdiv(seq_len - num_shared, TILE)
    begin = num_shared + part * num_tiles // num_parts * TILE
    end = tl.minimum(num_shared + (part + 1) * num_tiles // num_parts * TILE, seq_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_tile = tl.arange(0, TILE)
    mask_m = offs_m < GROUP
    head = pid_kv * GROUP + offs_m
    q_rows = q_ptr + seq.to(tl.int64) * q_stride + head[:, None] * q_head_stride
    q = tl.load(q_rows + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0)  # [group, dim]

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_D], tl.float32)
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
    table_row_id = seq if table_rows_ptr is None else tl.load(table_rows_ptr + seq)
    table_row = block_table_ptr + table_row_id.to(tl.int64) * table_stride
    last_page = (seq_len - 1) // PAGE
    offs_kv = (pid_kv * HEAD_DIM + offs_d)[None, :]
    if new_keys_ptr is not None:
        mask_other = mask_m[:, None] & mask_turn[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
        other = tl.load(q_rows + offs_other[None, :], mask=mask_other, other=0.0)  # pyright: ignore
        q = turn(q, other, cos[None, :], sin[None, :], q.dtype)  # pyright: ignore[reportPossiblyUnboundVariable]
        if part == num_parts - 1:
            new_row = seq.to(tl.int64) * q_stride + pid_kv * new_head_stride
            key = tl.load(new_keys_ptr + new_row + offs_d, mask=mask_d, other=0.0)
            other_key = tl.load(new_keys_ptr + new_row + offs_other, mask=mask_turn, other=0.0)  # pyright: ignore
            value = tl.load(new_values_ptr + new_row + offs_d, mask=mask_d, other=0.0)
            slot = tl.load(table_row + last_page).to(tl.int64) * PAGE + (seq_len - 1) % PAGE
            place = slot * SLOT + pid_kv * HEAD_DIM + offs_d
            tl.store(key_cache_ptr + place, turn(key, other_key, cos, sin, key.dtype), mask=mask_d)  # pyright: ignore
            tl.store(value_cache_ptr + place, value, mask=mask_d)
            tl.debug_barrier()  # all threads' elements are written before any is read
    for start in range(begin, end, TILE):
        key_pos = start + offs_tile
        mask_key = key_pos < end
        if PAGE % TILE == 0:  # a tile lies inside one page
            # The pipeliner runs ahead of the loop's end: the index is clamped so that it stays in the table's row.
            page = page_of(table_row, tl.minimum(start // PAGE, last_page), INLINE_PTX)
            tile_begin = (page * PAGE + start % PAGE) * SLOT  # pyright: ignore[reportOperatorIssue]
            k_ptrs = key_cache_ptr + tile_begin + (offs_tile[:, None] * SLOT + offs_kv)
            v_ptrs = value_cache_ptr + tile_begin + (offs_tile[:, None] * SLOT + offs_kv)
            tile_scales = (page * KV_HEADS + pid_kv) * PAGE + start % PAGE  # pyright: ignore[reportOperatorIssue]
            offs_scale = tile_scales + offs_tile
        else:
            page = tl.load(table_row + key_pos // PAGE, mask=mask_key, other=0).to(tl.int64)
            offs_scale = (page * KV_HEADS + pid_kv) * PAGE + key_pos % PAGE
            slot = page * PAGE + key_pos % PAGE
            k_ptrs = key_cache_ptr + (slot[:, None] * SLOT + offs_kv)
            v_ptrs = value_cache_ptr + (slot[:, None] * SLOT + offs_kv)
        mask_kv = mask_key[:, None]
        if BLOCK_D != HEAD_DIM:
            mask_kv = mask_kv & mask_d[None, :]
        k = tl.load(k_ptrs, mask=mask_kv, other=0.0)  # [tile, dim]
        v = tl.load(v_ptrs, mask=mask_kv, other=0.0)
        if key_scales_ptr is None:
            score_scales = scale_log2
        else:
            k = head_values(k, q.dtype, CODES_PTX)
            v = head_values(v, q.dtype, CODES_PTX)
            score_scales = tl.load(key_scales_ptr + offs_scale, mask=mask_key, other=0.0) * scale_log2  # [tile]
            score_scales = score_scales[:, None] if SWAPPED else score_scales[None, :]
        if SWAPPED:
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * score_scales  # [tile, group]
            scores = tl.where(mask_key[:, None], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 0))
            weights = tl.exp2(scores - new_max[None, :])
            rescale = tl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + tl.sum(weights, 0)
            acc = acc * rescale[None, :]
            if value_scales_ptr is not None:
                weights = weights * tl.load(value_scales_ptr + offs_scale, mask=mask_key, other=0.0)[:, None]
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scales  # [group, tile]
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
    if SWAPPED:
        acc = tl.trans(acc)
    acc = acc / running_sum[:, None]
    mask_out = mask_m[:, None] & mask_d[None, :]
    out_offset = seq.to(tl.int64) * out_stride + head[:, None] * out_head_stride + offs_d[None, :]
    if num_parts == 1 and num_shared == 0:
        tl.store(out_ptr + out_offset, acc.to(out_ptr.dtype.element_ty), mask=mask_out)
        if MERGES_APART and pid_kv == 0:
            tl.store(records_ptr + seq * 4 + 1, 1)
    else:
        row = pid_part.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_out)
        tl.store(log_sum_ptr + row, running_max + tl.log2(running_sum), mask=mask_m)
        if MERGES_APART:
            if part == 0 and pid_kv == 0:
                tl.store(records_ptr + seq * 4, first_part)
                tl.store(records_ptr + seq * 4 + 1, num_parts)
        else:
            tl.debug_barrier()  # all threads' results are written before the arrival is
            arrival = arrivals_ptr + seq * KV_HEADS + pid_kv
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrival, 0)
                first_row = first_part.to(tl.int64) * (KV_HEADS * GROUP) + head
                merged = merge_group(
                    partial_ptr, log_sum_ptr, first_row, KV_HEADS * GROUP, num_parts, mask_m, HEAD_DIM, BLOCK_M, BLOCK_D
                )
                tl.store(out_ptr + out_offset, merged.to(out_ptr.dtype.element_ty), mask=mask_out)


def attention_decode(
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
    table_rows: torch.Tensor | None = None,
    scales: CacheScales | None = None,
    new: NewTokens | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v for one query a sequence, [seqs, heads, dim].

    `q` [seqs, heads, dim] (last dimension contiguous); caches [num_blocks, block_size, kv_heads, dim], contiguous;
    `block_table` [seqs, max_blocks] int32; with `table_rows` [seqs] int32, sequence i's blocks stand in row
    table_rows[i] of it. `seq_lens` [seqs] int32 counts the query's own token, whose k and v are in the cache already.
    Rows with length 0 are skipped and their output stays as it was. `workspace` is needed inside CUDA graphs, else the
    launcher allocates. The grid follows from the number of rows alone; `max_seq_len` is a bound that the caller vouches
    for (the block table must cover it). `scales`: of caches in 8 bits. `new`: q and the new keys are not turned yet and
    the cache, of 16 or 32 bits, lacks the queries' own tokens; it is written first, q stays as it was.
    """
    num_seqs, num_heads, head_dim = q.shape
    page, num_kv_heads = key_cache.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert max_seq_len <= block_table.shape[1] * page
    if not runtime.use_triton(q):
        places = block_table, seq_lens, scale, out, table_rows
        return attention_decode_reference(q, key_cache, value_cache, *places, scales, new)
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    if num_seqs == 0:
        return out
    shape = DecodeShape(
        num_kv_heads, num_heads // num_kv_heads, head_dim, q.element_size(), page, has_codes=scales is not None
    )
    config = decode_schedule.decode_config(num_seqs, shape, q.device)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            max_num_seqs=num_seqs,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=q.device,
        )
    launch_parts(
        q, key_cache, value_cache, block_table, seq_lens, scale, out,
        workspace=workspace, table_rows=table_rows, shape=shape, config=config, scales=scales, new=new,
    )  # fmt: skip
    if config.merges_apart:
        launch_merge(seq_lens, out, workspace=workspace, shape=shape)
    return out


def launch_parts(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    workspace: DecodeWorkspace,
    table_rows: torch.Tensor | None,
    shape: DecodeShape,
    config: DecodeConfig,
    members: torch.Tensor | None = None,
    num_shared: torch.Tensor | None = None,
    scales: CacheScales | None = None,
    new: NewTokens | None = None,
) -> None:
    """Attend to every sequence's keys, from `num_shared` [1] on where `members` [seqs] is not 0."""
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert block_table.stride(1) == 1
    assert q.stride(2) == 1
    assert out.stride(2) == 1
    if scales is not None:
        check_scales(scales, key_cache)
    if new is not None:
        assert scales is None
        assert members is None
        assert new.keys.shape == new.values.shape
        assert new.keys.stride() == new.values.stride()
        assert new.keys.stride(0) == q.stride(0)
        assert new.keys.stride(2) == 1
        assert new.cos_sin.is_contiguous()
    num_seqs = q.shape[0]
    num_parts = num_seqs + config.spare(num_seqs)
    workspace.check(num_seqs, num_parts * q.shape[1], shape.num_kv_heads)
    dependent = has_dependent_launch(q)
    _attention_decode_kernel[(shape.num_kv_heads, num_parts)](
        q,
        key_cache,
        value_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        block_table,
        table_rows,
        seq_lens,
        members,
        num_shared,
        out,
        workspace.partial,
        workspace.log_sum,
        workspace.records,
        workspace.arrivals,
        None if new is None else new.keys,
        None if new is None else new.values,
        None if new is None else new.cos_sin,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        0 if new is None else new.keys.stride(1),
        block_table.stride(0),
        num_seqs,
        config.fill,
        config.percent,
        KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        ROT_DIM=0 if new is None else new.cos_sin.shape[1],
        PAGE=shape.page,
        BLOCK_SEQS=decode_schedule.block_seqs(num_seqs),
        BLOCK_M=max(16, triton.next_power_of_2(shape.group)),
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        TILE=config.tile,
        SWAPPED=config.swapped,
        INLINE_PTX=config.inline_ptx and runtime.has_inline_ptx(q),
        CODES_PTX=scales is not None and runtime.has_inline_ptx(q),
        MERGES_APART=config.merges_apart,
        PDL=dependent,
        launch_pdl=dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
