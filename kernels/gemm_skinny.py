"""A few rows times a weight matrix, operands swapped: the weight's rows fill the matrix instruction. Knows no model.

2 to 64 rows (up to 256 where measured faster): the weight is read once, as tiles of [64 or 128, K], the rows of x fill
the narrow side, so that little is computed for padding. K is split over programs where N alone leaves the device idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit
from .split_k import finish_tile, store_part, workspace


@dataclass(frozen=True)
class SkinnyTiles:
    """Rows of the weight and elements of K a step, the compiler's schedule, and programs that share a tile's K."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int


@jit
def store_transposed(
    acc, bias_ptr, out_ptr, pid_n, num_rows, n_size, out_stride,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < n_size, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = acc.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1).split()
        out = gate * tl.sigmoid(gate) * up  # [BLOCK_N / 2, BLOCK_M]
        offs_out = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask = (offs_out < n_size // 2)[:, None] & (offs_m < num_rows)[None, :]
    else:
        out = acc
        offs_out = offs_n
        mask = (offs_n < n_size)[:, None] & (offs_m < num_rows)[None, :]
    places = out_ptr + offs_m.to(tl.int64)[None, :] * out_stride + offs_out[:, None]
    if RESIDUAL:
        out += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    n_size,
    k_size,
    k_per_split,
    x_stride,
    out_stride,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    pid_n = tl.program_id(0)
    split = tl.program_id(1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < num_rows)[None, :]
    # Rows past the end read the last row again and store nothing.
    weight_rows = weight_ptr + tl.minimum(offs_n, n_size - 1).to(tl.int64) * k_size
    weight_tile = weight_rows[:, None] + offs_k[None, :]
    x_tile = x_ptr + offs_m[None, :] * x_stride + offs_k[:, None]
    # An argument, not a quotient computed here: the compiler must see that it is a multiple of 16.
    begin = split * k_per_split
    end = tl.minimum(begin + k_per_split, k_size)
    if PDL:
        wait_for_predecessor()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_tile + start)  # [BLOCK_N, BLOCK_K]
            x = tl.load(x_tile + start, mask=mask_m, other=0.0)  # [BLOCK_K, BLOCK_M]
        else:
            mask_k = start + offs_k < k_size
            weight = tl.load(weight_tile + start, mask=mask_k[None, :], other=0.0)
            x = tl.load(x_tile + start, mask=mask_k[:, None] & mask_m, other=0.0)
        acc = tl.dot(weight, x, acc)
    if PDL:
        let_successor_start()
    if SPLITS > 1:
        if store_part(acc, partial_ptr, counter_ptr, pid_n, split, num_rows, True, SPLITS):
            finish_tile(
                partial_ptr, counter_ptr, bias_ptr, out_ptr, pid_n, 0, pid_n * BLOCK_N, num_rows, n_size, out_stride,
                GATED, RESIDUAL, BLOCK_M, BLOCK_N, SPLITS,
            )  # fmt: skip
    else:
        store_transposed(acc, bias_ptr, out_ptr, pid_n, num_rows, n_size, out_stride, GATED, RESIDUAL, BLOCK_M, BLOCK_N)


def padded_rows(num_rows: int) -> int:
    """The width of the narrow side: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(num_rows))


def gemm_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: SkinnyTiles,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b for few rows `x` [M, K] and `weight` [N, K] of 16 bits, accumulated in fp32 and rounded once.

    `x` may have a row stride. `gated` and `residual` [M, N] as in `gemv`. The same inputs give the same bits in each
    run; they change with `tiles`. Specification: `gemv_reference`.
    """
    num_rows, k_size = x.shape
    n_size = weight.shape[0]
    assert 0 < num_rows <= 256
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    assert not gated or n_size % 2 == 0
    out = residual
    if out is None:
        out = torch.empty((num_rows, n_size // 2 if gated else n_size), dtype=x.dtype, device=x.device)
    block_m = padded_rows(num_rows)
    blocks_n = triton.cdiv(n_size, tiles.block_n)
    splits = min(tiles.splits, triton.cdiv(k_size, tiles.block_k))
    partial, counter = workspace(x.device, blocks_n, splits, tiles.block_n * block_m)
    dependent = has_dependent_launch(x)
    _skinny_kernel[(blocks_n, splits)](
        x,
        weight,
        bias,
        out,
        partial,
        counter,
        num_rows,
        n_size,
        k_size,
        triton.cdiv(triton.cdiv(k_size, tiles.block_k), splits) * tiles.block_k,
        x.stride(0),
        out.stride(0),
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLITS=splits,
        EVEN_K=k_size % tiles.block_k == 0,
        PDL=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=dependent,
    )
    return out
