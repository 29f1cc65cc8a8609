"""Rows of activations in 8 bits, scaled to their own largest element; the norm or the gate in front in one launch.

Knows no product. A scale belongs to a whole row (a token) or to groups of 128 of its elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.activation import silu_and_mul_reference
from manta.kernels.dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from manta.kernels.rmsnorm import rms_norm_reference
from manta.kernels.runtime import jit

from .layout import FP8_DTYPE, FP8_MAX, Format

INT8_MAX = 127.0
LEAST = 1e-10
"""Of a row's largest element: rows of zeros have a scale too."""
_ROUND = tl.constexpr(1.5 * 2**23)
"""Adding it to an fp32 number below 2^22 rounds that to a whole one, ties to even."""


class QuantizedRows(NamedTuple):
    """`values` [rows, dim] int8 or float8_e4m3fn times `scales` [groups, rows] fp32 are the rows."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """fp32 [rows, dim]."""
        rows, dim = self.values.shape
        group = dim // self.scales.shape[0]
        return (self.values.float().view(rows, -1, group) * self.scales.t()[:, :, None]).view(rows, dim)


def largest(format: Format) -> float:
    return INT8_MAX if format is Format.INT8 else FP8_MAX


def quantize_rows_reference(
    x: torch.Tensor,
    format: Format,
    group: int | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> QuantizedRows:
    """See `quantize_rows`."""
    wide = x.float()
    if norm_weight is not None:
        wide = rms_norm_reference(wide, norm_weight.float(), eps)
    rows, dim = wide.shape
    groups = wide.reshape(rows, -1, group or dim)
    most = groups.abs().amax(-1, keepdim=True).clamp_(min=LEAST)
    scaled = groups * (largest(format) / most)
    values = scaled.round().to(torch.int8) if format is Format.INT8 else scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return QuantizedRows(values.view(rows, dim), (most / largest(format)).view(rows, -1).t().contiguous())


def silu_and_mul_quantize_reference(gate_up: torch.Tensor, format: Format, group: int | None = None) -> QuantizedRows:
    """See `silu_and_mul_quantize`."""
    return quantize_rows_reference(silu_and_mul_reference(gate_up.float(), interleaved=True), format, group)


@jit
def to_eight_bits(groups, largest, least, DTYPE: tl.constexpr):
    """`groups` [groups, elements] fp32 in DTYPE, int8 or e4m3, and the scale of each."""
    most = tl.maximum(tl.max(tl.abs(groups), axis=1), least)
    return round_to_codes(groups, most, largest, DTYPE), most / largest


@jit
def round_to_codes(groups, most, largest, DTYPE: tl.constexpr):
    """`groups` [groups, elements] fp32 in DTYPE, int8 or e4m3; `most` [groups] becomes `largest`."""
    scaled = groups * (largest / most)[:, None]
    if tl.int8 == DTYPE:
        values = ((scaled + _ROUND) - _ROUND).to(tl.int8)
    else:
        values = tl.minimum(tl.maximum(scaled, -largest), largest).to(DTYPE)
    return values


@jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr,
    norm_weight_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    num_rows,
    dim,
    eps,
    largest,
    least,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program; GROUPS of BLOCK elements, of which `dim` exist."""
    pid = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < dim
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor()
    if GATED:
        offs_pair = tl.arange(0, 2 * BLOCK)
        pairs = tl.load(x_ptr + pid * x_stride + offs_pair, mask=offs_pair < 2 * dim, other=0.0).to(tl.float32)
        gate, up = pairs.reshape(BLOCK, 2).split()
        x = gate * tl.sigmoid(gate) * up
    else:
        x = tl.load(x_ptr + pid * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if norm_weight_ptr is not None:
        x = x * tl.rsqrt(tl.sum(x * x) / dim + eps) * norm_weight  # pyright: ignore[reportPossiblyUnboundVariable]
    if PDL:
        let_successor_start()
    values, scales = to_eight_bits(x.reshape(GROUPS, BLOCK // GROUPS), largest, least, out_ptr.dtype.element_ty)
    tl.store(out_ptr + pid * dim + offs, values.reshape(BLOCK), mask=mask)
    offs_group = tl.arange(0, GROUPS)
    mask_group = offs_group * (BLOCK // GROUPS) < dim
    tl.store(scale_ptr + offs_group * num_rows + pid, scales, mask=mask_group)


def quantize_rows(
    x: torch.Tensor,
    format: Format,
    group: int | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> QuantizedRows:
    """Quantize `x` [rows, dim], or rms_norm(x) * `norm_weight` [dim], computed in fp32 and rounded once.

    Rows may have a stride. A row, or each `group` of its elements (a power of two that divides `dim`), is scaled so
    that its largest magnitude becomes 127 (INT8) or 448 (FP8).
    """
    if not runtime.use_triton(x):
        return quantize_rows_reference(x, format, group, norm_weight=norm_weight, eps=eps)
    return _launch(x, format, group, x.shape[1], norm_weight, eps, gated=False)


def silu_and_mul_quantize(gate_up: torch.Tensor, format: Format, group: int | None = None) -> QuantizedRows:
    """Quantize silu(gate) * up of `gate_up` [rows, 2 dim], whose columns 2 i and 2 i + 1 are gate and up."""
    if not runtime.use_triton(gate_up):
        return silu_and_mul_quantize_reference(gate_up, format, group)
    return _launch(gate_up, format, group, gate_up.shape[1] // 2, None, 0.0, gated=True)


def _launch(
    x: torch.Tensor,
    format: Format,
    group: int | None,
    dim: int,
    norm_weight: torch.Tensor | None,
    eps: float,
    *,
    gated: bool,
) -> QuantizedRows:
    rows = x.shape[0]
    assert x.stride(1) == 1
    assert format is not Format.INT4
    assert group is None or (dim % group == 0 and group & (group - 1) == 0)
    values = torch.empty((rows, dim), dtype=torch.int8 if format is Format.INT8 else FP8_DTYPE, device=x.device)
    scales = torch.empty((dim // (group or dim), rows), dtype=torch.float32, device=x.device)
    if rows == 0:
        return QuantizedRows(values, scales)
    block = triton.next_power_of_2(dim)
    dependent = has_dependent_launch(x)
    _quantize_kernel[(rows,)](
        x,
        norm_weight,
        values,
        scales,
        x.stride(0),
        rows,
        dim,
        eps,
        largest(format),
        LEAST,
        GATED=gated,
        GROUPS=block // group if group else 1,
        BLOCK=block,
        PDL=dependent,
        num_warps=min(16, max(1, block // 1024)),
        launch_pdl=dependent,
    )
    return QuantizedRows(values, scales)
