"""How quantized weights lie in memory, and what they stand for: packing, unpacking, dequantizing in plain torch.

Knows no checkpoint format and no kernel; `dequantize` is the specification of all kernels that read these layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Format(StrEnum):
    """How one number is kept."""

    INT4 = "int4"
    """Unsigned, 0 to 15, zero point 8 unless zero points are given; four in a word of 16 bits."""
    INT8 = "int8"
    """Signed, -128 to 127, zero point 0 unless zero points are given."""
    FP8 = "fp8"
    """e4m3fn: largest finite number 448, no infinities."""


INT4_ZERO = 8
FP8_MAX = 448.0
FP8_DTYPE = torch.float8_e4m3fn
NIBBLES = 4
"""In a word of an int4 weight."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in]: number (n, k) stands for (q[n, k] - zero[k // group, n]) * scale[k // group, n].

    `weight`: int8 or float8_e4m3fn [out, in]; int4 in planes (see `pack_int4`), int16 [out, words].
    `scales`: [ceil(in / group), out], fp32 or 16 bits; one per tensor is repeated, blocks of 128 x 128 too (see
    `scales_of_blocks`), so that products may be stacked, interleaved and cut at any row.
    `zeros`: the same shape and type, or None; any numbers, whole ones are exact. Not with FP8.
    `order` [in] int64: column k of the numbers belongs to the input's element order[k] (act-order), or None.
    """

    format: Format
    weight: torch.Tensor
    scales: torch.Tensor
    in_features: int
    group: int
    """Elements of a row that share a scale: `in_features` (one group), or 32, 64, 128."""
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    uniform_rows: int = 1
    """Among as many rows, at each multiple of it, the even ones share their scales and so do the odd ones: what blocks
    of scales leave, interleaved or not. See `uniform_rows_of`."""

    def __post_init__(self) -> None:
        out_features, width = self.weight.shape
        words = {Format.INT4: num_words(self.in_features, self.group)}.get(self.format, self.in_features)
        dtype = {Format.INT4: torch.int16, Format.INT8: torch.int8, Format.FP8: FP8_DTYPE}[self.format]
        scales = (num_groups(self.in_features, self.group), out_features)
        if width != words or self.weight.dtype != dtype:
            raise ValueError(
                f"{self.format} weight is {self.weight.dtype} {tuple(self.weight.shape)}, not {dtype} [out, {words}]"
            )
        if tuple(self.scales.shape) != scales:
            raise ValueError(f"scales are {tuple(self.scales.shape)}, not {scales}: [groups, out]")
        if self.zeros is not None and (self.zeros.shape != self.scales.shape or self.format is Format.FP8):
            raise ValueError(f"zero points of {self.format} are {tuple(self.zeros.shape)}; scales are {scales}")
        if self.order is not None and tuple(self.order.shape) != (self.in_features,):
            raise ValueError(f"order is {tuple(self.order.shape)}, not ({self.in_features},)")

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def num_bytes(self) -> int:
        tensors = (self.weight, self.scales, self.zeros, self.order)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    @property
    def plane(self) -> int:
        """Words between an int4 element and the next one in the same word; see `pack_int4`."""
        return plane_size(self.in_features, self.group)


def num_groups(in_features: int, group: int) -> int:
    """Groups of a row; the last may be short."""
    return -(-in_features // group)


def plane_size(in_features: int, group: int) -> int:
    """Words of a block of an int4 row: 64, or less where that saves padding or a group is smaller.

    One nibble's elements of a block lie in one group (a plane never straddles two), and 16 is the least that a matrix
    instruction takes.
    Raises ValueError for groups that are no multiple of 16, unless one group is the whole row.
    """
    whole = group >= in_features
    if not whole and group % 16:
        raise ValueError(f"groups of {group}: int4 needs a multiple of 16, or one group for the whole row")
    fitting = [size for size in (64, 32, 16) if whole or group % size == 0]
    return next((size for size in fitting if in_features % (NIBBLES * size) == 0), 16)


def num_words(in_features: int, group: int) -> int:
    """Words of one int4 row; its last block may be padded."""
    plane = plane_size(in_features, group)
    return -(-in_features // (NIBBLES * plane)) * plane


def pack_int4(values: torch.Tensor, group: int) -> torch.Tensor:
    """int16 [out, words] of `values` [out, in], 0 to 15 in any integer type.

    In planes: with J = `plane_size`, nibble i (from the least significant) of word b J + j is the element
    4 J b + i J + j, so that masking one nibble out of neighbouring words gives neighbouring elements. Elements past
    `in` are 0.
    """
    out_features, in_features = values.shape
    plane = plane_size(in_features, group)
    words = num_words(in_features, group)
    padded = torch.zeros(out_features, NIBBLES * words, dtype=torch.int32, device=values.device)
    padded[:, :in_features] = values
    planes = padded.view(out_features, -1, NIBBLES, plane)
    shifts = (4 * torch.arange(NIBBLES, dtype=torch.int32, device=values.device))[:, None]
    packed = (planes << shifts).sum(2, dtype=torch.int32).view(out_features, words)
    return torch.where(packed >= 1 << 15, packed - (1 << 16), packed).to(torch.int16)


def unpack_int4(packed: torch.Tensor, in_features: int, group: int) -> torch.Tensor:
    """uint8 [out, in], 0 to 15, of what `pack_int4` made."""
    out_features = packed.shape[0]
    plane = plane_size(in_features, group)
    shifts = (4 * torch.arange(NIBBLES, dtype=torch.int32, device=packed.device))[:, None]
    blocks = packed.to(torch.int32).view(out_features, -1, 1, plane)
    return ((blocks >> shifts) & 15).to(torch.uint8).view(out_features, -1)[:, :in_features]


def values_of(weight: QuantizedWeight) -> torch.Tensor:
    """The numbers as kept: uint8 (int4), int8 or float8 [out, in], columns in stored order."""
    if weight.format is Format.INT4:
        return unpack_int4(weight.weight, weight.in_features, weight.group)
    return weight.weight


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """fp32 [out, in], columns in the input's order."""
    index = torch.arange(weight.in_features, device=weight.weight.device) // weight.group
    wide = values_of(weight).float()
    if weight.zeros is not None:
        wide -= weight.zeros.float().t()[:, index]
    elif weight.format is Format.INT4:
        wide -= INT4_ZERO
    wide *= weight.scales.float().t()[:, index]
    if weight.order is None:
        return wide
    restored = torch.empty_like(wide)
    restored[:, weight.order] = wide
    return restored


def scales_of_blocks(blocks: torch.Tensor, out_features: int, block_rows: int = 128) -> torch.Tensor:
    """[groups, out] of scales [ceil(out / block_rows), groups] that whole blocks share."""
    return blocks.repeat_interleave(block_rows, 0)[:out_features].t().contiguous()


def uniform_rows_of(scales: torch.Tensor, block_rows: int = 128) -> int:
    """`block_rows` if the scales [groups, out] allow that as a weight's `uniform_rows`, else 1."""
    groups, out_features = scales.shape
    if out_features % block_rows:
        return 1
    blocks = scales.view(groups, -1, block_rows // 2, 2)
    return block_rows if bool((blocks == blocks[:, :, :1]).all()) else 1


def scales_per_row(scales: torch.Tensor, out_features: int) -> torch.Tensor:
    """[1, out] of one scale per tensor (one element) or per row ([out] or [out, 1])."""
    return scales.reshape(1, -1).expand(1, out_features).contiguous()
