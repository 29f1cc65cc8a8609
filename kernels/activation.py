"""Gated activation of a feed-forward block: silu(gate) * up. Knows no model."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .runtime import jit


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 * inter] -> [tokens, inter]; see `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return torch.nn.functional.silu(gate).mul_(up)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


@jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, inter, BLOCK: tl.constexpr):
    pid_token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < inter
    row = gate_up_ptr + pid_token * gate_up_stride
    gate = tl.load(row + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + inter + offs, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + pid_token * inter + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for `gate_up` [tokens, 2 * inter] with the gate first; rows may have a stride."""
    if not runtime.use_triton(gate_up):
        return silu_and_mul_reference(gate_up)
    num_tokens, width = gate_up.shape
    inter = width // 2
    assert gate_up.stride(1) == 1
    assert width % 2 == 0
    out = torch.empty((num_tokens, inter), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        block = min(2048, triton.next_power_of_2(inter))
        grid = (num_tokens, triton.cdiv(inter, block))
        _silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), inter, BLOCK=block, num_warps=4)
    return out
