"""W8A8: int8 weights with a scale a row, int8 activations with a scale a token, sums in int32.

With a threshold, columns in which an element of the batch exceeds it stay out of the integers and are multiplied as
they are: LLM.int8 (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339). SmoothQuant needs nothing here: its
factors are in the norms and weights (engine/quant/smooth.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from .weight import QuantizedWeight, RankMaximum

INT8_MAX = 127.0


@dataclass(frozen=True)
class Int8Weight(QuantizedWeight):
    """`codes` [out, in] int8, `scales` [out] fp32: w = scale * code."""

    codes: torch.Tensor
    scales: torch.Tensor
    outlier_threshold: float | None = None
    input_scale: torch.Tensor | None = None
    """One element: activations have this scale instead of their own."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.scales[:, None]

    def apply(self, x: torch.Tensor, rank_maximum: RankMaximum | None = None) -> torch.Tensor:
        wide = x.float()
        outliers = None
        if self.outlier_threshold is not None:
            is_outlier = (wide.abs() > self.outlier_threshold).any(0)
            outliers = is_outlier.nonzero()[:, 0]
            if outliers.numel():
                wide = wide.masked_fill(is_outlier, 0.0)
        if self.input_scale is None:
            largest = wide.abs().amax(1, keepdim=True)
            if rank_maximum is not None:
                rank_maximum(largest)
            scale = largest.clamp_(min=1e-12) / INT8_MAX
        else:
            scale = self.input_scale.view(1, 1)
        codes = (wide / scale).round_().clamp_(-128, INT8_MAX)
        y = integer_product(codes, self.codes).mul_(scale).mul_(self.scales)
        if outliers is not None and outliers.numel():
            kept = self.codes.index_select(1, outliers).float() * self.scales[:, None]
            y += functional.linear(x.float().index_select(1, outliers), kept)
        return y.to(x.dtype)

    def rows(self, index: slice | torch.Tensor) -> Int8Weight:
        return replace(self, codes=self.codes[index].contiguous(), scales=self.scales[index].contiguous())

    def columns(self, part: range) -> Int8Weight:
        return replace(self, codes=self.codes[:, part.start : part.stop].contiguous())

    def joined(self, others: Sequence[Int8Weight]) -> Int8Weight | None:
        alike = all(
            other.outlier_threshold == self.outlier_threshold and _same_scale(self.input_scale, other.input_scale)
            for other in others
        )
        if not alike:
            return None
        return replace(
            self,
            codes=torch.cat([self.codes, *(other.codes for other in others)]),
            scales=torch.cat([self.scales, *(other.scales for other in others)]),
        )


def quantize_int8(weight: torch.Tensor, *, outlier_threshold: float | None = None) -> Int8Weight:
    """Round `weight` [out, in] by row."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp(min=1e-12) / INT8_MAX
    codes = (wide / scales[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Weight(codes, scales, outlier_threshold)


def integer_product(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """x codes^T [rows, out] fp32, the sums exact in int32, of `x` [rows, in], whole numbers of 8 bits."""
    if x.device.type == "cpu":
        return torch.ops.aten._int_mm(x.to(torch.int8), codes.t()).float()
    return torch.matmul(x.double(), codes.double().t()).float()


def _same_scale(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
