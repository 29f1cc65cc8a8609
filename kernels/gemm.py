"""Many rows times a weight matrix: persistent programs, tiles fetched by the TMA unit, gate or residual behind it.

Knows no model. Every element is one sum over K in the same order whatever tile row it falls into, so that with fixed
tiles a row's result does not depend on the other rows or on their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit
from .split_k import finish_tile, store_part, workspace


@dataclass(frozen=True)
class GemmTiles:
    """Tile of the result and step over K; `subtiles` parts in which a tile is stored (less shared memory, fewer
    registers), `programs` a multiprocessor, `splits` programs that share a tile's K."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    subtiles: int = 1
    programs: int = 1


DETERMINISTIC_TILES = GemmTiles(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)
"""The one configuration of the deterministic mode, for one row as for thousands."""

_GROUP_M = 16
"""Tile rows that share the weight's tiles in L2 before the next columns follow: about as many as there are columns of
tiles in flight, so that the fewest bytes come from memory (which costs power, and with that clock)."""


@jit
def _store_subtile(
    out, bias_ptr, out_desc, row, column, n_size,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Bias, gate or residual for `out` [rows, WIDTH] fp32, whose first element belongs to (row, column) of x W^T."""
    if bias_ptr is not None:
        offs_n = column + tl.arange(0, WIDTH)
        out += tl.load(bias_ptr + offs_n, mask=offs_n < n_size, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = out.reshape(out.shape[0], WIDTH // 2, 2).split()
        out = gate * tl.sigmoid(gate) * up
        column = column // 2
    if RESIDUAL:
        out += out_desc.load([row, column]).to(tl.float32)
    out_desc.store([row, column], out.to(out_desc.dtype))


@jit
def store_tile(
    acc, bias_ptr, out_desc, row, column, n_size, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    if SUBTILES == 1:
        _store_subtile(acc, bias_ptr, out_desc, row, column, n_size, GATED, RESIDUAL, BLOCK_N)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _store_subtile(left, bias_ptr, out_desc, row, column, n_size, GATED, RESIDUAL, HALF)
        _store_subtile(right, bias_ptr, out_desc, row, column + HALF, n_size, GATED, RESIDUAL, HALF)


@jit(do_not_specialize=["num_rows", "k_blocks_per_split"])
def _gemm_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_desc,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_rows,
    n_size,
    k_size,
    k_blocks_per_split,
    out_stride,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    SUBTILES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_predecessor()
        let_successor_start()
    num_tiles_m = tl.cdiv(num_rows, BLOCK_M)
    num_tiles_n = tl.cdiv(n_size, BLOCK_N)
    num_tiles = num_tiles_m * num_tiles_n
    num_blocks_k = tl.cdiv(k_size, BLOCK_K)
    step = tl.num_programs(0)
    for work in tl.range(tl.program_id(0), num_tiles * SPLITS, step, flatten=SPLITS == 1):  # pyright: ignore
        tile = work % num_tiles
        group = tile // (GROUP_M * num_tiles_n)
        group_height = tl.minimum(num_tiles_m - group * GROUP_M, GROUP_M)
        tile_m = group * GROUP_M + tile % group_height
        tile_n = tile % (GROUP_M * num_tiles_n) // group_height
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if SPLITS == 1:
            for block in range(num_blocks_k):
                x = x_desc.load([row, block * BLOCK_K])
                weight = weight_desc.load([column, block * BLOCK_K])
                acc = tl.dot(x, weight.T, acc)
            store_tile(acc, bias_ptr, out_desc, row, column, n_size, GATED, RESIDUAL, BLOCK_M, BLOCK_N, SUBTILES)
        else:
            split = work // num_tiles
            begin = split * k_blocks_per_split
            for block in range(begin, tl.minimum(begin + k_blocks_per_split, num_blocks_k)):
                x = x_desc.load([row, block * BLOCK_K])
                weight = weight_desc.load([column, block * BLOCK_K])
                acc = tl.dot(x, weight.T, acc)
            if store_part(acc, partial_ptr, counter_ptr, tile, split, num_rows - row, False, SPLITS):
                finish_tile(
                    partial_ptr, counter_ptr, bias_ptr, out_ptr, tile, row, column, num_rows, n_size, out_stride,
                    GATED, RESIDUAL, BLOCK_M, BLOCK_N, SPLITS,
                )  # fmt: skip


def can_tile(x: torch.Tensor, n_size: int) -> bool:
    """Whether the TMA unit can fetch these operands: rows of 16 byte multiples, a device from sm_90 on."""
    units = 16 // x.element_size()
    row_stride = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    fits = n_size % (2 * units) == 0 and x.shape[1] % units == 0 and row_stride % units == 0
    return fits and x.data_ptr() % 16 == 0 and runtime.capability(x.device) >= 90


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: GemmTiles,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b for `x` [M, K] and `weight` [N, K] of 16 bits that `can_tile`, accumulated in fp32.

    `gated` and `residual` [M, N] as in `gemv`; without a residual the result goes to `out` where that is given. The
    same inputs give the same bits in each run; with the same `tiles` a row gives the same bits in each batch.
    Specification: `gemv_reference`.
    """
    num_rows, k_size = x.shape
    n_size = weight.shape[0]
    assert num_rows > 0
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert can_tile(x, n_size), f"the tiled product needs sizes that are multiples of 16, not {n_size} x {k_size}"
    out = out if residual is None else residual
    if out is None:
        out = torch.empty((num_rows, n_size // 2 if gated else n_size), dtype=x.dtype, device=x.device)
    num_tiles = triton.cdiv(num_rows, tiles.block_m) * triton.cdiv(n_size, tiles.block_n)
    partial, counter = workspace(x.device, num_tiles, tiles.splits, tiles.block_m * tiles.block_n)
    # A single row's stride says nothing, and descriptors accept no odd one.
    x_stride = x.stride(0) if num_rows > 1 else k_size
    out_stride = out.stride(0) if num_rows > 1 else out.shape[1]
    num_programs = min(num_tiles, tiles.programs * runtime.num_multiprocessors(x.device))
    if tiles.splits > 1:
        num_programs = num_tiles * tiles.splits
        out_desc = None
    else:
        width = tiles.block_n // tiles.subtiles // (2 if gated else 1)
        out_desc = TensorDescriptor(out, [num_rows, out.shape[1]], [out_stride, 1], [tiles.block_m, width])
    dependent = has_dependent_launch(out)
    _gemm_kernel[(num_programs,)](
        TensorDescriptor(x, [num_rows, k_size], [x_stride, 1], [tiles.block_m, tiles.block_k]),
        TensorDescriptor(weight, [n_size, k_size], [k_size, 1], [tiles.block_n, tiles.block_k]),
        bias,
        out_desc,
        out if tiles.splits > 1 else None,
        partial,
        counter,
        num_rows,
        n_size,
        k_size,
        triton.cdiv(triton.cdiv(k_size, tiles.block_k), tiles.splits),
        out_stride,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=_GROUP_M,
        SPLITS=tiles.splits,
        SUBTILES=tiles.subtiles,
        PDL=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=dependent,
    )
    return out
