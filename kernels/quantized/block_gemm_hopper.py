"""FP8 products with scales of 128 x 128 blocks for Hopper GPUs: one warp copies, two groups of four warps compute.

Written in Gluon, Triton's dialect with explicit layouts, barriers and asynchronous instructions. The sums of each 128
elements of K leave the tensor cores to be scaled and added up in fp32 (DeepSeek-V3, arXiv 2412.19437, section 3.3);
meanwhile the tensor cores multiply for the other group, or for this one's next step. Knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from manta.kernels import runtime
from manta.kernels.dependent_launch import has_dependent_launch
from manta.kernels.gluon_names import barrier, copy_box, store_box
from manta.kernels.split_k import workspace

from .block_gemm_plan import BlockTiles, takes_blocks
from .eight_bit import prepare
from .layout import QuantizedWeight
from .quantize import QuantizedRows

# Gluon's stubs know neither plain values for constexpr parameters nor its own loops.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
jit: Any = gluon.jit
_GROUP_M = 8
"""Tile rows that share the weight's tiles in L2 before the next columns follow."""
_STEPS: Any = gl.constexpr(2)
"""A turn of the loop: the second step is begun before the first one's sums are added up. Turns of four take as
long, and addresses leave the registers for them."""


@jit
def _wait_for_predecessor():
    """And let the successor start, see dependent_launch, whose functions are Triton's."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _place_of(tile, num_rows, n_size, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Row and column of a tile of 128 x BLOCK_N, the same for all warps."""
    num_tiles_m = (num_rows + 127) // 128
    tiles_of_group = GROUP_M * (n_size // BLOCK_N)
    group_of_tiles = tile // tiles_of_group
    within = tile - group_of_tiles * tiles_of_group
    group_height = gl.minimum(num_tiles_m - group_of_tiles * GROUP_M, GROUP_M)
    tile_n = within // group_height
    tile_m = group_of_tiles * GROUP_M + within - tile_n * group_height
    return tile_m * 128, tile_n * BLOCK_N


@jit
def _following(stage, parity, STAGES: gl.constexpr):
    """The next stage of the ring, and its barriers' parity, which changes with each round."""
    stage += 1
    is_round = stage == STAGES
    return gl.where(is_round, 0, stage), gl.where(is_round, parity ^ 1, parity)


@jit
def _num_items(sizes, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr):
    """Tiles, or parts of them."""
    num_rows, n_size, _k_size = sizes
    return (num_rows + 127) // 128 * (n_size // BLOCK_N) * SPLITS


@jit
def _work_of(item, sizes, SPLITS: gl.constexpr):
    """A tile, and its part of the blocks of K: the first one and the one behind the last."""
    num_blocks = sizes[2] // 128
    split = item % SPLITS
    return item // SPLITS, num_blocks * split // SPLITS, num_blocks * (split + 1) // SPLITS


@jit
def _copy_tiles(
    x_desc, weight_desc, memory, barriers, sizes, STAGES: gl.constexpr, GROUP_M: gl.constexpr, SPLITS: gl.constexpr
):
    """The copying warp: fill a stage when both groups have left it."""
    x_memory, weight_memory, _out_memory = memory
    full, empty, _arrived = barriers
    num_rows, n_size, _k_size = sizes
    BLOCK_N: gl.constexpr = weight_memory.shape[1]
    stage = num_rows * 0
    parity = stage
    for item in range(gl.program_id(0), _num_items(sizes, BLOCK_N, SPLITS), gl.num_programs(0)):
        tile, first, last = _work_of(item, sizes, SPLITS)
        row, column = _place_of(tile, num_rows, n_size, GROUP_M, BLOCK_N)
        for block in range(first, last):
            mbarrier.wait(empty.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), 128 * (128 + BLOCK_N))
            for group in gl.static_range(2):
                box = x_memory.index(2 * stage + group)
                copy_box(x_desc, [row + group * 64, block * 128], full.index(stage), box)
            copy_box(weight_desc, [column, block * 128], full.index(stage), weight_memory.index(stage))
            stage, parity = _following(stage, parity, STAGES)


@jit
def _scales_at(places):
    """Of a thread's two rows, of even and of odd columns."""
    x_scales, column_scale = places
    return gl.load(x_scales), gl.load(column_scale), gl.load(column_scale + 1)


@jit
def _following_places(places, block, num_blocks, sizes):
    """Where the scales of the block behind this one stand; behind the last one they stay."""
    x_scales, column_scale = places
    num_rows, n_size, _k_size = sizes
    has_next = (block + 1 < num_blocks).to(gl.int32)
    return x_scales + has_next * num_rows, column_scale + has_next * n_size


@jit
def _zero_of_a_thread(size):
    """Zero for any size that is not negative, which the assembler takes for one that differs between threads.

    Loads from a place that it is added to go to the threads' own registers. What all share would be put into a uniform
    register, and every thread would wait there for the load.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid; add.u32 $0, $0, $1; shr.u32 $0, $0, 31;",
        "=&r,r",
        [size],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def _pinned(x):
    """The same fp32 tensor, computed at this place: the compiler keeps the order of volatile instructions."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@jit
def _start(memory, stage, group: gl.constexpr, SUMS: gl.constexpr):
    """Let the tensor cores multiply what `stage` holds of a group's 64 rows and the tile's columns."""
    x_memory, weight_memory, _out_memory = memory
    BLOCK_N: gl.constexpr = weight_memory.shape[1]
    x = x_memory.index(2 * stage + group)
    weight = weight_memory.index(stage).permute((1, 0))
    return warpgroup_mma(x, weight, gl.zeros([64, BLOCK_N], gl.float32, SUMS), use_acc=False, is_async=True)


@jit
def _add_scaled(acc, sums, scales):
    """acc + sums * scales; no part of it before this place."""
    x_scale, even_scale, odd_scale = scales
    SUMS: gl.constexpr = acc.type.layout
    x_scale = _pinned(x_scale)
    is_even = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, SUMS)) % 2 == 0
    scale = gl.where(is_even[None, :], (x_scale * even_scale)[:, None], (x_scale * odd_scale)[:, None])
    return gl.fma(sums, scale, acc)


@jit
def _joined(acc, split, tile, partial_ptr, counter_ptr):
    """A group's sums of two programs in the second one to come, which alone is told so; `tile` numbers what they share.

    Of two numbers the sum is the same whoever comes second. Counters are zero before and after, see split_k.
    """
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    SUMS: gl.constexpr = acc.type.layout
    offs_m = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, SUMS))
    offs_n = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, SUMS))
    parts = partial_ptr + tile.to(gl.int64) * (2 * SIZE) + offs_m[:, None] * acc.shape[1] + offs_n[None, :]
    gl.store(parts + split * SIZE, acc)
    barrier()
    is_second = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == 1
    if is_second:
        acc += gl.load(parts + (1 - split) * SIZE, cache_modifier=".cg")
        gl.store(counter_ptr + tile, 0)
    return acc, is_second


@jit
def _fetch_residual(row, column, out_desc, out_tile, arrived):
    """Let a group's rows of the residual come where its results will go from."""
    tma.store_wait(0)
    barrier()
    mbarrier.expect(arrived, 2 * out_tile.shape[0] * out_tile.shape[1])
    copy_box(out_desc, [row, column], arrived, out_tile)


@jit
def _finish(
    acc, row, column, bias_ptr, out_desc, out_tile, arrived, parity, GATED: gl.constexpr, RESIDUAL: gl.constexpr
):
    """Bias, gate or the residual that is on its way to `out_tile`; store a group's rows of a tile."""
    if bias_ptr is not None:
        offs_n = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias_ptr + offs_n).to(gl.float32)[None, :]
    if RESIDUAL:
        mbarrier.wait(arrived, parity)
        acc += out_tile.load(acc.type.layout).to(gl.float32)
    else:
        tma.store_wait(0)
    barrier()
    if GATED:
        gate, up = acc.reshape([acc.shape[0], acc.shape[1] // 2, 2]).split()
        acc = gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634))
        column = column // 2
    out_tile.store(acc.to(out_desc.dtype))
    fence_async_shared()
    barrier()
    store_box(out_desc, [row, column], out_tile)


@jit
def _compute(
    group: gl.constexpr,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_desc,
    partial_ptr,
    counter_ptr,
    memory,
    barriers,
    sizes,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """A computing group of four warps: 64 of a tile's 128 rows."""
    BLOCK_N: gl.constexpr = memory[1].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    out_tile = memory[2].index(group)
    full, empty, arrived = barriers
    num_rows, n_size, _k_size = sizes
    stage = num_rows * 0
    parity = stage
    residual_parity = stage
    zero = _zero_of_a_thread(num_rows)
    for item in range(gl.program_id(0), _num_items(sizes, BLOCK_N, SPLITS), gl.num_programs(0)):
        tile, first, last = _work_of(item, sizes, SPLITS)
        num_blocks = last - first
        row, column = _place_of(tile, num_rows, n_size, GROUP_M, BLOCK_N)
        row += group * 64
        if RESIDUAL and SPLITS == 1:
            _fetch_residual(row, column, out_desc, out_tile, arrived.index(group))
        # Rows past the end take the last one's scale and are not stored.
        rows = gl.minimum(row + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)), num_rows - 1)
        places = (x_scale_ptr + first * num_rows + rows, scale_ptr + first * n_size + column + zero)
        acc = gl.zeros([64, BLOCK_N], gl.float32, SUMS)
        now = _scales_at(places)
        places = _following_places(places, 0, num_blocks, sizes)
        then = _scales_at(places)
        mbarrier.wait(full.index(stage), parity)
        for turn in range(num_blocks // _STEPS):
            sums = _start(memory, stage, group, SUMS)
            for step in gl.static_range(_STEPS):
                block = turn * _STEPS + step
                following, parity = _following(stage, parity, STAGES)
                # Waiting in the last step, too, keeps the assembler, which orders instructions within a basic block,
                # from moving the wait for its product before the last but one's sums are added up.
                mbarrier.wait(full.index(following), parity, pred=block + 1 < num_blocks)
                if step + 1 < _STEPS:
                    coming = _start(memory, following, group, SUMS)
                sums = warpgroup_mma_wait(num_outstanding=1 if step + 1 < _STEPS else 0, deps=(sums,))
                mbarrier.arrive(empty.index(stage), count=1)
                acc = _pinned(_add_scaled(acc, sums, now))
                now = then
                places = _following_places(places, block + 1, num_blocks, sizes)
                then = _scales_at(places)
                stage = following
                if step + 1 < _STEPS:
                    sums = coming  # pyright: ignore[reportPossiblyUnboundVariable]
        for block in range(num_blocks // _STEPS * _STEPS, num_blocks):
            sums = _start(memory, stage, group, SUMS)
            following, parity = _following(stage, parity, STAGES)
            mbarrier.wait(full.index(following), parity, pred=block + 1 < num_blocks)
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc = _add_scaled(acc, sums, now)
            now = then
            places = _following_places(places, block + 1, num_blocks, sizes)
            then = _scales_at(places)
            stage = following

        stores = True
        if SPLITS == 2:
            acc, stores = _joined(acc, item % 2, 2 * tile + group, partial_ptr, counter_ptr)
        if stores:
            if RESIDUAL and SPLITS == 2:
                _fetch_residual(row, column, out_desc, out_tile, arrived.index(group))
            _finish(
                acc, row, column, bias_ptr, out_desc, out_tile, arrived.index(group), residual_parity, GATED, RESIDUAL
            )
            residual_parity ^= 1
    tma.store_wait(0)


@jit(do_not_specialize=["num_rows"])
def _block_kernel(
    x_desc,
    weight_desc,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_desc,
    partial_ptr,
    counter_ptr,
    num_rows,
    n_size,
    k_size,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles of 128 x BLOCK_N, or halves of their K, in turn: every num_programs-th of them."""
    if PDL:
        _wait_for_predecessor()
    x_memory = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, 128], x_desc.layout)
    weight_memory = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, 128], weight_desc.layout)
    out_memory = gl.allocate_shared_memory(out_desc.dtype, [2, 64, BLOCK_N // 2 if GATED else BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(arrived.index(0), count=1)
    mbarrier.init(arrived.index(1), count=1)
    fence_async_shared()
    memory = (x_memory, weight_memory, out_memory)
    barriers = (full, empty, arrived)
    sizes = (num_rows, n_size, k_size)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_compute, (FIRST, x_scale_ptr, scale_ptr, bias_ptr, out_desc, partial_ptr, counter_ptr, memory, barriers,
                        sizes, GATED, RESIDUAL, STAGES, GROUP_M, SPLITS)),
            (_compute, (SECOND, x_scale_ptr, scale_ptr, bias_ptr, out_desc, partial_ptr, counter_ptr, memory, barriers,
                        sizes, GATED, RESIDUAL, STAGES, GROUP_M, SPLITS)),
            (_copy_tiles, (x_desc, weight_desc, memory, barriers, sizes, STAGES, GROUP_M, SPLITS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def block_product(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: BlockTiles,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b [M, N] in `dtype`, 16 bits, for FP8 `rows` [M, K] with a scale each 128 elements.

    `weight` is one that `takes_blocks`; `gated` (then [M, N / 2]) and `residual` [M, N] as in `gemv`. A row's bits do
    not depend on the other rows or on their number. Specification: `eight_bit_reference`.
    """
    num_rows, k_size, n_size, out = prepare(rows, weight, dtype, gated, residual)
    assert takes_blocks(weight)
    assert tiles.block_n in (64, 128)
    assert tiles.splits in (1, 2)
    assert tiles.num_stages >= 2, "a step is computed while the next one is awaited"
    assert out.element_size() == 2
    # A single row's stride says nothing, and descriptors accept no odd one.
    out_stride = out.stride(0) if num_rows > 1 else out.shape[1]
    operand = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    width = tiles.block_n // 2 if gated else tiles.block_n
    result = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * width, 128), element_bitwidth=16, rank=2)
    num_tiles = triton.cdiv(num_rows, 128) * (n_size // tiles.block_n)
    partial, counter = workspace(out.device, 2 * num_tiles, tiles.splits, 64 * tiles.block_n)
    dependent = has_dependent_launch(out)
    _block_kernel[(min(tiles.splits * num_tiles, runtime.num_multiprocessors(out.device)),)](
        TensorDescriptor(rows.values, [num_rows, k_size], [k_size, 1], [64, 128], operand),
        TensorDescriptor(weight.weight, [n_size, k_size], [k_size, 1], [tiles.block_n, 128], operand),
        rows.scales,
        weight.scales,
        bias,
        TensorDescriptor(out, [num_rows, out.shape[1]], [out_stride, 1], [64, width], result),
        partial,
        counter,
        num_rows,
        n_size,
        k_size,
        GATED=gated,
        RESIDUAL=residual is not None,
        STAGES=tiles.num_stages,
        BLOCK_N=tiles.block_n,
        GROUP_M=_GROUP_M,
        SPLITS=tiles.splits,
        PDL=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return out
