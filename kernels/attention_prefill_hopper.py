"""Prefill attention for Hopper GPUs: one warp copies keys and values, two groups of four warps compute. 16-bit types.

Written in Gluon, Triton's dialect with explicit layouts, barriers and asynchronous instructions. The order of work is
that of FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608, algorithm 2): while the tensor cores
multiply a tile's weights with its values, the same warps compute the next tile's weights, and the two groups fill each
other's gaps. Knows tensors and a plan; `attention_prefill` documents and checks the arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import runtime
from .attention_prefill_hopper_work import copy_keys_and_values, find_tile, num_key_tiles_of
from .attention_prefill_plan import BOX, Memory, PrefillPlan
from .gluon_names import barrier, copy_rows

# Gluon's stubs know neither plain values for constexpr parameters nor its own loops.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
jit: Any = gluon.jit
ROWS_PER_GROUP = 64
"""Rows of one group of four warps: the height of Hopper's matrix instruction."""

_RENAMED_VIEW: Any = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # by Triton 3.9


@jit
def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape."""
    if _RENAMED_VIEW:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@jit
def _opaque(x):
    """The same integer, computed anew as far as the compiler knows: what depends on it is not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _pinned(x):
    """The same 16-bit tensor, computed at this place: the compiler keeps the order of volatile instructions."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@jit
def _weights_of(scores, running_max, running_sum, scale_log2):
    """One step of the online softmax. Multiply-adds are written as such, so that every use rounds alike."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * scale_log2)
    zeros = gl.full_like(scores, 0.0)
    weights = gl.exp2(gl.fma(scores, zeros + scale_log2, zeros - new_max[:, None]))
    rescale = gl.exp2(running_max - new_max)
    return weights, new_max, gl.fma(running_sum, rescale, gl.sum(weights, 1)), rescale


@jit
def _wait_turn(turns, group: gl.constexpr, count):
    """Wait until the other group has issued its products of tile `count` (the second group) or of the one before."""
    mbarrier.wait(turns.index(group), (count + 1 - group) & 1)


@jit
def _step(
    state,
    tile,
    num_key_tiles,
    operands,
    query_pos,
    scale_log2,
    group: gl.constexpr,
    MASKED: gl.constexpr,
    STAGES: gl.constexpr,
    PINNED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Weigh the previous tile's values and compute `tile`'s weights, whose keys are there already.

    `state`: tiles that this program has begun, accumulators, weights, their maxima and sums.
    """
    count, acc, weights, running_max, running_sum = state
    queries, keys, values, barriers = operands
    keys_full, keys_empty, values_full, values_empty, turns = barriers
    SCORES: gl.constexpr = running_max.type.layout.parent
    TILE: gl.constexpr = keys.shape[1]
    stage = count % STAGES
    before = (count - 1) % STAGES
    scores = gl.zeros([64, TILE], gl.float32, SCORES)
    if TURNS:
        _wait_turn(turns, group, count)
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(values_full.index(before), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - group), count=1)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(keys_empty.index(stage), count=1)
    if MASKED:
        key_pos = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(key_pos[None, :] <= query_pos[:, None], scores, float("-inf"))
    new_weights, running_max, running_sum, rescale = _weights_of(scores, running_max, running_sum, scale_log2)
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    if PINNED:
        new_weights = _pinned(new_weights)
    # Waiting for the next keys here and not at the next step's start keeps the assembler, which orders instructions
    # within a basic block only, from moving the exponentials behind the end of the product.
    count += 1
    mbarrier.wait(keys_full.index(count % STAGES), (count // STAGES) & 1, pred=tile + 1 < num_key_tiles)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(values_empty.index(before), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return count, acc, new_weights, running_max, running_sum


@jit
def _row_offsets(
    group,
    pid_kv,
    query_begin,
    first_query,
    query_len,
    stride: gl.constexpr,
    head_stride: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Where a group's rows stand in a [tokens, heads, dim] tensor, and which of them are queries."""
    offs_m = group * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    query = first_query + offs_m // GROUP
    head = pid_kv * GROUP + offs_m % GROUP
    offset = (query_begin + query).to(gl.int64) * stride + head * head_stride
    return offset, (offs_m < QUERIES * GROUP) & (query < query_len)


@jit
def _copy_queries(
    item,
    group,
    q_ptr,
    memory,
    stride: gl.constexpr,
    head_stride: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Start the copy of a group's rows of an item; nothing where the item has none."""
    pid_kv, _sequence, query_begin, query_len, first_query, _seq_len = item
    offset, mask_m = _row_offsets(
        group, pid_kv, query_begin, first_query, query_len, stride, head_stride, GROUP, QUERIES, ROWS
    )
    offs_d = gl.arange(0, memory.shape[1], layout=gl.SliceLayout(0, ROWS))
    copy_rows(memory, q_ptr + offset[:, None] + offs_d[None, :], mask=mask_m[:, None])
    async_copy.commit_group()


@jit
def _compute(
    group: gl.constexpr,
    q_ptr,
    out_ptr,
    query_memory,
    keys,
    values,
    barriers,
    batch,
    scale_log2,
    Q_STRIDE: gl.constexpr,
    Q_HEAD_STRIDE: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
    PERSISTENT: gl.constexpr,
    PINNED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """A computing group of four warps: 64 of a tile's 128 rows."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    keys_full, keys_empty, values_full, values_empty, turns = barriers
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROWS))
    count = 0
    # Programs with several items copy the next one's queries while they work on this one.
    coming = find_tile(0, batch, KV_HEADS, QUERIES, HEADS_FIRST)
    _copy_queries(coming, group, q_ptr, query_memory.index(group), Q_STRIDE, Q_HEAD_STRIDE, GROUP, QUERIES, ROWS)
    for turn in range((batch[2] * KV_HEADS + gl.num_programs(0) - 1) // gl.num_programs(0)):
        pid_kv, _sequence, query_begin, query_len, first_query, seq_len = coming
        queries = query_memory.index(turn % 2 * 2 + group if PERSISTENT else group)
        following = query_memory.index((turn + 1) % 2 * 2 + group if PERSISTENT else group)
        operands = (queries, keys, values, barriers)
        # Every thread waits for its own copies and makes them visible to the tensor cores, then for the other threads.
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if first_query < query_len:
            context = seq_len - query_len
            # Rows beyond the tile's last query repeat its position, so that no row is without keys.
            last_query = gl.minimum(first_query + QUERIES, query_len) - 1
            rows = group * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            query_pos = context + gl.minimum(first_query + rows // GROUP, last_query)
            num_key_tiles = num_key_tiles_of(first_query, query_len, seq_len, QUERIES, TILE)
            num_full_tiles = (context + first_query + 1) // TILE  # that every query sees whole

            mbarrier.wait(keys_full.index(count % STAGES), (count // STAGES) & 1)
            scores = gl.zeros([64, TILE], gl.float32, SCORES)
            if TURNS:
                _wait_turn(turns, group, count)
            first_keys = keys.index(count % STAGES).permute((1, 0))
            scores = warpgroup_mma(queries, first_keys, scores, use_acc=False, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - group), count=1)
            if PERSISTENT:
                coming = find_tile(turn + 1, batch, KV_HEADS, QUERIES, HEADS_FIRST)
                _copy_queries(coming, group, q_ptr, following, Q_STRIDE, Q_HEAD_STRIDE, GROUP, QUERIES, ROWS)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
            mbarrier.arrive(keys_empty.index(count % STAGES), count=1)
            key_pos = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
            scores = gl.where(key_pos[None, :] <= query_pos[:, None], scores, float("-inf"))
            running_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            running_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            weights, running_max, running_sum, _first_rescale = _weights_of(
                scores, running_max, running_sum, scale_log2
            )
            weights = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, OUTPUT)
            count += 1
            mbarrier.wait(keys_full.index(count % STAGES), (count // STAGES) & 1, pred=num_key_tiles > 1)
            state = (count, acc, weights, running_max, running_sum)
            for tile in range(1, num_full_tiles):
                state = _step(
                    state, tile, num_key_tiles, operands, query_pos, scale_log2, group, False, STAGES, PINNED, TURNS
                )
            for tile in range(gl.maximum(num_full_tiles, 1), num_key_tiles):
                state = _step(
                    state, tile, num_key_tiles, operands, query_pos, scale_log2, group, True, STAGES, PINNED, TURNS
                )
            count, acc, weights, running_max, running_sum = state

            stage = (count - 1) % STAGES
            last_values = values.index(stage)
            mbarrier.wait(values_full.index(stage), ((count - 1) // STAGES) & 1)
            if num_key_tiles * TILE > seq_len:
                # What stands behind the sequence's end may be no number, and 0 times that is none either. Both groups
                # write the same: neither needs to wait for the other.
                for part in gl.static_range(TILE // 32):
                    part_rows = last_values.slice(part * 32, 32, 0)
                    row_pos = (num_key_tiles - 1) * TILE + part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, ROWS))
                    part_rows.store(gl.where((row_pos < seq_len)[:, None], part_rows.load(ROWS), 0.0))
                fence_async_shared()
            acc = warpgroup_mma(weights, last_values, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(values_empty.index(stage), count=1)
            acc = acc / gl.convert_layout(running_sum, gl.SliceLayout(1, OUTPUT))[:, None]
            queries.store(acc.to(DTYPE))
            offset, mask_m = _row_offsets(
                group,
                pid_kv,
                _opaque(query_begin),
                _opaque(first_query),
                query_len,
                OUT_STRIDE,
                OUT_HEAD_STRIDE,
                GROUP,
                QUERIES,
                ROWS,
            )
            gl.store(out_ptr + offset[:, None] + offs_d[None, :], queries.load(ROWS), mask=mask_m[:, None])
        elif PERSISTENT:
            coming = find_tile(turn + 1, batch, KV_HEADS, QUERIES, HEADS_FIRST)
            _copy_queries(coming, group, q_ptr, following, Q_STRIDE, Q_HEAD_STRIDE, GROUP, QUERIES, ROWS)


@jit(do_not_specialize=["num_seqs", "num_tiles"])
def _attention_prefill_hopper_kernel(
    q_ptr,
    key_descriptor,
    value_descriptor,
    block_table_ptr,
    table_rows_ptr,
    query_start_ptr,
    seq_lens_ptr,
    out_ptr,
    scale_log2,
    table_stride,
    num_tiles,
    num_seqs,
    Q_STRIDE: gl.constexpr,
    Q_HEAD_STRIDE: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    OUT_HEAD_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
    PERSISTENT: gl.constexpr,
    PINNED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Programs take items (KV head, 128 rows of queries and heads) in turn, every num_programs-th of them."""
    QUERIES: gl.constexpr = 128 // GROUP
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BOXES: gl.constexpr = STAGES * TILE * HEAD_DIM // 4096
    query_memory = gl.allocate_shared_memory(DTYPE, [4 if PERSISTENT else 2, 64, HEAD_DIM], SHARED)
    key_memory = gl.allocate_shared_memory(DTYPE, [BOXES, 64, 64], SHARED)
    value_memory = gl.allocate_shared_memory(DTYPE, [BOXES, 64, 64], SHARED)
    keys = _view(key_memory, DTYPE, [STAGES, TILE, HEAD_DIM], SHARED)
    values = _view(value_memory, DTYPE, [STAGES, TILE, HEAD_DIM], SHARED)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=1)
        mbarrier.init(values_full.index(stage), count=1)
        mbarrier.init(keys_empty.index(stage), count=2)
        mbarrier.init(values_empty.index(stage), count=2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    barriers = (keys_full, keys_empty, values_full, values_empty, turns)
    batch = (query_start_ptr, seq_lens_ptr, num_tiles, num_seqs)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_compute, (FIRST, q_ptr, out_ptr, query_memory, keys, values, barriers, batch, scale_log2,
                        Q_STRIDE, Q_HEAD_STRIDE, OUT_STRIDE, OUT_HEAD_STRIDE,
                        KV_HEADS, GROUP, QUERIES, HEAD_DIM, TILE, STAGES, HEADS_FIRST, PERSISTENT, PINNED, TURNS)),
            (_compute, (SECOND, q_ptr, out_ptr, query_memory, keys, values, barriers, batch, scale_log2,
                        Q_STRIDE, Q_HEAD_STRIDE, OUT_STRIDE, OUT_HEAD_STRIDE,
                        KV_HEADS, GROUP, QUERIES, HEAD_DIM, TILE, STAGES, HEADS_FIRST, PERSISTENT, PINNED, TURNS)),
            (copy_keys_and_values, (key_descriptor, value_descriptor, key_memory, value_memory, barriers,
                     block_table_ptr, table_rows_ptr, table_stride, batch,
                     KV_HEADS, QUERIES, HEAD_DIM, PAGE, TILE, STAGES, HEADS_FIRST)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _descriptor(address: int, dtype: torch.dtype, slots: int, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(Memory(address, dtype), [slots, width], [width, 1], [BOX, BOX], layout)


def attention_prefill_hopper(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    table_rows: torch.Tensor | None,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale_log2: float,
    out: torch.Tensor,
    plan: PrefillPlan,
) -> None:
    """Write to `out` what `attention_prefill` documents, for the shapes of `attention_prefill_plan.has_specialized`.

    `scale_log2` is the scale of scores for powers of two.
    """
    num_blocks, page_size, num_kv_heads, head_dim = key_cache.shape
    slots, width = num_blocks * page_size, num_kv_heads * head_dim
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    num_seqs = seq_lens.shape[0]
    num_tiles = num_tokens // (2 * ROWS_PER_GROUP // group) + num_seqs
    num_items = num_tiles * num_kv_heads
    num_programs = min(num_items, runtime.num_multiprocessors(q.device)) if plan.persistent else num_items
    _attention_prefill_hopper_kernel[(num_programs,)](
        q,
        _descriptor(key_cache.data_ptr(), key_cache.dtype, slots, width),
        _descriptor(value_cache.data_ptr(), value_cache.dtype, slots, width),
        block_table,
        table_rows,
        query_start,
        seq_lens,
        out,
        scale_log2,
        block_table.stride(0),
        num_tiles,
        num_seqs,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD_STRIDE=out.stride(1),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        TILE=plan.tile,
        STAGES=plan.num_stages,
        HEADS_FIRST=plan.heads_first,
        PERSISTENT=plan.persistent,
        PINNED=plan.pinned,
        TURNS=plan.turns,
        num_warps=4,
    )
