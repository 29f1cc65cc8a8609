"""The Triton kernel of prefill attention, for all shapes and devices. Its launcher and contract: attention_prefill.

Keys and values come through pointers or, a box at a time, through descriptors of the tensor memory accelerator. Codes
of a cache in 8 bits come through pointers; what their scales multiply is said in attention_decode.
"""

from __future__ import annotations

import triton.language as tl

from .quantized.kv_cache import head_values
from .runtime import jit


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
    key_cache,
    value_cache,
    table_row,
    num_pages,
    head_offset,
    slot_stride,
    scale_log2,
    key_scales,
    value_scales,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    CODES_PTX: tl.constexpr,
):
    """One tile of keys of the online softmax (Dao 2023, https://arxiv.org/abs/2307.08691).

    `key_scales` and `value_scales` of codes are those of the head, None otherwise. Multiply-adds are written as such,
    so that both loops round alike.
    """
    offs_tile = tl.arange(0, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    key_pos = start + offs_tile
    if PAGE % TILE == 0:  # a tile lies inside one page
        # The pipeliner runs ahead of the loop's end: the index is clamped so that it stays in the table's row.
        page = _page_of(table_row, tl.minimum(start // PAGE, num_pages - 1), INLINE_PTX)
        first_slot = page * PAGE + start % PAGE
        slot = first_slot + offs_tile
        offs_scale = page * (slot_stride // HEAD_DIM * PAGE) + start % PAGE + offs_tile
    else:
        page = tl.load(table_row + tl.minimum(key_pos // PAGE, num_pages - 1)).to(tl.int64)
        first_slot = page * 0
        slot = page * PAGE + key_pos % PAGE
        offs_scale = page * (slot_stride // HEAD_DIM * PAGE) + key_pos % PAGE
    mask_tile = (key_pos < seq_len)[:, None]
    mask_d = (offs_d < HEAD_DIM)[None, :]
    kv_offset = slot[:, None] * slot_stride + (head_offset + offs_d)[None, :]
    if DESCRIPTORS:
        k = key_cache.load([first_slot.to(tl.int32), head_offset])  # [tile, dim]
    elif MASKED:
        k = tl.load(key_cache + kv_offset, mask=mask_tile & mask_d, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(key_cache + kv_offset, mask=mask_d, other=0.0)
    else:
        k = tl.load(key_cache + kv_offset)
    if key_scales is not None:
        k = head_values(k, q.dtype, CODES_PTX)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, tile]
    if key_scales is not None:
        scores = scores * tl.load(key_scales + offs_scale)[None, :]
    if MASKED:
        scores = tl.where(key_pos[None, :] <= query_pos[:, None], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(tl.fma(scores, scale_log2, -new_max[:, None]))
    rescale = tl.exp2(running_max - new_max)
    running_sum = tl.fma(running_sum, rescale, tl.sum(weights, 1))
    acc = acc * rescale[:, None]
    if DESCRIPTORS:
        v = value_cache.load([first_slot.to(tl.int32), head_offset])
        if MASKED:  # what stands behind a sequence's end may be no number, and 0 times that is none either
            v = tl.where(mask_tile, v, 0.0)
    elif MASKED:
        v = tl.load(value_cache + kv_offset, mask=mask_tile & mask_d, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        v = tl.load(value_cache + kv_offset, mask=mask_d, other=0.0)
    else:
        v = tl.load(value_cache + kv_offset)
    if value_scales is not None:
        v = head_values(v, q.dtype, CODES_PTX)
        if MASKED:  # what stands behind a sequence's end may be no number
            weights = weights * tl.load(value_scales + offs_scale, mask=key_pos < seq_len, other=0.0)[None, :]
        else:
            weights = weights * tl.load(value_scales + offs_scale)[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, running_sum


@jit(do_not_specialize=["num_seqs"])
def _attention_prefill_kernel(
    q_ptr,
    key_cache,
    value_cache,
    key_scales_ptr,
    value_scales_ptr,
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
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    CODES_PTX: tl.constexpr,
):
    """One program: one KV head and BLOCK_M // GROUP consecutive queries of one sequence with the heads of the group.

    Tile i of sequence s has number query_start[s] // queries + s + i, so numbers never collide and a binary search
    finds s; the few numbers that name no tile end at once. Long sequences' last tiles, the heaviest, come first.
    """
    if HEADS_FIRST:
        pid_kv = tl.program_id(0)
        pid_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    else:
        pid_kv = tl.program_id(1)
        pid_tile = tl.num_programs(0) - 1 - tl.program_id(0)
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
    seq_len = tl.load(seq_lens_ptr + low)
    if (first_query >= query_len) | (seq_len == 0):
        return
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
    key_scales = None if key_scales_ptr is None else key_scales_ptr + pid_kv * PAGE
    value_scales = None if value_scales_ptr is None else value_scales_ptr + pid_kv * PAGE
    end = context + last_query + 1  # keys that the tile's last query sees
    full_end = (context + first_query + 1) // TILE * TILE  # whole tiles that every query sees
    for start in tl.range(0, full_end, TILE, num_stages=STAGES):  # pyright: ignore
        acc, running_max, running_sum = _accumulate(
            acc,
            running_max,
            running_sum,
            q,
            query_pos,
            start,
            seq_len,
            key_cache,
            value_cache,
            table_row,
            num_pages,
            head_offset,
            slot_stride,
            scale_log2,
            key_scales,
            value_scales,
            HEAD_DIM,
            PAGE,
            TILE,
            BLOCK_D,
            False,
            DESCRIPTORS,
            INLINE_PTX,
            CODES_PTX,
        )
    for start in tl.range(full_end, end, TILE, num_stages=MASKED_STAGES):  # pyright: ignore
        acc, running_max, running_sum = _accumulate(
            acc,
            running_max,
            running_sum,
            q,
            query_pos,
            start,
            seq_len,
            key_cache,
            value_cache,
            table_row,
            num_pages,
            head_offset,
            slot_stride,
            scale_log2,
            key_scales,
            value_scales,
            HEAD_DIM,
            PAGE,
            TILE,
            BLOCK_D,
            True,
            DESCRIPTORS,
            INLINE_PTX,
            CODES_PTX,
        )
    out_offset = token[:, None] * out_stride + head[:, None] * out_head_stride + offs_d[None, :]
    tl.store(out_ptr + out_offset, (acc / running_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)
