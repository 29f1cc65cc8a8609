"""The library's products of two 8-bit operands (cuBLAS, CUTLASS behind torch), with our epilogues. Knows no model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from manta.kernels.activation import silu_and_mul
from manta.kernels.runtime import jit

from .layout import Format, QuantizedWeight
from .quantize import QuantizedRows

_int_mm: Callable[..., torch.Tensor] = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
_scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
_BLOCK = 1024


@jit
def _scale_kernel(
    sum_ptr, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, n_size, out_stride,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int32 sums [rows, n_size] of one row: scales, bias, gate or residual."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < n_size
    out = tl.load(sum_ptr + row * n_size + offs_n, mask=mask, other=0).to(tl.float32)
    out *= tl.load(x_scale_ptr + row) * tl.load(scale_ptr + offs_n, mask=mask, other=0.0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate, up = out.reshape(BLOCK // 2, 2).split()
        out = gate * tl.sigmoid(gate) * up
        offs_n = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        mask = offs_n < n_size // 2
    places = out_ptr + row * out_stride + offs_n
    if RESIDUAL:
        out += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)


def scale_sums(
    sums: torch.Tensor,
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What stands behind an int8 product: `sums` [M, N] int32 to `dtype`, as the product kernels end."""
    num_rows, n_size = sums.shape
    out = residual
    if out is None:
        out = torch.empty((num_rows, n_size // 2 if gated else n_size), dtype=dtype, device=sums.device)
    _scale_kernel[(num_rows, triton.cdiv(n_size, _BLOCK))](
        sums,
        rows.scales,
        weight.scales,
        bias,
        out,
        n_size,
        out.stride(0),
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def int8_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int32 [M, N] of int8 `x` [M, K] and `weight` [N, K], by the library."""
    return _int_mm(x, weight.t())


def library_takes(num_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch has a product for these operands: one scale a row, sizes in 16s; int8 from 17 rows, FP8 to bf16."""
    if weight.group < weight.in_features or weight.in_features % 16 or weight.out_features % 16:
        return False
    return num_rows > 16 if weight.format is Format.INT8 else dtype == torch.bfloat16


def library_product(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `swapped_product`, for operands that `library_takes`; FP8 results are rounded before gate and residual."""
    if weight.format is Format.INT8:
        sums = int8_sums(rows.values, weight.weight)
        return scale_sums(sums, rows, weight, bias, dtype=dtype, gated=gated, residual=residual)
    out = _scaled_mm(
        rows.values,
        weight.weight.t(),
        scale_a=rows.scales.view(-1, 1),
        scale_b=weight.scales.view(1, -1),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    if gated:
        return silu_and_mul(out, interleaved=True)
    return out if residual is None else residual.add_(out)
