"""One row of 16 bits times a quantized weight, norm in front and gate or residual behind. Knows no model.

As `kernels/gemv`: CUDA cores suffice for two operations a number, whole rows stream through all multiprocessors, and
nothing else is launched in between. Numbers become fp32 in registers; a group's scale multiplies its products there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from manta.kernels.gemv import gemv_reference
from manta.kernels.runtime import jit

from .layout import INT4_ZERO, NIBBLES, Format, QuantizedWeight, dequantize
from .unpack import fp8_values, int4_values, int8_values

_PIECE = 128
"""Bytes of a row that stand together in a step where the layout does not say how many."""


@dataclass(frozen=True)
class QuantizedGemvTiles:
    """A program's rows of the weight, and how many pieces of each (128 bytes, as a rule) it takes at a time."""

    block_n: int
    pieces: int
    num_warps: int
    inline_ptx: bool = True


def quantized_gemv_reference(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `quantized_gemv`; fp32 inside, any number of rows."""
    around = {"norm_weight": norm_weight, "eps": eps, "gated": gated, "residual": residual}
    return gemv_reference(x, dequantize(weight), bias, **around)  # pyright: ignore[reportArgumentType]


@jit
def _quantized_gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    norm_weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    n_size,
    k_size,
    weight_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    INT4_ZERO: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    PLANES: tl.constexpr,
    EVEN_K: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A piece: PIECE words of PLANES numbers each (see `pack_int4`), or as many bytes. GROUP 0: one for the row."""
    PIECE_K: tl.constexpr = PIECE * PLANES
    pid = tl.program_id(0)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, PIECES)
    offs_j = tl.arange(0, PIECE)
    # Rows past the end read the last row again and store nothing.
    rows = tl.minimum(offs_n, n_size - 1)
    within = offs_p[:, None] * PIECE + offs_j[None, :]  # [PIECES, PIECE]
    weight_rows = weight_ptr + rows.to(tl.int64)[:, None, None] * weight_stride + within[None, :, :]
    if PDL:
        wait_for_predecessor()
    acc = tl.zeros([BLOCK_N, PIECES, PIECE], tl.float32)
    squares = tl.zeros([PIECES, PIECE], tl.float32)
    for first in range(0, k_size, PIECES * PIECE_K):
        first_piece = first // PIECE_K + offs_p
        if EVEN_K:
            packed = tl.load(weight_rows + first // PLANES)  # [BLOCK_N, PIECES, PIECE]
        else:  # int4 rows are padded to whole pieces
            is_there = (first_piece[:, None] * PIECE_K + offs_j[None, :] < k_size)[None, :, :]
            packed = tl.load(weight_rows + first // PLANES, mask=is_there, other=0.0)
        for plane in tl.static_range(PLANES):  # pyright: ignore[reportGeneralTypeIssues]
            starts = first_piece * PIECE_K + plane * PIECE
            offs_k = starts[:, None] + offs_j[None, :]
            if EVEN_K:
                x = tl.load(x_ptr + offs_k).to(tl.float32)
            else:
                x = tl.load(x_ptr + offs_k, mask=offs_k < k_size, other=0.0).to(tl.float32)
            if norm_weight_ptr is not None:
                squares += x * x
                if EVEN_K:
                    x *= tl.load(norm_weight_ptr + offs_k).to(tl.float32)
                else:
                    x *= tl.load(norm_weight_ptr + offs_k, mask=offs_k < k_size, other=0.0).to(tl.float32)
            if FORMAT == "int4":
                values = int4_values(packed, plane, tl.bfloat16, INLINE_PTX).to(tl.float32)
            elif not INLINE_PTX:
                values = packed.to(tl.float32)
            elif FORMAT == "int8":
                values = int8_values(packed, tl.bfloat16, True).to(tl.float32)
            else:
                values = fp8_values(packed, tl.bfloat16, True).to(tl.float32)
            if GROUP > 0:
                places = (starts // GROUP)[None, :] * n_size + rows[:, None]  # [BLOCK_N, PIECES]
                in_row = (starts < k_size)[None, :]
            else:
                places = rows[:, None] + starts[None, :] * 0
                in_row = (starts < k_size)[None, :]
            if zero_ptr is not None:
                zeros = tl.load(zero_ptr + places, mask=in_row, other=0.0).to(tl.float32)
                if FORMAT == "int4":
                    zeros -= INT4_ZERO
                values -= zeros[:, :, None]
            if GROUP > 0:
                scale = tl.load(scale_ptr + places, mask=in_row, other=0.0).to(tl.float32)
                acc += values * x[None, :, :] * scale[:, :, None]
            else:
                acc += values * x[None, :, :]
    if PDL:
        let_successor_start()
    out = tl.sum(tl.sum(acc, axis=2), axis=1)  # [BLOCK_N]
    if GROUP == 0:
        out *= tl.load(scale_ptr + rows).to(tl.float32)
    if norm_weight_ptr is not None:
        out *= tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / k_size + eps)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=offs_n < n_size, other=0.0).to(tl.float32)
    if GATED:
        gate, up = out.reshape(BLOCK_N // 2, 2).split()
        out = gate * tl.sigmoid(gate) * up
        offs_out = pid * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask_out = offs_out < n_size // 2
    else:
        offs_out = offs_n
        mask_out = offs_n < n_size
    if RESIDUAL:
        out += tl.load(out_ptr + offs_out, mask=mask_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_out)


def quantized_gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    tiles: QuantizedGemvTiles,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b for one row `x` [1, K] of 16 bits, accumulated in fp32 and rounded once.

    `norm_weight`, `gated` and `residual` [1, N] as in `gemv`; columns of `x` and of the norm are in stored order
    (`weight.order` is the caller's business). Specification: `quantized_gemv_reference`.
    """
    num_rows, k_size = x.shape
    n_size = weight.out_features
    assert num_rows == 1
    assert k_size == weight.in_features
    assert x.stride(1) == 1
    assert weight.weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    assert not gated or (n_size % 2 == 0 and tiles.block_n % 2 == 0)
    out = residual
    if out is None:
        out = torch.empty((1, n_size // 2 if gated else n_size), dtype=x.dtype, device=x.device)
    one_group = weight.group >= k_size
    planes = NIBBLES if weight.format is Format.INT4 else 1
    piece = weight.plane if planes > 1 else _PIECE if one_group else min(_PIECE, weight.group)
    dependent = has_dependent_launch(x)
    _quantized_gemv_kernel[(triton.cdiv(n_size, tiles.block_n),)](
        x,
        weight.weight,
        weight.scales,
        weight.zeros,
        norm_weight,
        bias,
        out,
        eps,
        n_size,
        k_size,
        weight.weight.stride(0),
        FORMAT=weight.format.value,
        GROUP=0 if one_group else weight.group,
        INT4_ZERO=INT4_ZERO,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_N=tiles.block_n,
        PIECES=tiles.pieces,
        PIECE=piece,
        PLANES=planes,
        EVEN_K=k_size % (piece * planes * tiles.pieces) == 0,
        INLINE_PTX=tiles.inline_ptx and runtime.has_inline_ptx(x),
        PDL=dependent,
        num_warps=tiles.num_warps,
        launch_pdl=dependent,
    )
    return out
