"""Keys and values in 8 bits, a scale for each token and head: store, and read back. Plain torch; the specification.

Codes are [num_blocks, block_size, kv_heads, head_dim] int8 or float8_e4m3fn, scales [num_blocks, block_size, kv_heads]
fp32: x = scale * code. Knows neither sequences nor who owns a block.
"""

from __future__ import annotations

import torch

INT8_MAX, FP8_MAX = 127.0, 448.0
SCALE_DTYPE = torch.float32
SMALLEST_SCALE = 1e-12
"""A head of zeros has some scale."""


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `dtype` [..., dim] and scales [...] of `x` [..., dim]."""
    largest = INT8_MAX if dtype == torch.int8 else FP8_MAX
    wide = x.float()
    scales = wide.abs().amax(-1).div_(largest).clamp_(min=SMALLEST_SCALE)
    codes = wide / scales[..., None]
    if dtype == torch.int8:
        codes = codes.round_()
    return codes.clamp_(-largest, largest).to(dtype), scales


def dequantize_heads(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., dim] fp32."""
    return codes.float() * scales[..., None]


def store_quantized_reference(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `x` [tokens, kv_heads, dim] to slots (block * block_size + offset) of a side of the cache.

    `slot_mapping` [tokens] int64; -1 writes nothing, other slots are distinct.
    """
    written = slot_mapping >= 0
    if not bool(written.all()):
        x, slot_mapping = x[written], slot_mapping[written]
    new_codes, new_scales = quantize_heads(x, codes.dtype)
    # As bytes: torch copies no float8 by index on CPU.
    codes.view(torch.uint8).view(-1, *codes.shape[2:]).index_copy_(0, slot_mapping, new_codes.view(torch.uint8))
    scales.view(-1, scales.shape[2]).index_copy_(0, slot_mapping, new_scales)


def gather_quantized_reference(codes: torch.Tensor, scales: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Blocks [n, block_size, kv_heads, dim] fp32 of `block_ids` [n]."""
    chosen = codes.view(torch.uint8).index_select(0, block_ids).view(codes.dtype)
    return dequantize_heads(chosen, scales.index_select(0, block_ids))
