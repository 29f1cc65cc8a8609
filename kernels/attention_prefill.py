"""Causal attention of many queries a sequence over the paged cache, sequences of any lengths side by side.

Takes mixed batches, single queries included. Knows the cache's layout, no model and no scheduler.
Keys are taken in tiles that start at multiples of the tile's size in the sequence, first to last, and a tile that a
query does not see changes nothing in its sums (weights 0, factor 1): so a query's result depends on neither the
chunk nor the program that it is in, as long as the plan is the same. `deterministic` asks for one plan for all.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import runtime
from .attention_decode import attention_decode_reference, gather_equal
from .attention_prefill_plan import Memory, PrefillPlan, plan_for
from .attention_prefill_tiles import _attention_prefill_kernel
from .quantized.kv_cache import CacheScales, check_scales, dequantized_blocks

LOG2_E = 1.4426950408889634


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
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """See `attention_prefill`. Single queries go through the decode reference in one call, the others one by one."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_table = block_table if table_rows is None else block_table.index_select(0, table_rows)
    if scales is not None:
        places = block_table, seq_lens
        key_cache, value_cache, block_table = dequantized_blocks(key_cache, value_cache, scales, *places)
    starts: list[int] = query_start.tolist()
    lengths: list[int] = seq_lens.tolist()
    single = [row for row in range(len(lengths)) if starts[row + 1] - starts[row] == 1 and lengths[row]]
    if single:
        rows = torch.tensor(single, device=q.device)
        tokens = query_start[rows].long()
        out[tokens] = attention_decode_reference(
            q[tokens], key_cache, value_cache, block_table[rows], seq_lens[rows], scale
        )
    for row, length in enumerate(lengths):
        queries = slice(starts[row], starts[row + 1])
        if queries.stop - queries.start > 1 and length:
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


@lru_cache(maxsize=4096)
def _descriptor(address: int, dtype: torch.dtype, slots: int, width: int, box: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(Memory(address, dtype), [slots, width], [width, 1], list(box))


def pool_descriptor(pool: torch.Tensor, tile: int) -> TensorDescriptor:
    """Describe a cache [blocks, block_size, kv_heads, dim] as [slots, kv_heads * dim], copied in boxes [tile, dim]."""
    num_blocks, block_size, num_kv_heads, head_dim = pool.shape
    if not runtime.INTERPRETED:
        slots, width = num_blocks * block_size, num_kv_heads * head_dim
        return _descriptor(pool.data_ptr(), pool.dtype, slots, width, (tile, head_dim))
    return TensorDescriptor.from_tensor(pool.view(num_blocks * block_size, num_kv_heads * head_dim), [tile, head_dim])


@cache
def _specialized_launcher() -> Any:
    """Imported at its first use: Gluon takes time to import, and only Hopper GPUs need it."""
    from .attention_prefill_hopper import attention_prefill_hopper

    return attention_prefill_hopper


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
    plan: PrefillPlan | None = None,
    scales: CacheScales | None = None,
) -> torch.Tensor:
    """Return causal attention of packed queries over their sequences' cached keys and values, [tokens, heads, dim].

    `q` [tokens, heads, dim] (last dimension contiguous) holds the queries of sequence s at rows query_start[s] to
    query_start[s + 1]; they are its last tokens, so query i sits at position seq_len - query_len + i, and their own k
    and v are in the cache already. Caches [num_blocks, block_size, kv_heads, dim], contiguous; `block_table`
    [rows, max_blocks] int32, where sequence s has row table_rows[s] (int32), or s without `table_rows`; `query_start`
    [seqs + 1] and `seq_lens` [seqs] int32. A sequence may have no query. Rows of `q` behind query_start[seqs], and
    those of a sequence of length 0, are padding and their output stays as it was.

    With `deterministic`, a query's result is the same bit by bit whatever the chunk, the batch and its place in them.
    `plan` overrides the choice of kernel and tiles (measurements and tests). `scales`: of caches in 8 bits, which
    one of the kernels reads (`pointers`).
    """
    page_size, num_kv_heads = key_cache.shape[1:3]
    num_tokens, num_heads, head_dim = q.shape
    assert num_heads % num_kv_heads == 0
    assert max_seq_len <= block_table.shape[1] * page_size
    assert max_query_len <= max_seq_len
    if not runtime.use_triton(q):
        places = block_table, query_start, seq_lens
        return attention_prefill_reference(q, key_cache, value_cache, *places, scale, out, table_rows, scales)
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
    plan = plan or plan_for(
        head_dim=head_dim,
        itemsize=q.element_size(),
        group_size=group,
        page_size=page_size,
        max_seq_len=max_seq_len,
        deterministic=deterministic,
        device=q.device,
        has_codes=scales is not None,
    )
    if scales is not None:
        assert plan.kernel == "pointers", "other kernels read no codes"
        check_scales(scales, key_cache)
    if plan.kernel == "specialized":
        places = block_table, table_rows, query_start, seq_lens
        _specialized_launcher()(q, key_cache, value_cache, *places, scale * LOG2_E, out, plan)
        return out
    num_tiles = num_tokens // (plan.block_m // group) + num_seqs
    descriptors = plan.kernel == "descriptors"
    _attention_prefill_kernel[(num_kv_heads, num_tiles) if plan.heads_first else (num_tiles, num_kv_heads)](
        q,
        pool_descriptor(key_cache, plan.tile) if descriptors else key_cache,
        pool_descriptor(value_cache, plan.tile) if descriptors else value_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        block_table,
        table_rows,
        query_start,
        seq_lens,
        out,
        scale * LOG2_E,
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
        BLOCK_M=plan.block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        TILE=plan.tile,
        STAGES=plan.num_stages,
        MASKED_STAGES=plan.masked_stages,
        HEADS_FIRST=plan.heads_first,
        DESCRIPTORS=descriptors,
        INLINE_PTX=runtime.has_inline_ptx(q),
        CODES_PTX=scales is not None and runtime.has_inline_ptx(q),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return out
