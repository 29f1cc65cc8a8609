"""A quantized weight written out in 16 bits, for products of so many rows that reading it twice does not matter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.runtime import jit

from .layout import INT4_ZERO, NIBBLES, Format, QuantizedWeight, dequantize

_BLOCK_N = 16
_BLOCK_K = 128
"""Elements of a row that a program takes; int4: words of one block."""


def dequantized_reference(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """See `dequantized`."""
    wide = dequantize(weight)
    return (wide if weight.order is None else wide[:, weight.order]).to(dtype)


@jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, out_ptr, n_size, k_size, weight_stride, group,
    IS_INT4: tl.constexpr, INT4_ZERO: tl.constexpr, PLANE: tl.constexpr, PLANES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_j = tl.arange(0, PLANE)
    mask_n = (offs_n < n_size)[:, None]
    pid_k = tl.program_id(0)
    places = weight_ptr + offs_n.to(tl.int64)[:, None] * weight_stride + pid_k * PLANE + offs_j[None, :]
    packed = tl.load(places, mask=mask_n & (pid_k * PLANE + offs_j < weight_stride)[None, :], other=0.0)
    for i in tl.static_range(PLANES):  # pyright: ignore[reportGeneralTypeIssues]
        offs_k = (pid_k * PLANES + i) * PLANE + offs_j
        mask = mask_n & (offs_k < k_size)[None, :]
        places_scale = (offs_k // group)[None, :] * n_size + offs_n[:, None]
        if IS_INT4:
            values = ((packed >> (4 * i)) & 15).to(tl.float32)
        else:
            values = packed.to(tl.float32)
        if zero_ptr is not None:
            values -= tl.load(zero_ptr + places_scale, mask=mask, other=0.0).to(tl.float32)
        elif IS_INT4:
            values -= INT4_ZERO
        values *= tl.load(scale_ptr + places_scale, mask=mask, other=0.0).to(tl.float32)
        places_out = out_ptr + offs_n.to(tl.int64)[:, None] * k_size + offs_k[None, :]
        tl.store(places_out, values.to(out_ptr.dtype.element_ty), mask=mask)


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] in `dtype`, computed in fp32 and rounded once; columns in stored order."""
    if not runtime.use_triton(weight.weight):
        return dequantized_reference(weight, dtype)
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.weight.device)
    is_int4 = weight.format is Format.INT4
    plane = weight.plane if is_int4 else _BLOCK_K
    planes = NIBBLES if is_int4 else 1
    grid = (triton.cdiv(weight.in_features, plane * planes), triton.cdiv(weight.out_features, _BLOCK_N))
    _dequantize_kernel[grid](
        weight.weight,
        weight.scales,
        weight.zeros,
        out,
        weight.out_features,
        weight.in_features,
        weight.weight.stride(0),
        min(weight.group, weight.in_features),
        IS_INT4=is_int4,
        INT4_ZERO=INT4_ZERO,
        PLANE=plane,
        PLANES=planes,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
    )
    return out
