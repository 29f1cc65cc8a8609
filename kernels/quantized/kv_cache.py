"""Keys and values of a paged cache in 8 bits, each token's head with a scale of its own: store, and read back.

A side of the cache is codes [num_blocks, block_size, kv_heads, head_dim] int8 or float8_e4m3fn and scales [num_blocks,
kv_heads, block_size] fp32 (those of a head side by side, as attention reads them): x = scale * code. A block moves, is
copied and shared as before. Knows no attention; kernels/rope stores, the attention kernels read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from manta.kernels.runtime import jit

from .layout import Format
from .quantize import LEAST, largest, quantize_rows_reference, round_to_codes
from .unpack import fp8_values, int8_values

SCALE_DTYPE = torch.float32
LEAST_MAGNITUDE = tl.constexpr(LEAST)
"""Of a head: zeros have a scale too."""


class CacheScales(NamedTuple):
    """Of keys and of values, each [num_blocks, kv_heads, block_size] fp32."""

    keys: torch.Tensor
    values: torch.Tensor


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `dtype` [..., dim] and scales [...] of `x` [..., dim]."""
    rows = quantize_rows_reference(x.reshape(-1, x.shape[-1]), _format(dtype))
    return rows.values.view(x.shape), rows.scales.view(x.shape[:-1])


def dequantize_heads(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., dim] fp32."""
    return codes.float() * scales[..., None]


def gather_quantized_reference(codes: torch.Tensor, scales: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Blocks [n, block_size, kv_heads, dim] fp32 of `block_ids` [n]."""
    chosen = codes.view(torch.uint8).index_select(0, block_ids).view(codes.dtype)
    return dequantize_heads(chosen, scales.index_select(0, block_ids).transpose(1, 2))


def store_quantized_reference(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Quantize `x` [tokens, kv_heads, dim] by token and head into slots (block * block_size + offset) of a side.

    `slot_mapping` [tokens] int64; -1 writes nothing, other slots must be distinct.
    """
    written = slot_mapping >= 0
    if not bool(written.all()):
        x, slot_mapping = x[written], slot_mapping[written]
    new_codes, new_scales = quantize_heads(x, codes.dtype)
    # As bytes: torch copies no float8 by index on CPU.
    codes.view(torch.uint8).view(-1, *codes.shape[2:]).index_copy_(0, slot_mapping, new_codes.view(torch.uint8))
    block_size = codes.shape[1]
    scales[slot_mapping // block_size, :, slot_mapping % block_size] = new_scales


def dequantized_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scales: CacheScales,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The blocks that the rows of `block_table` [rows, max_blocks] use, each once: keys and values [n, block_size,
    kv_heads, dim] fp32 and a block table [rows, blocks] int32 into them. For references: waits for `seq_lens` [rows].
    """
    block_size = key_cache.shape[1]
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    table = block_table[:, : max(1, -(-longest // block_size))].long()
    is_used = torch.arange(table.shape[1], device=table.device) * block_size < seq_lens[:, None]
    ids, places = torch.where(is_used, table, table[:, :1].clamp(min=0)).unique(return_inverse=True)
    keys = gather_quantized_reference(key_cache, scales.keys, ids)
    values = gather_quantized_reference(value_cache, scales.values, ids)
    return keys, values, places.int()


@jit
def head_values(codes, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """What `codes`, int8 or e4m3, are in DTYPE, exactly (without their scales)."""
    if codes.dtype == tl.int8:
        return int8_values(codes, DTYPE, INLINE_PTX and tl.float32 != DTYPE)
    return fp8_values(codes, DTYPE, INLINE_PTX)


@jit
def store_codes(x, magnitude, codes_ptrs, mask, largest):
    """Store fp32 `x` [rows, elements], rows of whose largest magnitude is `magnitude` [rows], as codes."""
    codes = round_to_codes(x, magnitude, largest, codes_ptrs.dtype.element_ty)
    tl.store(codes_ptrs, codes, mask=mask)


def check_scales(scales: CacheScales, key_cache: torch.Tensor) -> None:
    """The caller's promises about a cache in 8 bits."""
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    for side in scales:
        assert side.shape == (num_blocks, num_kv_heads, block_size)
        assert side.is_contiguous()
        assert side.dtype == SCALE_DTYPE


def largest_code(dtype: torch.dtype) -> float:
    """Of int8 or float8_e4m3fn."""
    return largest(_format(dtype))


def _format(dtype: torch.dtype) -> Format:
    return Format.INT8 if dtype == torch.int8 else Format.FP8
