"""Gated activation of a feed-forward block: silu(gate) * up. Knows no model."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit


def silu_and_mul_reference(gate_up: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """[tokens, 2 * inter] -> [tokens, inter]; see `silu_and_mul`."""
    gate, up = (gate_up[:, 0::2], gate_up[:, 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return torch.nn.functional.silu(gate).mul_(up)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


@jit
def _silu_and_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride, inter,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid_token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < inter
    row = gate_up_ptr + pid_token * gate_up_stride
    if PDL:
        wait_for_predecessor()
        let_successor_start()
    if INTERLEAVED:
        offs_pair = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(row + offs_pair, mask=offs_pair < 2 * inter, other=0.0).to(tl.float32)
        gate, up = pairs.reshape(BLOCK, 2).split()
    else:
        gate = tl.load(row + offs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row + inter + offs, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + pid_token * inter + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, *, interleaved: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * up for `gate_up` [tokens, 2 * inter], in `out` [tokens, inter] where given; rows of `gate_up`
    may have a stride.

    The gate comes first, or, when `interleaved`, column 2 i belongs to the gate and column 2 i + 1 to up.
    """
    if not runtime.use_triton(gate_up):
        result = silu_and_mul_reference(gate_up, interleaved=interleaved)
        return result if out is None else out.copy_(result)
    num_tokens, width = gate_up.shape
    inter = width // 2
    assert gate_up.stride(1) == 1
    assert width % 2 == 0
    if out is None:
        out = torch.empty((num_tokens, inter), dtype=gate_up.dtype, device=gate_up.device)
    assert out.is_contiguous()
    if num_tokens:
        block = min(2048, triton.next_power_of_2(inter))
        grid = (num_tokens, triton.cdiv(inter, block))
        dependent = has_dependent_launch(gate_up)
        _silu_and_mul_kernel[grid](
            gate_up,
            out,
            gate_up.stride(0),
            inter,
            INTERLEAVED=interleaved,
            BLOCK=block,
            PDL=dependent,
            num_warps=4,
            launch_pdl=dependent,
        )
    return out
