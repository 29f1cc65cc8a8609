"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): columns are rounded one after the other, and what each
one's rounding does to the output is made good by those that are still to come.

With U the upper Cholesky factor of (X^T X + damping)^-1: the error e = (w - rounded w) / U[j, j] of column j changes
the columns behind it by -e U[j, behind] (algorithm 1 of the paper).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from manta.engine.quant.fp8 import Activations, Fp8Weight, quantize_fp8
from manta.engine.quant.grouped import GroupedWeight, grid_of, nearest_codes, pack_nibbles, quantize_grouped
from manta.kernels.quantized.layout import FP8_DTYPE, FP8_MAX

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
    keeps_groups: bool = False,
) -> GroupedWeight:
    """`weight` [out, in] for inputs with `second_moments` [in, in]; `group_size` None: one group a row.

    `act_order`: columns with larger inputs first, and grouped in that order; with `keeps_groups` groups are those of
    neighbouring columns, their scales from the weight before any column was changed."""
    num_columns = weight.shape[1]
    size = num_columns if group_size is None else min(group_size, num_columns)
    order = _order_of(second_moments) if act_order else None
    if order is not None and keeps_groups:
        fixed = _FixedGrid(quantize_grouped(weight, bits=bits, group_size=size, symmetric=symmetric), order)
        _round_columns(fixed, weight, second_moments, group_size=size, order=order)
        return replace(fixed.nearest, codes=fixed.codes if bits == 8 else pack_nibbles(fixed.codes))
    grid = _IntegerGrid(weight, bits, symmetric)
    _round_columns(grid, weight, second_moments, group_size=size, order=order)
    codes, ids = grid.codes, None
    if order is not None:
        restored = order.argsort()
        codes = codes[:, restored].contiguous()
        ids = (restored // size).to(torch.int32)
    held = [zero for zero in grid.zeros if zero is not None]
    return GroupedWeight(
        codes if bits == 8 else pack_nibbles(codes),
        torch.stack(grid.scales, dim=1),
        bits,
        size,
        num_columns,
        zeros=torch.stack(held, dim=1) if held else None,
        group_ids=ids,
    )


def quantize_fp8_gptq(weight: torch.Tensor, second_moments: torch.Tensor, activations: Activations) -> Fp8Weight:
    """`weight` [out, in] in FP8 with a scale a row, columns with larger inputs first."""
    grid = _Fp8Grid(quantize_fp8(weight, block=(1, weight.shape[1]), activations=activations))
    order = _order_of(second_moments)
    _round_columns(grid, weight, second_moments, group_size=weight.shape[1], order=order)
    codes = grid.values[:, order.argsort()].to(FP8_DTYPE)
    return replace(grid.nearest, codes=codes)


class _Grid(Protocol):
    """What columns are rounded to, one after the other."""

    def begin(self, group: torch.Tensor) -> None:
        """The next columns [out, group size] share scales."""

    def round(self, place: int, column: torch.Tensor) -> torch.Tensor:
        """Keep the codes of a column [out], and return what they stand for."""
        ...


class _IntegerGrid:
    def __init__(self, weight: torch.Tensor, bits: int, symmetric: bool) -> None:
        self.codes = torch.empty(weight.shape, dtype=torch.uint8)
        self.scales: list[torch.Tensor] = []
        self.zeros: list[torch.Tensor | None] = []
        self._bits, self._symmetric = bits, symmetric

    def begin(self, group: torch.Tensor) -> None:
        scale, zero = grid_of(group, bits=self._bits, symmetric=self._symmetric, scale_dtype=torch.float16)
        self.scales.append(scale)
        self.zeros.append(zero)

    def round(self, place: int, column: torch.Tensor) -> torch.Tensor:
        scale, zero = self.scales[-1], self.zeros[-1]
        self.codes[:, place], values = _rounded(column, scale, zero, self._bits)
        return values


class _FixedGrid:
    """Scales and zeros of `nearest`, columns in `order`."""

    def __init__(self, nearest: GroupedWeight, order: torch.Tensor) -> None:
        self.nearest = nearest
        self.codes = torch.empty(nearest.shape, dtype=torch.uint8)
        self._columns = order.tolist()

    def begin(self, group: torch.Tensor) -> None:
        pass

    def round(self, place: int, column: torch.Tensor) -> torch.Tensor:
        original = self._columns[place]
        group = original // self.nearest.group_size
        scale, zeros = self.nearest.scales[:, group], self.nearest.zeros
        zero = None if zeros is None else zeros[:, group]
        self.codes[:, original], values = _rounded(column, scale, zero, self.nearest.bits)
        return values


class _Fp8Grid:
    """Scales are those of the weight before any column was changed."""

    def __init__(self, nearest: Fp8Weight) -> None:
        self.nearest = nearest
        self.values = torch.empty(nearest.shape)
        """Codes as numbers."""

    def begin(self, group: torch.Tensor) -> None:
        pass

    def round(self, place: int, column: torch.Tensor) -> torch.Tensor:
        scale = self.nearest.scales[:, 0]
        self.values[:, place] = (column / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE).float()
        return self.values[:, place] * scale


def _rounded(
    column: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, what they stand for) of [out]."""
    code = nearest_codes(column, scale, zero, bits=bits)
    middle = float(1 << (bits - 1)) if zero is None else zero.float()
    return code, (code.float() - middle) * scale.float()


def _order_of(second_moments: torch.Tensor) -> torch.Tensor:
    """Columns with larger inputs first."""
    return second_moments.diagonal().argsort(descending=True)


def _round_columns(
    grid: _Grid, weight: torch.Tensor, second_moments: torch.Tensor, *, group_size: int, order: torch.Tensor | None
) -> None:
    """Give `grid` all columns in `order`, None: as they are."""
    num_rows, num_columns = weight.shape
    moments, values = second_moments.float().clone(), weight.float().clone()
    unused = moments.diagonal() == 0
    moments.diagonal()[unused] = 1.0
    values[:, unused] = 0.0
    if order is not None:
        values, moments = values[:, order], moments[order][:, order]
    factor = _inverse_factor(moments)
    block = _BLOCK if group_size >= num_columns else min(group_size, _BLOCK)
    for first in range(0, num_columns, block):
        last = min(first + block, num_columns)
        own, errors = values[:, first:last].clone(), torch.empty(num_rows, last - first)
        for place in range(last - first):
            column = first + place
            if column % group_size == 0:
                group = values[:, column : column + group_size].clone()
                group[:, : last - column] = own[:, place : place + group_size]
                grid.begin(group)
            error = (own[:, place] - grid.round(column, own[:, place])) / factor[column, column]
            own[:, place:].addr_(error, factor[column, column:last], alpha=-1.0)
            errors[:, place] = error
        values[:, last:] -= errors @ factor[first:last, last:]


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
