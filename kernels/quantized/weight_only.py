"""16-bit activations times a weight of 4 or 8 bits, dequantized in registers. Knows no model.

Operands are swapped as in `gemm_skinny`: the weight's rows fill the matrix instruction, whose operand of that side may
lie in registers, so that unpacked numbers never pass through shared memory (the idea of Marlin, Frantar et al. 2024,
arXiv 2408.11743, and Machete). Scales multiply the fp32 sum of a group; a scale for the whole row waits for the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from manta.kernels.gemm_skinny import store_transposed
from manta.kernels.gemv import gemv_reference
from manta.kernels.runtime import jit
from manta.kernels.split_k import finish_tile, store_part, workspace

from .layout import INT4_ZERO, NIBBLES, Format, QuantizedWeight, dequantize
from .unpack import fp8_values, int4_values, int8_values, minus_zeros


@dataclass(frozen=True)
class WeightOnlyTiles:
    """Rows of the weight, most rows of x, and elements of K a step (int4: four planes, whatever this says)."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    inline_ptx: bool = True
    """Unpack by assembly where there is one."""


def weight_only_reference(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `weight_only_product`; fp32 inside, any number of rows."""
    return gemv_reference(x, dequantize(weight), bias, gated=gated, residual=residual)


@jit
def _of_groups(ptr, start, k_size, rows_n, n_size, GROUP: tl.constexpr, COUNT: tl.constexpr, INLINE_PTX: tl.constexpr):
    """What COUNT groups from element `start` on have [BLOCK_N] each, a tuple; past the last it is the last's."""
    found = ()
    for i in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        group = tl.minimum(start + i * GROUP, k_size - 1) // GROUP
        places = ptr + group * n_size + rows_n
        if INLINE_PTX and ptr.dtype.element_ty.primitive_bitwidth == 16:
            # Into 32 bits: what is carried to the next step in halves of registers is waited for in this one.
            bits = tl.inline_asm_elementwise(
                "ld.global.nc.u16 $0, [$1];", "=r,l", [places.to(tl.int64)], dtype=tl.uint32, is_pure=False, pack=1
            )
            found += (bits,)
        else:
            found += (tl.load(places),)
    return found


@jit
def _to_float(numbers, DTYPE: tl.constexpr):
    """fp32 of what `_of_groups` found in memory of DTYPE."""
    if numbers.dtype == tl.uint32:
        if tl.bfloat16 == DTYPE:
            return (numbers << 16).to(tl.float32, bitcast=True)
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "=f,r", [numbers], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return numbers.to(tl.float32)


@jit(do_not_specialize=["num_rows", "steps_per_split"])
def _weight_only_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    n_size,
    k_size,
    weight_stride,
    steps_per_split,
    x_stride,
    out_stride,
    IS_INT4: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    INT4_ZERO: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANE: tl.constexpr,
    PLANES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    INLINE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """A step takes PLANES planes of PLANE elements of each row: the nibbles of PLANE words, or one plane of bytes."""
    STEP_K: tl.constexpr = PLANE * PLANES
    GROUP_PLANES: tl.constexpr = PLANES if ONE_GROUP or GROUP >= STEP_K else GROUP // PLANE
    GROUPS: tl.constexpr = PLANES // GROUP_PLANES
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    pid_n = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M
    num_blocks_n = tl.num_programs(0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row again and store nothing.
    rows_n = tl.minimum(offs_n, n_size - 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_j = tl.arange(0, PLANE)
    mask_m = (row + offs_m < num_rows)[None, :]
    weight_tile = weight_ptr + rows_n.to(tl.int64)[:, None] * weight_stride + offs_j[None, :]
    x_tile = x_ptr + (row + offs_m).to(tl.int64)[None, :] * x_stride + offs_j[:, None]
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(k_size, STEP_K))
    scales = _of_groups(scale_ptr, first * STEP_K, k_size, rows_n, n_size, GROUP, GROUPS, INLINE_PTX)
    if zero_ptr is not None:
        zeros = _of_groups(zero_ptr, first * STEP_K, k_size, rows_n, n_size, GROUP, GROUPS, INLINE_PTX)
    if PDL:
        wait_for_predecessor()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first, last):
        if EVEN_K or IS_INT4:  # int4 rows are padded to whole steps
            packed = tl.load(weight_tile + step * PLANE)  # [BLOCK_N, PLANE] words or bytes
        else:
            packed = tl.load(weight_tile + step * PLANE, mask=(step * PLANE + offs_j < k_size)[None, :], other=0.0)
        part = acc if ONE_GROUP else tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i in tl.static_range(PLANES):  # pyright: ignore[reportGeneralTypeIssues]
            start = step * STEP_K + i * PLANE
            if EVEN_K:
                x = tl.load(x_tile + start, mask=mask_m, other=0.0)  # [PLANE, BLOCK_M]
            else:
                x = tl.load(x_tile + start, mask=mask_m & (start + offs_j < k_size)[:, None], other=0.0)
            if IS_INT4:
                values = int4_values(packed, i, DTYPE, INLINE_PTX)  # [BLOCK_N, PLANE]
            elif weight_ptr.dtype.element_ty == tl.int8:
                values = int8_values(packed, DTYPE, INLINE_PTX)
            else:
                values = fp8_values(packed, DTYPE, INLINE_PTX)
            if zero_ptr is not None:
                minus = _to_float(zeros[i // GROUP_PLANES], zero_ptr.dtype.element_ty)  # pyright: ignore[reportPossiblyUnboundVariable]
                if IS_INT4:
                    minus -= INT4_ZERO
                values = minus_zeros(values, minus.to(DTYPE), DTYPE, INLINE_PTX)
            part = tl.dot(values, x, part)
            if (i + 1) % GROUP_PLANES == 0 and not ONE_GROUP:
                acc += part * _to_float(scales[i // GROUP_PLANES], scale_ptr.dtype.element_ty)[:, None]
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if ONE_GROUP:
            acc = part
        else:  # on their way while the next step is multiplied
            start = (step + 1) * STEP_K
            scales = _of_groups(scale_ptr, start, k_size, rows_n, n_size, GROUP, GROUPS, INLINE_PTX)
            if zero_ptr is not None:
                zeros = _of_groups(zero_ptr, start, k_size, rows_n, n_size, GROUP, GROUPS, INLINE_PTX)
    if PDL:
        let_successor_start()
    if ONE_GROUP:
        acc *= _to_float(scales[0], scale_ptr.dtype.element_ty)[:, None]
    if SPLITS > 1:
        tile = tl.program_id(2) * num_blocks_n + pid_n
        if store_part(acc, partial_ptr, counter_ptr, tile, split, num_rows - row, True, SPLITS):
            finish_tile(
                partial_ptr, counter_ptr, bias_ptr, out_ptr, tile, row, pid_n * BLOCK_N, num_rows, n_size, out_stride,
                GATED, RESIDUAL, BLOCK_M, BLOCK_N, SPLITS,
            )  # fmt: skip
    else:
        own = out_ptr + row.to(tl.int64) * out_stride
        store_transposed(
            acc, bias_ptr, own, pid_n, num_rows - row, n_size, out_stride, GATED, RESIDUAL, BLOCK_M, BLOCK_N
        )


def weight_only_product(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    tiles: WeightOnlyTiles,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b for `x` [M, K] of 16 bits, accumulated in fp32 and rounded once; any M, meant for small ones.

    `x` may have a row stride; its columns are in stored order (`weight.order` is the caller's business). `gated` and
    `residual` [M, N] as in `gemv`. The same inputs give the same bits in each run. Numbers that no zero point makes
    fractional are exact in x's type. Specification: `weight_only_reference`.
    """
    num_rows, k_size = x.shape
    n_size = weight.out_features
    assert num_rows > 0
    assert k_size == weight.in_features
    assert x.stride(1) == 1
    assert x.element_size() == 2
    assert weight.weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    assert not gated or n_size % 2 == 0
    out = residual
    if out is None:
        out = torch.empty((num_rows, n_size // 2 if gated else n_size), dtype=x.dtype, device=x.device)
    is_int4 = weight.format is Format.INT4
    one_group = weight.group >= k_size
    plane = weight.plane if is_int4 else min(tiles.block_k, weight.group)  # no more than a group
    planes = NIBBLES if is_int4 else 1
    steps = triton.cdiv(k_size, plane * planes)
    splits = min(tiles.splits, steps)
    blocks_n, blocks_m = triton.cdiv(n_size, tiles.block_n), triton.cdiv(num_rows, tiles.block_m)
    partial, counter = workspace(x.device, blocks_n * blocks_m, splits, tiles.block_n * tiles.block_m)
    dependent = has_dependent_launch(x)
    _weight_only_kernel[(blocks_n, splits, blocks_m)](
        x,
        weight.weight,
        weight.scales,
        weight.zeros,
        bias,
        out,
        partial,
        counter,
        num_rows,
        n_size,
        k_size,
        weight.weight.stride(0),
        triton.cdiv(steps, splits),
        x.stride(0),
        out.stride(0),
        IS_INT4=is_int4,
        ONE_GROUP=one_group,
        GROUP=weight.group,
        INT4_ZERO=INT4_ZERO,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PLANE=plane,
        PLANES=planes,
        SPLITS=splits,
        EVEN_K=k_size % (plane * planes) == 0,
        INLINE_PTX=tiles.inline_ptx and runtime.has_inline_ptx(x),
        PDL=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=dependent,
    )
    return out
