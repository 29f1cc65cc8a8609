"""Weight-only quantization of integers or a codebook, a scale for each row and group of columns.

w = scale * (code - zero) + minimum, or scale * codebook[code]. Holds int8 and int4 by row or group, symmetric or not,
GPTQ with its order of columns, AWQ, GGUF's blocks, NF4, MXFP4 and NVFP4. Activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .weight import QuantizedWeight


@dataclass(frozen=True)
class GroupedWeight(QuantizedWeight):
    """`codes` are unsigned: of 8 bits [out, in] uint8, of 4 bits [out, ceil(in / 2)] with the even column in the low
    nibble."""

    codes: torch.Tensor
    scales: torch.Tensor
    """[out, groups]; integers when `scale_units` is there."""
    bits: int
    group_size: int
    """Columns a group; the last may have fewer."""
    num_columns: int
    zeros: torch.Tensor | None = None
    """[out, groups] uint8; None: the middle of the range, as symmetric codes have it."""
    minimums: torch.Tensor | None = None
    """[out, groups]: added, with `zeros` then 0."""
    scale_units: torch.Tensor | None = None
    minimum_units: torch.Tensor | None = None
    """[out, groups / groups_a_unit]: scales (minimums) are multiples of these, as in GGUF's K-quants."""
    groups_a_unit: int = 1
    codebook: torch.Tensor | None = None
    """[16] fp32: what codes stand for."""
    group_ids: torch.Tensor | None = None
    """[in] int32: the group of each column; None: column // group_size."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_columns

    def dequantize(self) -> torch.Tensor:
        if self.codebook is not None:
            return self.codebook[self.unpacked().int()] * self.by_column(self.full_scales())
        values = self.unpacked().float()
        if self.zeros is not None:
            values -= self.by_column(self.zeros.float())
        elif self.minimums is None:
            values -= 1 << (self.bits - 1)
        values *= self.by_column(self.full_scales())
        return values if self.minimums is None else values.add_(self.by_column(self.full_minimums()))

    def unpacked(self) -> torch.Tensor:
        """Codes [out, in] uint8."""
        return self.codes if self.bits == 8 else unpack_nibbles(self.codes)[:, : self.num_columns]

    def full_scales(self) -> torch.Tensor:
        """[out, groups] fp32."""
        return self._multiplied(self.scales, self.scale_units)

    def full_minimums(self) -> torch.Tensor:
        """[out, groups] fp32."""
        assert self.minimums is not None, "symmetric codes have no minimum"
        return self._multiplied(self.minimums, self.minimum_units)

    def by_column(self, of_group: torch.Tensor) -> torch.Tensor:
        """[rows, groups] -> [rows, in]."""
        if self.group_ids is not None:
            return of_group.index_select(1, self.group_ids)
        if of_group.shape[1] == 1:
            return of_group
        return of_group.repeat_interleave(self.group_size, dim=1)[:, : self.num_columns]

    def rows(self, index: slice | torch.Tensor) -> GroupedWeight:
        return self._of_rows(lambda _, tensor: tensor[index].contiguous())

    def columns(self, part: range) -> GroupedWeight:
        if len(part) == self.num_columns:
            return self
        codes = self.unpacked()[:, part.start : part.stop].contiguous()
        cut = replace(
            self, codes=codes if self.bits == 8 else pack_nibbles(codes), num_columns=len(part), group_ids=None
        )
        multiple = self.group_size * self.groups_a_unit
        if self.group_ids is None and part.start % multiple == 0:
            first, last = part.start // self.group_size, -(-part.stop // self.group_size)
            units = slice(first // self.groups_a_unit, -(-last // self.groups_a_unit))
            return replace(
                cut,
                scales=self.scales[:, first:last].contiguous(),
                zeros=None if self.zeros is None else self.zeros[:, first:last].contiguous(),
                minimums=None if self.minimums is None else self.minimums[:, first:last].contiguous(),
                scale_units=None if self.scale_units is None else self.scale_units[:, units].contiguous(),
                minimum_units=None if self.minimum_units is None else self.minimum_units[:, units].contiguous(),
            )
        group_ids = self.group_ids
        if group_ids is None:
            group_ids = torch.arange(self.num_columns, device=self.codes.device, dtype=torch.int32) // self.group_size
        return replace(cut, group_ids=group_ids[part.start : part.stop].contiguous())

    def joined(self, others: Sequence[GroupedWeight]) -> GroupedWeight | None:
        if not all(self._is_like(other) for other in others):
            return None
        return self._of_rows(lambda name, tensor: torch.cat([tensor, *(getattr(other, name) for other in others)]))

    def _is_like(self, other: GroupedWeight) -> bool:
        same = ("bits", "group_size", "num_columns", "groups_a_unit")
        if any(getattr(self, name) != getattr(other, name) for name in same):
            return False
        optional = ("zeros", "minimums", "scale_units", "minimum_units")
        if any((getattr(self, name) is None) != (getattr(other, name) is None) for name in optional):
            return False
        if self.scales.dtype != other.scales.dtype:
            return False
        return _equal(self.group_ids, other.group_ids) and _equal(self.codebook, other.codebook)

    def _of_rows(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> GroupedWeight:
        """`change(name, tensor)` of every tensor that has a row for each output feature."""
        names = ("codes", "scales", "zeros", "minimums", "scale_units", "minimum_units")
        return replace(
            self, **{name: change(name, value) for name in names if (value := getattr(self, name)) is not None}
        )

    def _multiplied(self, values: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
        if units is None:
            return values.float()
        return values.float() * units.float().repeat_interleave(self.groups_a_unit, dim=1)[:, : values.shape[1]]


def quantize_grouped(
    weight: torch.Tensor,
    *,
    bits: int,
    group_size: int | None = None,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupedWeight:
    """Round `weight` [out, in] to the nearest code; `group_size` None: one group a row."""
    num_columns = weight.shape[1]
    group_size = num_columns if group_size is None else min(group_size, num_columns)
    values = _in_groups(weight.float(), group_size)  # [out, groups, group_size]
    scales, zeros = grid_of(values, bits=bits, symmetric=symmetric, scale_dtype=scale_dtype)
    codes = nearest_codes(values, scales[..., None], None if zeros is None else zeros[..., None], bits=bits)
    codes = codes.flatten(1)[:, :num_columns]
    return GroupedWeight(
        codes.contiguous() if bits == 8 else pack_nibbles(codes),
        scales,
        bits,
        group_size,
        num_columns,
        zeros=zeros,
    )


def grid_of(
    values: torch.Tensor, *, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero (uint8; None: the middle) of the values along the last dimension, from their extremes."""
    top = (1 << bits) - 1
    if symmetric:
        scales = values.abs().amax(-1) * (2 / top)
        return rounded_scales(scales, scale_dtype), None
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    scales = rounded_scales((high - low) / top, scale_dtype)
    zeros = (-low / scales.float()).round().clamp(0, top).to(torch.uint8)
    return scales, zeros


def rounded_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`, and never 0: a group of zeros has some scale."""
    return scales.clamp(min=2e-7 if dtype == torch.float16 else 1e-30).to(dtype)


def nearest_codes(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, *, bits: int) -> torch.Tensor:
    """uint8."""
    middle = float(1 << (bits - 1)) if zeros is None else zeros.float()
    return (values / scales.float()).round_().add_(middle).clamp_(0, (1 << bits) - 1).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[rows, n] uint8 below 16 -> [rows, ceil(n / 2)]: the even column in the low nibble."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[rows, n] uint8 -> [rows, 2 n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def _in_groups(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """[out, in] -> [out, groups, group_size]; a short last group is filled with zeros."""
    rest = -values.shape[1] % group_size
    if rest:
        values = torch.nn.functional.pad(values, (0, rest))
    return values.unflatten(1, (-1, group_size))


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
