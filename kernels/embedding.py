"""Rows of a table by their numbers: token ids to vectors. Knows no model."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit


def embedding_reference(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[tokens] -> [tokens, hidden]; see `embedding`."""
    return torch.nn.functional.embedding(token_ids, weight)


@jit
def _embedding_kernel(token_ids_ptr, weight_ptr, out_ptr, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pid_token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < hidden
    if PDL:
        wait_for_predecessor()
        let_successor_start()
    token_id = tl.load(token_ids_ptr + pid_token)
    row = tl.load(weight_ptr + token_id * hidden + offs, mask=mask)
    tl.store(out_ptr + pid_token * hidden + offs, row, mask=mask)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows `token_ids` [tokens] int64 of `weight` [vocab, hidden], [tokens, hidden]. Ids are not looked at: the
    scheduler has refused those outside the vocabulary."""
    if not runtime.use_triton(weight):
        return embedding_reference(token_ids, weight)
    num_tokens, hidden = len(token_ids), weight.shape[1]
    assert weight.is_contiguous()
    assert token_ids.is_contiguous()
    out = torch.empty((num_tokens, hidden), dtype=weight.dtype, device=weight.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(hidden))
        dependent = has_dependent_launch(weight)
        _embedding_kernel[(num_tokens, triton.cdiv(hidden, block))](
            token_ids, weight, out, hidden, BLOCK=block, PDL=dependent, num_warps=4, launch_pdl=dependent
        )
    return out
