"""Products of rows and weights that both have 8 bits, int8 or e4m3, on the tensor cores' 8-bit paths. Knows no model.

One scale a token and one a row of the weight multiply the finished sum; with groups of 128 (block FP8 checkpoints) each
group's sum is promoted to fp32 and scaled, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3). Few rows take swapped
operands as in `gemm_skinny`, many the persistent kernel of `gemm`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from manta.kernels import runtime
from manta.kernels.dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from manta.kernels.gemm import GemmTiles, can_tile, store_tile
from manta.kernels.gemm_skinny import store_transposed
from manta.kernels.gemv import gemv_reference
from manta.kernels.runtime import jit
from manta.kernels.split_k import finish_tile, store_part, workspace

from .layout import Format, QuantizedWeight, dequantize
from .quantize import QuantizedRows

_GROUP_M = 8
"""Tile rows that share the weight's tiles in L2 before the next columns follow."""


@dataclass(frozen=True)
class SwappedTiles:
    """Rows of the weight, most rows of x, elements of K a step; programs that share a tile's K."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    tma: bool = False
    """Tiles are fetched by the TMA unit, without groups and from operands that `can_tile`."""
    unroll: int = 1
    """With groups: how many ahead scales are loaded, where a program's part of K is a multiple of so many."""


def eight_bit_reference(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `swapped_product`; fp32 inside, any number of rows."""
    out = gemv_reference(rows.dequantize(), dequantize(weight), bias, gated=gated, residual=residual)
    return out if residual is not None else out.to(dtype)


@jit
def _of_groups(ptr, first, size, offsets, COUNT: tl.constexpr):
    """The scales at `offsets` of COUNT groups of `size` scales from group `first` on, a tuple."""
    found = ()
    for i in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        found += (tl.load(ptr + (first + i) * size + offsets),)
    return found


@jit(do_not_specialize=["num_rows"])
def _swapped_kernel(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    n_size,
    k_size,
    k_per_split,
    out_stride,
    x_desc,
    weight_desc,
    GROUPED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPED: both operands have a scale for each BLOCK_K elements; UNROLL such groups a turn."""
    IS_INT8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if IS_INT8 else tl.float32  # pyright: ignore[reportAssignmentType]
    pid_n = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row again and store nothing.
    rows_n = tl.minimum(offs_n, n_size - 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = row + offs_m < num_rows
    weight_rows = weight_ptr + rows_n.to(tl.int64) * k_size
    weight_tile = weight_rows[:, None] + offs_k[None, :]
    x_tile = x_ptr + (row + offs_m).to(tl.int64)[None, :] * k_size + offs_k[:, None]
    begin = split * k_per_split
    end = tl.minimum(begin + k_per_split, k_size)
    rows_m = tl.minimum(row + offs_m, num_rows - 1)
    first_group = begin // BLOCK_K if GROUPED else 0
    last_group = tl.cdiv(k_size, BLOCK_K) - 1
    scales = _of_groups(scale_ptr, first_group, n_size, rows_n, UNROLL)
    if PDL:
        wait_for_predecessor()
    x_scales = _of_groups(x_scale_ptr, first_group, num_rows, rows_m, UNROLL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32 if GROUPED else SUM)
    for first in range(begin, end, BLOCK_K * UNROLL):
        coming = ()
        x_coming = ()
        for i in tl.static_range(UNROLL):  # pyright: ignore[reportGeneralTypeIssues]
            start = first + i * BLOCK_K
            if weight_desc is not None:
                weight = weight_desc.load([pid_n * BLOCK_N, start])
                x = x_desc.load([row, start]).T
            elif EVEN_K:
                weight = tl.load(weight_tile + start)  # [BLOCK_N, BLOCK_K]
                x = tl.load(x_tile + start, mask=mask_m[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
            else:
                mask_k = start + offs_k < k_size
                weight = tl.load(weight_tile + start, mask=mask_k[None, :], other=0.0)
                x = tl.load(x_tile + start, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
            if GROUPED:
                part = tl.dot(weight, x, out_dtype=SUM).to(tl.float32)
                scale, x_scale = scales[i], x_scales[i]
                acc += part * scale[:, None] * x_scale[None, :]  # pyright: ignore[reportCallIssue, reportArgumentType]
                # On their way while the groups in between are multiplied; behind the last group it is that again.
                group = tl.minimum(start // BLOCK_K + UNROLL, last_group)
                coming += (tl.load(scale_ptr + group * n_size + rows_n),)
                x_coming += (tl.load(x_scale_ptr + group * num_rows + rows_m),)
            else:
                acc = tl.dot(weight, x, acc, out_dtype=SUM)
        if GROUPED:
            scales = coming
            x_scales = x_coming
    if PDL:
        let_successor_start()
    if GROUPED:
        total = acc
    else:
        scale, x_scale = scales[0], x_scales[0]  # pyright: ignore[reportGeneralTypeIssues]
        total = acc.to(tl.float32) * scale[:, None] * x_scale[None, :]
    if SPLITS > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + pid_n
        if store_part(total, partial_ptr, counter_ptr, tile, split, num_rows - row, True, SPLITS):
            finish_tile(
                partial_ptr, counter_ptr, bias_ptr, out_ptr, tile, row, pid_n * BLOCK_N, num_rows, n_size, out_stride,
                GATED, RESIDUAL, BLOCK_M, BLOCK_N, SPLITS,
            )  # fmt: skip
    else:
        own = out_ptr + row.to(tl.int64) * out_stride
        store_transposed(
            total, bias_ptr, own, pid_n, num_rows - row, n_size, out_stride, GATED, RESIDUAL, BLOCK_M, BLOCK_N
        )


@jit
def _scales_of_columns(scale_ptr, column, offs_n, UNIFORM: tl.constexpr):
    """The scales of one group for the columns `offs_n` from `column` on; UNIFORM as in `_tiled_kernel`."""
    if UNIFORM:  # two registers in place of one for each column
        is_even = tl.arange(0, offs_n.shape[0]) % 2 == 0
        return tl.where(is_even, tl.load(scale_ptr + column), tl.load(scale_ptr + column + 1))
    return tl.load(scale_ptr + offs_n)


@jit(do_not_specialize=["num_rows"])
def _tiled_kernel(
    x_desc,
    weight_desc,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_desc,
    num_rows,
    n_size,
    k_size,
    IS_INT8: tl.constexpr,
    GROUPED: tl.constexpr,
    UNIFORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """UNIFORM: the even rows of a weight tile share their scales, and so do the odd ones."""
    SUM: tl.constexpr = tl.int32 if IS_INT8 else tl.float32  # pyright: ignore[reportAssignmentType]
    if PDL:
        wait_for_predecessor()
        let_successor_start()
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    num_tiles_n = tl.cdiv(n_size, BLOCK_N)
    num_blocks_k = tl.cdiv(k_size, BLOCK_K)
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, step, flatten=not GROUPED):  # pyright: ignore
        group_of_tiles = tile // (GROUP_M * num_tiles_n)
        group_height = tl.minimum(num_tiles_m - group_of_tiles * GROUP_M, GROUP_M)
        row = (group_of_tiles * GROUP_M + tile % group_height) * BLOCK_M
        column = tile % (GROUP_M * num_tiles_n) // group_height * BLOCK_N
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = tl.minimum(column + tl.arange(0, BLOCK_N), n_size - 1)
        mask_m = offs_m < num_rows
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if GROUPED else SUM)
        if GROUPED:
            scale = _scales_of_columns(scale_ptr, column, offs_n, UNIFORM)
            x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)
        for block in range(num_blocks_k):
            x = x_desc.load([row, block * BLOCK_K])
            weight = weight_desc.load([column, block * BLOCK_K])
            if GROUPED:
                # The scales' product first: where columns share scales, there are few.
                acc += tl.dot(x, weight.T, out_dtype=SUM).to(tl.float32) * (x_scale[:, None] * scale[None, :])  # pyright: ignore[reportPossiblyUnboundVariable]
                # On their way while the next group is multiplied; behind the last one it is that again.
                group = tl.minimum(block + 1, num_blocks_k - 1)
                scale = _scales_of_columns(scale_ptr + group * n_size, column, offs_n, UNIFORM)
                x_scale = tl.load(x_scale_ptr + group * num_rows + offs_m, mask=mask_m, other=0.0)
            else:
                acc = tl.dot(x, weight.T, acc, out_dtype=SUM)
        if GROUPED:
            total = acc
        else:
            x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)
            total = acc.to(tl.float32) * x_scale[:, None] * tl.load(scale_ptr + offs_n)[None, :]
        store_tile(total, bias_ptr, out_desc, row, column, n_size, GATED, RESIDUAL, BLOCK_M, BLOCK_N, SUBTILES)


def swapped_product(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: SwappedTiles,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b in `dtype` for quantized `rows` [M, K] and an int8 or FP8 `weight` that `can_multiply`.

    `gated` and `residual` [M, N] as in `gemv`. int8 sums are exact. e4m3 sums have the tensor core's precision, some 14
    bits: on an H200 a relative error of 0.13 % for K = 4,096 and 0.29 % for 14,336, as torch's `use_fast_accum` has
    (rounding to bfloat16: 0.17 %). Adding each 128 in fp32 avoids it, for 1.3 to 1.8 times the time of 2,048 rows.
    The same inputs give the same bits in each run. Specification: `eight_bit_reference`.
    """
    num_rows, k_size, n_size, out = prepare(rows, weight, dtype, gated, residual)
    grouped = weight.group < k_size
    block_k = weight.group if grouped else tiles.block_k
    blocks_n, blocks_m = triton.cdiv(n_size, tiles.block_n), triton.cdiv(num_rows, tiles.block_m)
    splits = min(tiles.splits, triton.cdiv(k_size, block_k))
    partial, counter = workspace(out.device, blocks_n * blocks_m, splits, tiles.block_n * tiles.block_m)
    per_split = triton.cdiv(triton.cdiv(k_size, block_k), splits) * block_k
    unroll = tiles.unroll if grouped and per_split % (tiles.unroll * block_k) == k_size % per_split == 0 else 1
    dependent = has_dependent_launch(out)
    x_desc = weight_desc = None
    if tiles.tma:
        assert not grouped
        assert can_tile(rows.values, n_size)
        x_desc = TensorDescriptor(rows.values, [num_rows, k_size], [k_size, 1], [tiles.block_m, block_k])
        weight_desc = TensorDescriptor(weight.weight, [n_size, k_size], [k_size, 1], [tiles.block_n, block_k])
    _swapped_kernel[(blocks_n, splits, blocks_m)](
        rows.values,
        weight.weight,
        rows.scales,
        weight.scales,
        bias,
        out,
        partial,
        counter,
        num_rows,
        n_size,
        k_size,
        per_split,
        out.stride(0),
        x_desc,
        weight_desc,
        GROUPED=grouped,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        SPLITS=splits,
        UNROLL=unroll,
        EVEN_K=k_size % block_k == 0,
        PDL=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=dependent,
    )
    return out


def tiled_product(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: GemmTiles,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `swapped_product`, for many rows; operands that `can_tile`, `tiles` without splits."""
    num_rows, k_size, n_size, out = prepare(rows, weight, dtype, gated, residual)
    grouped = weight.group < k_size
    block_k = weight.group if grouped else tiles.block_k
    assert tiles.splits == 1
    assert can_tile(rows.values, n_size)
    num_tiles = triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(n_size, tiles.block_n)
    # A single row's stride says nothing, and descriptors accept no odd one.
    out_stride = out.stride(0) if num_rows > 1 else out.shape[1]
    width = tiles.block_n // tiles.subtiles // (2 if gated else 1)
    dependent = has_dependent_launch(out)
    _tiled_kernel[(min(num_tiles, tiles.programs * runtime.num_multiprocessors(out.device)),)](
        TensorDescriptor(rows.values, [num_rows, k_size], [k_size, 1], [tiles.block_m, block_k]),
        TensorDescriptor(weight.weight, [n_size, k_size], [k_size, 1], [tiles.block_n, block_k]),
        rows.scales,
        weight.scales,
        bias,
        TensorDescriptor(out, [num_rows, out.shape[1]], [out_stride, 1], [tiles.block_m, width]),
        num_rows,
        n_size,
        k_size,
        IS_INT8=weight.format is Format.INT8,
        GROUPED=grouped,
        UNIFORM=weight.uniform_rows % tiles.block_n == 0,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        GROUP_M=_GROUP_M,
        SUBTILES=tiles.subtiles,
        PDL=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=dependent,
    )
    return out


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether 8-bit rows can meet this weight: a scale a row, or FP8 in groups of 128 that fill K; no zero points."""
    if weight.format is Format.INT4 or weight.zeros is not None or weight.scales.dtype != torch.float32:
        return False
    if weight.group >= weight.in_features:
        return True
    return weight.format is Format.FP8 and weight.group == 128 and weight.in_features % 128 == 0


def row_group(weight: QuantizedWeight) -> int | None:
    """Elements of a row of x that share a scale, as `quantize_rows` takes it."""
    return None if weight.group >= weight.in_features else weight.group


def prepare(
    rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype, gated: bool, residual: torch.Tensor | None
) -> tuple[int, int, int, torch.Tensor]:
    """Checks, and M, K, N and where the result goes."""
    num_rows, k_size = rows.values.shape
    n_size = weight.out_features
    assert num_rows > 0
    assert k_size == weight.in_features
    assert can_multiply(weight)
    assert rows.values.dtype == weight.weight.dtype
    assert rows.scales.shape == (weight.scales.shape[0], num_rows)
    assert rows.values.is_contiguous()
    assert weight.weight.is_contiguous()
    assert weight.scales.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    assert not gated or n_size % 2 == 0
    if residual is not None:
        return num_rows, k_size, n_size, residual
    width = n_size // 2 if gated else n_size
    return num_rows, k_size, n_size, torch.empty((num_rows, width), dtype=dtype, device=rows.values.device)
