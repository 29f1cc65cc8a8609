"""FP8 (e4m3) weights with a scale for the tensor, each row or each block, and activations as they are or in FP8, too.

w = scale * code. Activations are quantized per token, per token and block of columns, or by a scale that the
checkpoint gives. Sums are exact products in fp32, as the matrix instructions form them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch.nn import functional

from manta.kernels.quantized.layout import FP8_DTYPE, FP8_MAX

from .weight import QuantizedWeight, RankMaximum


class Activations(StrEnum):
    """What `x` becomes before the product."""

    PLAIN = "plain"
    TOKEN = "token"
    """A scale for each token, from its largest element."""
    BLOCK = "block"
    """A scale for each token and block of columns, the weight's."""
    STATIC = "static"
    """One scale that was calibrated."""


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """`codes` [out, in] float8_e4m3fn; `scales` [row blocks, column blocks] fp32."""

    codes: torch.Tensor
    scales: torch.Tensor
    row_blocks: torch.Tensor | None = None
    """[out] int32: the row of `scales` of each output feature; None: its own."""
    column_blocks: torch.Tensor | None = None
    """[in] int32: the column of `scales` of each input feature; None: there is one column."""
    activations: Activations = Activations.PLAIN
    input_scale: torch.Tensor | None = None
    """One element: of `Activations.STATIC`."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.full_scales()

    def full_scales(self) -> torch.Tensor:
        """[out, in] or [out, 1]."""
        scales = self.scales if self.row_blocks is None else self.scales.index_select(0, self.row_blocks)
        return scales if self.column_blocks is None else scales.index_select(1, self.column_blocks)

    def apply(self, x: torch.Tensor, rank_maximum: RankMaximum | None = None) -> torch.Tensor:
        return functional.linear(self._quantized(x, rank_maximum).to(x.dtype), self.dequantize().to(x.dtype))

    def rows(self, index: slice | torch.Tensor) -> Fp8Weight:
        codes = self.codes.view(torch.uint8)[index].contiguous().view(FP8_DTYPE)
        if self.row_blocks is None:
            return replace(self, codes=codes, scales=self.scales[index].contiguous())
        return replace(self, codes=codes, row_blocks=self.row_blocks[index].contiguous())

    def columns(self, part: range) -> Fp8Weight:
        index = slice(part.start, part.stop)
        codes = self.codes.view(torch.uint8)[:, index].contiguous().view(FP8_DTYPE)
        blocks = None if self.column_blocks is None else self.column_blocks[index].contiguous()
        return replace(self, codes=codes, column_blocks=blocks)

    def joined(self, others: Sequence[Fp8Weight]) -> Fp8Weight | None:
        """Scales of all are kept; those by row become an index only where another part needs one."""
        if not all(self._is_like(other) for other in others):
            return None
        parts = [self, *others]
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(FP8_DTYPE)
        scales = torch.cat([part.scales for part in parts])
        if all(part.row_blocks is None for part in parts):
            return replace(self, codes=codes, scales=scales)
        first, blocks = 0, []
        for part in parts:
            own = part.row_blocks
            own = torch.arange(part.shape[0], device=codes.device, dtype=torch.int32) if own is None else own
            blocks.append(own + first)
            first += part.scales.shape[0]
        return replace(self, codes=codes, scales=scales, row_blocks=torch.cat(blocks))

    def _is_like(self, other: Fp8Weight) -> bool:
        if self.activations is not other.activations or self.shape[1] != other.shape[1]:
            return False
        for one, two in ((self.column_blocks, other.column_blocks), (self.input_scale, other.input_scale)):
            if (one is None) != (two is None) or (one is not None and two is not None and not torch.equal(one, two)):
                return False
        return self.scales.shape[1] == other.scales.shape[1]

    def _quantized(self, x: torch.Tensor, rank_maximum: RankMaximum | None) -> torch.Tensor:
        """What the codes of `x` stand for, fp32."""
        wide = x.float()
        if self.activations is Activations.PLAIN:
            return wide
        if self.activations is Activations.STATIC:
            assert self.input_scale is not None, "static activations have a scale"
            scale: torch.Tensor = self.input_scale.view(1, 1)
        elif self.activations is Activations.TOKEN or self.column_blocks is None:
            scale = _scale(wide.abs().amax(1, keepdim=True), rank_maximum)
        else:
            largest = torch.zeros(x.shape[0], self.scales.shape[1])
            largest.scatter_reduce_(1, self.column_blocks.long().expand(x.shape[0], -1), wide.abs(), "amax")
            scale = _scale(largest, rank_maximum).index_select(1, self.column_blocks)
        return (wide / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE).float() * scale


def quantize_fp8(
    weight: torch.Tensor, *, block: tuple[int, int] | None, activations: Activations = Activations.PLAIN
) -> Fp8Weight:
    """Round `weight` [out, in]; `block` (rows, columns) has one scale: (1, in) a row, None the tensor."""
    num_rows, num_columns = weight.shape
    block_rows, block_columns = (num_rows, num_columns) if block is None else block
    wide = weight.float()
    padded = functional.pad(wide, (0, -num_columns % block_columns, 0, -num_rows % block_rows))
    blocks = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_MAX  # [row blocks, column blocks]
    found = Fp8Weight(
        torch.empty(num_rows, num_columns, dtype=FP8_DTYPE, device=weight.device),
        scales,
        None if block_rows == 1 else block_ids(num_rows, block_rows, weight.device),
        None if block_columns >= num_columns else block_ids(num_columns, block_columns, weight.device),
        activations,
    )
    found.codes.copy_((wide / found.full_scales()).clamp_(-FP8_MAX, FP8_MAX))
    return found


def block_ids(count: int, size: int, device: torch.device) -> torch.Tensor:
    """[count] int32: 0, 0, ... 1, 1, ..., `size` of each."""
    return torch.arange(count, device=device, dtype=torch.int32) // size


def _scale(largest: torch.Tensor, rank_maximum: RankMaximum | None) -> torch.Tensor:
    if rank_maximum is not None:
        rank_maximum(largest)
    return largest.clamp(min=1e-12) / FP8_MAX
