"""Keys and values of a paged cache in 8 bits, each token's head with a scale of its own. Knows no attention.

Layout: numbers [blocks, block_size, kv_heads, head_dim] as in `kernels/kv_cache`, scales [blocks, block_size, kv_heads]
fp32 beside them, so that a block moves, is copied and shared as before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.runtime import jit

from .layout import FP8_DTYPE, Format
from .quantize import LEAST, largest, quantize_rows_reference, to_eight_bits


class QuantizedCache(NamedTuple):
    """One layer's keys or values: `values` int8 or float8_e4m3fn times `scales`."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def format(self) -> Format:
        return Format.INT8 if self.values.dtype == torch.int8 else Format.FP8

    def gather(self, block_ids: torch.Tensor) -> torch.Tensor:
        """fp32 [ids, block_size, kv_heads, head_dim] of some blocks; what attention should see."""
        return self.values[block_ids].float() * self.scales[block_ids][..., None]


def empty_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, format: Format, device: torch.device
) -> QuantizedCache:
    """A cache of zeros."""
    shape = (num_blocks, block_size, num_kv_heads)
    dtype = torch.int8 if format is Format.INT8 else FP8_DTYPE
    values = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
    return QuantizedCache(values, torch.zeros(shape, dtype=torch.float32, device=device))


def store_quantized_kv_reference(
    k: torch.Tensor, v: torch.Tensor, keys: QuantizedCache, values: QuantizedCache, slot_mapping: torch.Tensor
) -> None:
    """See `store_quantized_kv`."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    for new, cache in ((k[written], keys), (v[written], values)):
        tokens, heads, dim = new.shape
        rows = quantize_rows_reference(new.reshape(tokens * heads, dim), cache.format)
        # Bytes: not every type can be stored by index.
        numbers = cache.values.view(torch.uint8).view(-1, heads, dim)
        numbers[slots] = rows.values.view(torch.uint8).view(tokens, heads, dim)
        cache.scales.view(-1, heads)[slots] = rows.scales.view(tokens, heads)


@jit
def _store_kernel(
    new_ptr, values_ptr, scales_ptr, slot_ptr, new_stride, new_head_stride, num_heads, head_dim, largest, least,
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
    values, scales = to_eight_bits(new, largest, least, values_ptr.dtype.element_ty)
    row = (slot * num_heads + offs_head)[:, None] * head_dim + offs_dim[None, :]
    tl.store(values_ptr + row, values, mask=mask)
    tl.store(scales_ptr + slot * num_heads + offs_head, scales, mask=mask_head)


def store_quantized_kv(
    k: torch.Tensor, v: torch.Tensor, keys: QuantizedCache, values: QuantizedCache, slot_mapping: torch.Tensor
) -> None:
    """Quantize `k` and `v` [tokens, kv_heads, dim] by token and head into slots (block * block_size + offset).

    `slot_mapping` [tokens] int64; -1 writes nothing, other slots must be distinct. k and v may be strided views whose
    last dimension is contiguous.
    """
    if not runtime.use_triton(k):
        store_quantized_kv_reference(k, v, keys, values, slot_mapping)
        return
    num_tokens, num_heads, head_dim = k.shape
    for new, cache in ((k, keys), (v, values)):
        assert new.stride(2) == 1
        assert cache.values.is_contiguous()
        assert cache.scales.is_contiguous()
        if num_tokens == 0:
            continue
        _store_kernel[(num_tokens,)](
            new,
            cache.values,
            cache.scales,
            slot_mapping,
            new.stride(0),
            new.stride(1),
            num_heads,
            head_dim,
            largest(cache.format),
            LEAST,
            BLOCK_HEADS=triton.next_power_of_2(num_heads),
            BLOCK_DIM=triton.next_power_of_2(head_dim),
            num_warps=4,
        )
