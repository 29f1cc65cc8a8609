"""Attention of one query a sequence over the paged cache, with the keys split over programs (flash decoding).

Knows the cache's layout [num_blocks, block_size, kv_heads, head_dim], no model and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import runtime
from .runtime import jit


def attention_decode_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `attention_decode`. Sequences of similar length share one padded call."""
    block_table = block_table if table_rows is None else block_table.index_select(0, table_rows)
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


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of split sequences, allocated once so that captured graphs find them in the same place."""

    partial: torch.Tensor
    """[max_num_seqs * heads * splits, head_dim] fp32 at its fullest; every launch uses a prefix."""
    log_sum: torch.Tensor
    """One base-2 log-sum-exp per row of `partial`."""

    @staticmethod
    def allocate(
        *, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Room for every batch of 1 to `max_num_seqs` sequences (small batches take the most splits)."""
        multiprocessors = runtime.num_multiprocessors(device)
        rows = max(n * runtime.decode_splits(n, num_kv_heads, multiprocessors) for n in range(1, max_num_seqs + 1))
        rows *= num_heads
        return DecodeWorkspace(
            torch.empty((rows, head_dim), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


@jit
def _attention_decode_kernel(
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    scale_log2,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one sequence, one KV head with its group of query heads, one part of the keys."""
    pid_kv = tl.program_id(0)
    pid_split = tl.program_id(1)
    pid_seq = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + pid_seq)
    if seq_len == 0:
        return
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len, TILE), SPLITS)
    begin = pid_split * tiles_per_split * TILE
    end = tl.minimum(begin + tiles_per_split * TILE, seq_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_tile = tl.arange(0, TILE)
    mask_m = offs_m < GROUP
    mask_d = offs_d < HEAD_DIM
    head = pid_kv * GROUP + offs_m
    q_offset = pid_seq.to(tl.int64) * q_stride + head[:, None] * q_head_stride + offs_d[None, :]
    q = tl.load(q_ptr + q_offset, mask=mask_m[:, None] & mask_d[None, :], other=0.0)  # [group, dim]

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slot_stride = num_kv_heads * HEAD_DIM
    table_row_id = pid_seq if table_rows_ptr is None else tl.load(table_rows_ptr + pid_seq)
    table_row = block_table_ptr + table_row_id.to(tl.int64) * table_stride
    for start in range(begin, end, TILE):
        key_pos = start + offs_tile
        mask_key = key_pos < end
        if PAGE % TILE == 0:  # a tile lies inside one page
            block = tl.load(table_row + start // PAGE).to(tl.int64)
            slot = block * PAGE + (start % PAGE + offs_tile)  # pyright: ignore[reportOperatorIssue]
        else:
            block = tl.load(table_row + key_pos // PAGE, mask=mask_key, other=0).to(tl.int64)
            slot = block * PAGE + key_pos % PAGE
        kv_offset = slot[:, None] * slot_stride + (pid_kv * HEAD_DIM + offs_d)[None, :]
        mask_kv = mask_key[:, None] & mask_d[None, :]
        k = tl.load(key_cache_ptr + kv_offset, mask=mask_kv, other=0.0)  # [tile, dim]
        v = tl.load(value_cache_ptr + kv_offset, mask=mask_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [group, tile]
        scores = tl.where(mask_key[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        running_max = new_max

    mask_out = mask_m[:, None] & mask_d[None, :]
    if SPLITS == 1:
        out_offset = pid_seq.to(tl.int64) * out_stride + head[:, None] * out_head_stride + offs_d[None, :]
        tl.store(out_ptr + out_offset, (acc / running_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask_out)
    else:
        # A part without keys keeps sum 0 and log-sum -inf; the reduction gives it no weight.
        row = (pid_seq.to(tl.int64) * num_kv_heads * GROUP + head) * SPLITS + pid_split
        safe_sum = tl.where(running_sum == 0.0, 1.0, running_sum)
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], acc / safe_sum[:, None], mask=mask_out)
        tl.store(log_sum_ptr + row, running_max + tl.log2(safe_sum), mask=mask_m)


@jit
def _reduce_splits_kernel(
    partial_ptr,
    log_sum_ptr,
    seq_lens_ptr,
    out_ptr,
    out_stride,
    out_head_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: one sequence and head; the parts' outputs weighted by their share of the softmax's denominator."""
    pid_head = tl.program_id(0)
    pid_seq = tl.program_id(1)
    if tl.load(seq_lens_ptr + pid_seq) == 0:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    row = (pid_seq.to(tl.int64) * num_heads + pid_head) * SPLITS + tl.arange(0, SPLITS)
    log_sum = tl.load(log_sum_ptr + row)  # [splits]
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    weight = weight / tl.sum(weight, 0)
    partial = tl.load(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], mask=mask_d[None, :], other=0.0)
    out = tl.sum(partial * weight[:, None], 0)
    out_offset = pid_seq.to(tl.int64) * out_stride + pid_head * out_head_stride
    tl.store(out_ptr + out_offset + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)


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
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v for one query a sequence, [seqs, heads, dim].

    `q` [seqs, heads, dim] (last dimension contiguous); caches [num_blocks, block_size, kv_heads, dim], contiguous;
    `block_table` [seqs, max_blocks] int32; with `table_rows` [seqs] int32, sequence i's blocks stand in row
    table_rows[i] of it. `seq_lens` [seqs] int32 counts the query's own token, whose k and v are in the cache already.
    Rows with length 0 are skipped and their output stays as it was. `workspace` is needed inside CUDA graphs, else the
    launcher allocates. The grid follows from the number of rows alone; `max_seq_len` is a bound that the caller vouches
    for (the block table must cover it).
    """
    num_seqs, num_heads, head_dim = q.shape
    page_size, num_kv_heads = key_cache.shape[1:3]
    assert num_heads % num_kv_heads == 0
    assert max_seq_len <= block_table.shape[1] * page_size
    if not runtime.use_triton(q):
        return attention_decode_reference(q, key_cache, value_cache, block_table, seq_lens, scale, out, table_rows)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert block_table.stride(1) == 1
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    assert q.stride(2) == 1
    assert out.stride(2) == 1
    if num_seqs == 0:
        return out
    group = num_heads // num_kv_heads
    splits = runtime.decode_splits(num_seqs, num_kv_heads, runtime.num_multiprocessors(q.device))
    if splits > 1 and workspace is None:
        workspace = DecodeWorkspace.allocate(
            max_num_seqs=num_seqs,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=q.device,
        )
    assert splits == 1 or (workspace is not None and workspace.log_sum.numel() >= num_seqs * num_heads * splits)
    tiles = runtime.decode_tiles(head_dim=head_dim, itemsize=q.element_size(), group_size=group)
    _attention_decode_kernel[(num_kv_heads, splits, num_seqs)](
        q,
        key_cache,
        value_cache,
        block_table,
        table_rows,
        seq_lens,
        out,
        workspace.partial if splits > 1 and workspace is not None else None,
        workspace.log_sum if splits > 1 and workspace is not None else None,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        TILE=tiles.tile,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        assert workspace is not None
        _reduce_splits_kernel[(num_heads, num_seqs)](
            workspace.partial,
            workspace.log_sum,
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            num_heads,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return out
