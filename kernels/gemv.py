"""One row times a weight matrix, with the norm in front and the gate or the residual behind it. Knows no model.

A decode step of one sequence reads every weight once for two operations an element: CUDA cores suffice, and what counts
is that whole rows stream through all multiprocessors and that nothing else has to be launched in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit


@dataclass(frozen=True)
class GemvTiles:
    """A program's rows of the weight and how many of their elements it takes at a time."""

    block_n: int
    block_k: int
    num_warps: int


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `gemv`; fp32 inside, any number of rows."""
    wide = x.float()
    if norm_weight is not None:
        wide = torch.nn.functional.rms_norm(wide, (x.shape[1],), norm_weight.float(), eps)
    out = torch.nn.functional.linear(wide, weight.float(), None if bias is None else bias.float())
    if gated:
        out = torch.nn.functional.silu(out[:, 0::2]) * out[:, 1::2]
    if residual is None:
        return out.to(x.dtype)
    return residual.copy_(residual.float() + out)


@jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    norm_weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    n_size,
    k_size,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row again and store nothing.
    weight_rows = weight_ptr + tl.minimum(offs_n, n_size - 1).to(tl.int64)[:, None] * k_size + offs_k[None, :]
    if PDL:
        wait_for_predecessor()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, k_size, BLOCK_K):
        mask_k = start + offs_k < k_size
        if EVEN_K:
            weight = tl.load(weight_rows + start)  # [BLOCK_N, BLOCK_K]
            x = tl.load(x_ptr + start + offs_k).to(tl.float32)  # [BLOCK_K]
        else:
            weight = tl.load(weight_rows + start, mask=mask_k[None, :], other=0.0)
            x = tl.load(x_ptr + start + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            squares += x * x
            if EVEN_K:
                x *= tl.load(norm_weight_ptr + start + offs_k).to(tl.float32)
            else:
                x *= tl.load(norm_weight_ptr + start + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
    if PDL:
        let_successor_start()
    out = tl.sum(acc, axis=1)  # [BLOCK_N]
    if norm_weight_ptr is not None:
        out *= tl.rsqrt(tl.sum(squares) / k_size + eps)
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


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: GemvTiles,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + b for one row `x` [1, K] and `weight` [N, K], accumulated in fp32 and rounded once.

    With `norm_weight` [K], x is normalized first; the normalized row stays in fp32, where separate kernels would round
    it to x's type. `gated`: rows 2 i and 2 i + 1 of the weight are gate and up, the result [1, N / 2] is
    silu(gate) * up. With `residual` [1, N] the result is added to it in place, and it is returned.
    """
    num_rows, k_size = x.shape
    n_size = weight.shape[0]
    assert num_rows == 1
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    assert not gated or (n_size % 2 == 0 and tiles.block_n % 2 == 0)
    out = residual
    if out is None:
        out = torch.empty((1, n_size // 2 if gated else n_size), dtype=x.dtype, device=x.device)
    dependent = has_dependent_launch(x)
    _gemv_kernel[(triton.cdiv(n_size, tiles.block_n),)](
        x,
        weight,
        norm_weight,
        bias,
        out,
        eps,
        n_size,
        k_size,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        EVEN_K=k_size % tiles.block_k == 0,
        PDL=dependent,
        num_warps=tiles.num_warps,
        launch_pdl=dependent,
    )
    return out
