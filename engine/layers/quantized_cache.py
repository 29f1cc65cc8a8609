"""Attention over a cache in 8 bits on CPU: store the step's keys and values, dequantize the blocks it reads, attend.

Knows one step's tensors, no requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from manta.kernels.attention_decode import attention_decode_reference
from manta.kernels.attention_prefill import attention_prefill_reference
from manta.kernels.kv_cache_quantized import gather_quantized_reference, store_quantized_reference
from manta.kernels.rope import rope_reference

if TYPE_CHECKING:
    from .attention import AttentionBatch


class QuantizedLayerCache(NamedTuple):
    """Codes [num_blocks, block_size, kv_heads, head_dim], scales [num_blocks, block_size, kv_heads]."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor


def attend_quantized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    cache: QuantizedLayerCache,
    cos_sin: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[tokens, heads, dim] for `q` [tokens, heads, dim] and the step's `k` and `v` [tokens, kv_heads, dim]."""
    rope_reference(q, k, batch.positions, cos_sin)
    store_quantized_reference(k, cache.keys, cache.key_scales, batch.slot_mapping)
    store_quantized_reference(v, cache.values, cache.value_scales, batch.slot_mapping)
    attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode, prefill = batch.decode, batch.prefill
    first = 0
    if decode is not None:
        first = decode.num_rows
        keys, values, table = _blocks(cache, decode.block_table, decode.table_rows, decode.seq_lens, decode.max_seq_len)
        attention_decode_reference(q[:first], keys, values, table, decode.seq_lens, scale, attended[:first])
    if prefill is not None:
        first = first if prefill.first_token is None else prefill.first_token
        keys, values, table = _blocks(
            cache, prefill.block_table, prefill.table_rows, prefill.seq_lens, prefill.max_seq_len
        )
        places = table, prefill.query_start, prefill.seq_lens
        attention_prefill_reference(q[first:], keys, values, *places, scale, attended[first:])
    return attended


def _blocks(
    cache: QuantizedLayerCache,
    block_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows' blocks, each once, dequantized, and a block table [rows, blocks] int32 into them."""
    block_size = cache.keys.shape[1]
    table = block_table.index_select(0, table_rows)[:, : -(-max_seq_len // block_size)].long()
    is_used = torch.arange(table.shape[1], device=table.device) * block_size < seq_lens[:, None]
    ids, places = torch.where(is_used, table, table[:, :1].clamp(min=0)).unique(return_inverse=True)
    keys = gather_quantized_reference(cache.keys, cache.key_scales, ids)
    values = gather_quantized_reference(cache.values, cache.value_scales, ids)
    return keys, values, places.int()
