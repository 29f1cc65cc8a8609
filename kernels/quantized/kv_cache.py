"""Keys and values of a paged cache in 8 bits, each token's head with a scale of its own: store, and read back.

A side of the cache is codes [num_blocks, block_size, kv_heads, head_dim] int8 or float8_e4m3fn and scales [num_blocks,
block_size, kv_heads] fp32: x = scale * code. A block moves, is copied and shared as before. Knows no attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.runtime import jit

from .layout import Format
from .quantize import LEAST, largest, quantize_rows_reference, to_eight_bits

SCALE_DTYPE = torch.float32


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
    return dequantize_heads(chosen, scales.index_select(0, block_ids))


def store_quantized_reference(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `store_quantized`."""
    written = slot_mapping >= 0
    if not bool(written.all()):
        x, slot_mapping = x[written], slot_mapping[written]
    new_codes, new_scales = quantize_heads(x, codes.dtype)
    # As bytes: torch copies no float8 by index on CPU.
    codes.view(torch.uint8).view(-1, *codes.shape[2:]).index_copy_(0, slot_mapping, new_codes.view(torch.uint8))
    scales.view(-1, scales.shape[2]).index_copy_(0, slot_mapping, new_scales)


@jit
def _store_kernel(
    new_ptr, codes_ptr, scales_ptr, slot_ptr, new_stride, new_head_stride, num_heads, head_dim, largest, least,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + pid).to(tl.int64)
    if slot < 0:
        return
    offs_head = tl.arange(0, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask_head = offs_head < num_heads
    mask = mask_head[:, None] & (offs_dim < head_dim)[None, :]
    places = new_ptr + pid * new_stride + offs_head[:, None] * new_head_stride + offs_dim[None, :]
    new = tl.load(places, mask=mask, other=0.0).to(tl.float32)  # [heads, dim]
    codes, scales = to_eight_bits(new, largest, least, codes_ptr.dtype.element_ty)
    row = (slot * num_heads + offs_head)[:, None] * head_dim + offs_dim[None, :]
    tl.store(codes_ptr + row, codes, mask=mask)
    tl.store(scales_ptr + slot * num_heads + offs_head, scales, mask=mask_head)


def store_quantized(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Quantize `x` [tokens, kv_heads, dim] by token and head into slots (block * block_size + offset) of a side.

    `slot_mapping` [tokens] int64; -1 writes nothing, other slots must be distinct. `x` may be a strided view whose last
    dimension is contiguous.
    """
    if not runtime.use_triton(x):
        store_quantized_reference(x, codes, scales, slot_mapping)
        return
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    if num_tokens == 0:
        return
    _store_kernel[(num_tokens,)](
        x,
        codes,
        scales,
        slot_mapping,
        x.stride(0),
        x.stride(1),
        num_heads,
        head_dim,
        largest(_format(codes.dtype)),
        LEAST,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def _format(dtype: torch.dtype) -> Format:
    return Format.INT8 if dtype == torch.int8 else Format.FP8
