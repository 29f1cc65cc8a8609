"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): columns are rounded one after the other, and what each
one's rounding does to the output is made good by those that are still to come.

With U the upper Cholesky factor of (X^T X + damping)^-1: the error e = (w - rounded w) / U[j, j] of column j changes
the columns behind it by -e U[j, behind] (algorithm 1 of the paper).
"""

from __future__ import annotations

import torch

from manta.engine.quant.grouped import GroupedWeight, grid_of, nearest_codes, pack_nibbles

DAMPING = 0.01
"""Of the mean diagonal of X^T X, added to it; ten times more where that leaves it indefinite."""
_BLOCK = 128


def quantize_gptq(
    weight: torch.Tensor,
    second_moments: torch.Tensor,
    *,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    act_order: bool = False,
) -> GroupedWeight:
    """`weight` [out, in] for inputs with `second_moments` [in, in]; `group_size` None: one group a row.

    `act_order`: columns with larger inputs first, and grouped in that order."""
    num_rows, num_columns = weight.shape
    size = num_columns if group_size is None else min(group_size, num_columns)
    moments, values = second_moments.float().clone(), weight.float().clone()
    unused = moments.diagonal() == 0
    moments.diagonal()[unused] = 1.0
    values[:, unused] = 0.0
    order = torch.arange(num_columns)
    if act_order:
        order = moments.diagonal().argsort(descending=True)
        values, moments = values[:, order], moments[order][:, order]
    factor = _inverse_factor(moments)
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8)
    scales, zeros = [], []
    block = _BLOCK if size >= num_columns else min(size, _BLOCK)
    for first in range(0, num_columns, block):
        last = min(first + block, num_columns)
        own, errors = values[:, first:last].clone(), torch.empty(num_rows, last - first)
        for place in range(last - first):
            column = first + place
            if column % size == 0:
                group = values[:, column : column + size].clone()
                group[:, : last - column] = own[:, place : place + size]
                scale, zero = grid_of(group, bits=bits, symmetric=symmetric, scale_dtype=torch.float16)
                scales.append(scale)
                zeros.append(zero)
            code = nearest_codes(own[:, place], scales[-1], zeros[-1], bits=bits)
            codes[:, column] = code
            middle = float(1 << (bits - 1)) if zeros[-1] is None else zeros[-1].float()
            error = (own[:, place] - (code.float() - middle) * scales[-1].float()) / factor[column, column]
            own[:, place:].addr_(error, factor[column, column:last], alpha=-1.0)
            errors[:, place] = error
        values[:, last:] -= errors @ factor[first:last, last:]
    ids = None
    if act_order:
        restored = order.argsort()
        codes = codes[:, restored].contiguous()
        ids = (restored // size).to(torch.int32)
    held = [zero for zero in zeros if zero is not None]
    return GroupedWeight(
        codes if bits == 8 else pack_nibbles(codes),
        torch.stack(scales, dim=1),
        bits,
        size,
        num_columns,
        zeros=torch.stack(held, dim=1) if held else None,
        group_ids=ids,
    )


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped moments."""
    damping = DAMPING * float(moments.diagonal().mean())
    for _ in range(6):
        damped = moments.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    raise ArithmeticError("the inputs' second moments stay indefinite whatever is added to their diagonal")
