"""Root-mean-square norm of rows, with the residual addition in front of it. Knows no model."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalize `x` [tokens, dim] (or the updated residual) and scale by `weight` [dim]; see `rms_norm`."""
    if residual is not None:
        residual.add_(x)
        x = residual
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.float()).to(x.dtype)


@jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    dim,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < dim
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        wait_for_predecessor()
    x = tl.load(x_ptr + pid * x_stride + offs, mask=mask, other=0.0).to(tl.float32)  # [dim]
    if HAS_RESIDUAL:
        residual_row = residual_ptr + pid * residual_stride + offs
        # The norm sees the sum as it is stored: rounded to the residual's dtype.
        total = (x + tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_row, total, mask=mask)
        x = total.to(tl.float32)
    if PDL:
        let_successor_start()
    inverse_rms = tl.rsqrt(tl.sum(x * x) / dim + eps)
    tl.store(out_ptr + pid * dim + offs, (x * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x / rms(x) * weight`, computed in fp32 and rounded once.

    `x` [tokens, dim] may have a row stride; `weight` [dim]. With `residual` [tokens, dim], `residual += x` in place
    first and the sum is what gets normalized.
    """
    if not runtime.use_triton(x):
        return rms_norm_reference(x, weight, eps, residual)
    num_tokens, dim = x.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert residual is None or residual.stride(1) == 1
    out = torch.empty((num_tokens, dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(dim)
    dependent = has_dependent_launch(x)
    _rms_norm_kernel[(num_tokens,)](
        x,
        weight,
        residual,
        out,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        dim,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=dependent,
        num_warps=min(16, max(1, block // 1024)),
        launch_pdl=dependent,
    )
    return out
