"""Attention over a cache in 8 bits on CPU: store a step's keys and values, dequantize the blocks it reads, attend.

Knows one step's tensors, no requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from manta.kernels.attention_decode import attention_decode_reference
from manta.kernels.attention_prefill import attention_prefill_reference
from manta.kernels.quantized.kv_cache import gather_quantized_reference, store_quantized_reference
from manta.kernels.rope import rope_reference

if TYPE_CHECKING:
    from .attention import DecodeRows, PrefillRows


class QuantizedLayerCache(NamedTuple):
    """Codes [num_blocks, block_size, kv_heads, head_dim], scales [num_blocks, block_size, kv_heads]."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor


def rope_and_store_quantized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: QuantizedLayerCache,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate `q` and `k` in place, then write `k` and `v` [tokens, kv_heads, dim], as kernels/rope.py does."""
    rope_reference(q, k, positions, cos_sin)
    store_quantized_reference(k, cache.keys, cache.key_scales, slot_mapping)
    store_quantized_reference(v, cache.values, cache.value_scales, slot_mapping)


def decode_quantized(
    q: torch.Tensor, rows: DecodeRows, cache: QuantizedLayerCache, scale: float, out: torch.Tensor | None
) -> torch.Tensor:
    """[rows, heads, dim] for one query a row."""
    keys, values, table = _blocks(cache, rows.block_table, rows.table_rows, rows.seq_lens, rows.max_seq_len)
    return attention_decode_reference(q, keys, values, table, rows.seq_lens, scale, out)


def prefill_quantized(
    q: torch.Tensor, rows: PrefillRows, cache: QuantizedLayerCache, scale: float, out: torch.Tensor | None
) -> torch.Tensor:
    """[tokens, heads, dim] for rows of many queries."""
    keys, values, table = _blocks(cache, rows.block_table, rows.table_rows, rows.seq_lens, rows.max_seq_len)
    return attention_prefill_reference(q, keys, values, table, rows.query_start, rows.seq_lens, scale, out)


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
