"""Causal attention of many queries a sequence over the paged cache, sequences of any lengths side by side.

Takes mixed batches, single queries included. Knows the cache's layout, no model and no scheduler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .attention_decode import attention_decode_reference, gather_equal
from .runtime import jit


def attention_prefill_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    table_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `attention_prefill`. Single queries go through the decode reference in one call, the others one by one."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_table = block_table if table_rows is None else block_table.index_select(0, table_rows)
    starts: list[int] = query_start.tolist()
    lengths: list[int] = seq_lens.tolist()
    single = [row for row in range(len(lengths)) if starts[row + 1] - starts[row] == 1]
    if single:
        rows = torch.tensor(single, device=q.device)
        tokens = query_start[rows].long()
        out[tokens] = attention_decode_reference(
            q[tokens], key_cache, value_cache, block_table[rows], seq_lens[rows], scale
        )
    for row, length in enumerate(lengths):
        queries = slice(starts[row], starts[row + 1])
        if queries.stop - queries.start > 1:
            out[queries] = _attend_one(q[queries], key_cache, value_cache, block_table[row], length, scale)
    return out


def _attend_one(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_ids: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """The last q.shape[0] positions of one sequence of `length` tokens: [queries, heads, dim]."""
    num_queries = q.shape[0]
    keys, values = gather_equal(key_cache, value_cache, block_ids[None], length)  # [1, length, kv_heads, dim]
    mask = None
    if num_queries < length:
        context = length - num_queries
        mask = torch.ones(num_queries, length, dtype=torch.bool, device=q.device).tril_(context)
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None].float(),
        keys.transpose(1, 2).float(),
        values.transpose(1, 2).float(),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=keys.shape[2] != q.shape[1],
    )
    return attended[0].transpose(0, 1).to(q.dtype)


@jit
def _page_of(table_row, index, INLINE_PTX: tl.constexpr):
    """Read one block id. Hidden from the compiler's pipeliner, which would halve the buffers of loads that depend on
    another load (11 to 18 % of the kernel's speed on an H200)."""
    if INLINE_PTX:
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [table_row + index], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        page = tl.load(table_row + index)
    return page.to(tl.int64)


@jit
def _accumulate(
    acc,
    running_max,
    running_sum,
    q,
    query_pos,
    start,
    seq_len,
    key_cache_ptr,
    value_cache_ptr,
    table_row,
    num_pages,
    head_offset,
    slot_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):
    """One tile of keys of the online softmax (Dao 2023, https://arxiv.org/abs/2307.08691)."""
    offs_tile = tl.arange(0, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    key_pos = start + offs_tile
    if PAGE % TILE == 0:  # a tile lies inside one page
        # The pipeliner runs ahead of the loop's end: the index is clamped so that it stays in the table's row.
        page = _page_of(table_row, tl.minimum(start // PAGE, num_pages - 1), INLINE_PTX)
        slot = page * PAGE + (start % PAGE + offs_tile)
    else:
        page = tl.load(table_row + tl.minimum(key_pos // PAGE, num_pages - 1)).to(tl.int64)
        slot = page * PAGE + key_pos % PAGE
    kv_offset = slot[:, None] * slot_stride + (head_offset + offs_d)[None, :]
    if MASKED:
        mask_kv = (key_pos < seq_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(key_cache_ptr + kv_offset, mask=mask_kv, other=0.0)  # [tile, dim]
        v = tl.load(value_cache_ptr + kv_offset, mask=mask_kv, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        mask_kv = (offs_d < HEAD_DIM)[None, :]
        k = tl.load(key_cache_ptr + kv_offset, mask=mask_kv, other=0.0)
        v = tl.load(value_cache_ptr + kv_offset, mask=mask_kv, other=0.0)
    else:
        k = tl.load(key_cache_ptr + kv_offset)
        v = tl.load(value_cache_ptr + kv_offset)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [rows, tile]
    if MASKED:
        scores = tl.where(key_pos[None, :] <= query_pos[:, None], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, running_sum


@jit(do_not_specialize=["num_seqs"])
def _attention_prefill_kernel(
    q_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    table_rows_ptr,
    query_start_ptr,
    seq_lens_ptr,
    out_ptr,
    scale_log2,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    num_kv_heads,
    num_seqs,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    INLINE_PTX: tl.constexpr,
):
    """One program: one KV head and BLOCK_M // GROUP consecutive queries of one sequence with the heads of the group.

    Tile i of sequence s has number query_start[s] // queries + s + i, so numbers never collide and a binary search
    finds s; the few numbers that name no tile end at once. Long sequences' last tiles, the heaviest, come first.
    """
    pid_kv = tl.program_id(0)
    pid_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    QUERIES: tl.constexpr = BLOCK_M // GROUP

    low = pid_tile * 0
    high = low + num_seqs
    while high - low > 1:  # the last sequence whose first tile is not behind pid_tile
        middle = (low + high) // 2
        is_left = tl.load(query_start_ptr + middle) // QUERIES + middle <= pid_tile
        low = tl.where(is_left, middle, low)
        high = tl.where(is_left, high, middle)
    query_begin = tl.load(query_start_ptr + low)
    query_len = tl.load(query_start_ptr + low + 1) - query_begin
    first_query = (pid_tile - (query_begin // QUERIES + low)) * QUERIES
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + low)
    context = seq_len - query_len

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = first_query + offs_m // GROUP
    head = pid_kv * GROUP + offs_m % GROUP
    mask_m = (offs_m < QUERIES * GROUP) & (query < query_len)
    mask_q = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    token = (query_begin + query).to(tl.int64)
    q_offset = token[:, None] * q_stride + head[:, None] * q_head_stride + offs_d[None, :]
    q = tl.load(q_ptr + q_offset, mask=mask_q, other=0.0)  # [queries * group, dim]
    # Rows beyond the tile's last query repeat its position, so that no row is without keys.
    last_query = tl.minimum(first_query + QUERIES, query_len) - 1
    query_pos = context + tl.minimum(query, last_query)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_row_id = low if table_rows_ptr is None else tl.load(table_rows_ptr + low)
    table_row = block_table_ptr + table_row_id.to(tl.int64) * table_stride
    num_pages = tl.cdiv(seq_len, PAGE)
    head_offset = pid_kv * HEAD_DIM
    slot_stride = num_kv_heads * HEAD_DIM
    end = context + last_query + 1  # keys that the tile's last query sees
    full_end = (context + first_query + 1) // TILE * TILE  # whole tiles that every query sees
    for start in range(0, full_end, TILE):
        acc, running_max, running_sum = _accumulate(
            acc,
            running_max,
            running_sum,
            q,
            query_pos,
            start,
            seq_len,
            key_cache_ptr,
            value_cache_ptr,
            table_row,
            num_pages,
            head_offset,
            slot_stride,
            scale_log2,
            HEAD_DIM,
            PAGE,
            TILE,
            BLOCK_D,
            False,
            INLINE_PTX,
        )
    for start in range(full_end, end, TILE):
        acc, running_max, running_sum = _accumulate(
            acc,
            running_max,
            running_sum,
            q,
            query_pos,
            start,
            seq_len,
            key_cache_ptr,
            value_cache_ptr,
            table_row,
            num_pages,
            head_offset,
            slot_stride,
            scale_log2,
            HEAD_DIM,
            PAGE,
            TILE,
            BLOCK_D,
            True,
            INLINE_PTX,
        )
    out_offset = token[:, None] * out_stride + head[:, None] * out_head_stride + offs_d[None, :]
    tl.store(out_ptr + out_offset, (acc / running_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)


def attention_prefill(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    max_query_len: int,
    max_seq_len: int,
    table_rows: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return causal attention of packed queries over their sequences' cached keys and values, [tokens, heads, dim].

    `q` [tokens, heads, dim] (last dimension contiguous) holds the queries of sequence s at rows query_start[s] to
    query_start[s + 1]; they are its last tokens, so query i sits at position seq_len - query_len + i, and their own k
    and v are in the cache already. Caches [num_blocks, block_size, kv_heads, dim], contiguous; `block_table`
    [seqs, max_blocks] int32; `query_start` [seqs + 1] and `seq_lens` [seqs] int32. A sequence may have no query. Rows
    of `q` behind query_start[seqs] are padding and their output stays as it was.
    """
    page_size, num_kv_heads = key_cache.shape[1:3]
    num_tokens, num_heads, head_dim = q.shape
    assert num_heads % num_kv_heads == 0
    assert max_seq_len <= block_table.shape[1] * page_size
    assert max_query_len <= max_seq_len
    if not runtime.use_triton(q):
        return attention_prefill_reference(
            q, key_cache, value_cache, block_table, query_start, seq_lens, scale, out, table_rows
        )
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert block_table.stride(1) == 1
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    assert q.stride(2) == 1
    assert out.stride(2) == 1
    num_seqs = seq_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    group = num_heads // num_kv_heads
    tiles = runtime.prefill_tiles(
        head_dim=head_dim, itemsize=q.element_size(), group_size=group, capability=runtime.capability(q.device)
    )
    num_tiles = num_tokens // (tiles.block_m // group) + num_seqs
    _attention_prefill_kernel[(num_kv_heads, num_tiles)](
        q,
        key_cache,
        value_cache,
        block_table,
        table_rows,
        query_start,
        seq_lens,
        out,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        num_kv_heads,
        num_seqs,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_M=tiles.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        TILE=tiles.tile,
        INLINE_PTX=runtime.has_inline_ptx(q),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
