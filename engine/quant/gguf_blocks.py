"""GGUF's quantized blocks kept as they are: Q4_0, Q4_1, Q8_0, Q4_K and Q6_K as groups with their own scales.

Bit layouts are those of the format's public description. Numbers stay exact: integers, and scales in fp16 or as
integers times a unit in fp16. Tensors of other types are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from manta.engine.errors import CheckpointError
from manta.engine.gguf_file import read_gguf_header
from manta.engine.models.family import Family, Parameter
from manta.engine.weights.gguf_file import find_tensor, row_bytes_of
from manta.engine.weights.slices import TensorSlice

from .grouped import GroupedWeight, pack_nibbles
from .weight import PlainWeight, QuantizedWeight

Type = GGMLQuantizationType


class GgufReader:
    """Products of a GGUF file."""

    name = "blocks of a GGUF file"

    def __init__(self, file: Path, family: Family, *, head_dim: int) -> None:
        self._header = read_gguf_header(file)
        self._data = np.memmap(file, dtype=np.uint8, mode="r")
        self._family = family
        self._head_dim = head_dim

    def read(self, parameter: Parameter, part: TensorSlice) -> QuantizedWeight:
        """Rows are read as far as they are wanted, columns whole. Raises CheckpointError naming the tensor."""
        file = self._header.path
        tensor = find_tensor(self._header, self._family.gguf_name(parameter), part)
        kind, row_bytes = row_bytes_of(file, tensor, self._data.size)
        rows = part.part if part.dim == 0 else range(part.full[0])
        first = tensor.offset + rows.start * row_bytes
        raw = self._data[first : first + len(rows) * row_bytes].reshape(len(rows), row_bytes)
        if kind in DECODERS:
            blocks = torch.from_numpy(raw.copy()).view(len(rows), -1, GGML_QUANT_SIZES[kind][1])
            weight: QuantizedWeight = DECODERS[kind](blocks, part.full[1])
        else:
            try:
                weight = PlainWeight(torch.from_numpy(np.array(dequantize(np.ascontiguousarray(raw), kind))))
            except NotImplementedError:
                message = f"{file}: tensor {tensor.name} is of type {kind.name}, which cannot be read"
                raise CheckpointError(message) from None
        if self._family.gguf_interleaves_rotary and parameter.part in ("q", "k"):
            weight = weight.rows(self._row_order(len(rows)))
        return weight.columns(part.part) if part.dim == 1 and not part.is_whole else weight

    def _row_order(self, num_rows: int) -> torch.Tensor:
        """Where the halves of each head lie: [heads, dim / 2, 2] in the file is [heads, 2, dim / 2] here."""
        places = torch.arange(num_rows).view(-1, self._head_dim // 2, 2)
        return places.transpose(1, 2).reshape(-1)


def _q4_0(blocks: torch.Tensor, num_columns: int) -> GroupedWeight:
    """fp16 scale, 16 bytes: low nibbles are the first 16 columns, high nibbles the others."""
    return GroupedWeight(pack_nibbles(_halves(blocks[..., 2:])), _half(blocks, 0), 4, 32, num_columns)


def _q4_1(blocks: torch.Tensor, num_columns: int) -> GroupedWeight:
    """fp16 scale and minimum, nibbles as above."""
    codes = pack_nibbles(_halves(blocks[..., 4:]))
    return GroupedWeight(codes, _half(blocks, 0), 4, 32, num_columns, minimums=_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, num_columns: int) -> GroupedWeight:
    """fp16 scale, 32 signed bytes."""
    return GroupedWeight((blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0), 8, 32, num_columns)


def _q4_k(blocks: torch.Tensor, num_columns: int) -> GroupedWeight:
    """256 columns: fp16 units of scales and minimums, 8 of each in 6 bits (12 bytes), 8 groups of 32 nibbles."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minimums = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))  # low nibbles: an even group of 32, high ones the next
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(1)
    return GroupedWeight(
        pack_nibbles(codes),
        scales.flatten(1),
        4,
        32,
        num_columns,
        minimums=-minimums.to(torch.int8).flatten(1),
        scale_units=_half(blocks, 0),
        minimum_units=_half(blocks, 2),
        groups_a_unit=8,
    )


def _q6_k(blocks: torch.Tensor, num_columns: int) -> GroupedWeight:
    """256 columns: 4 low bits (128 bytes), 2 high bits (64), 16 signed scales, fp16 unit; a code less 32 is the number.

    Codes take 8 bits here."""
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # [half, byte run, 32]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    quarters = [low[..., 0:1, :] & 15, low[..., 1:2, :] & 15, low[..., 0:1, :] >> 4, low[..., 1:2, :] >> 4]
    codes = torch.cat([part | ((high >> (2 * place) & 3) << 4) for place, part in enumerate(quarters)], -2)
    return GroupedWeight(
        (codes + 96).flatten(1),  # the middle of 8 bits is 128
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(1),
        8,
        16,
        num_columns,
        scale_units=_half(blocks, 208),
        groups_a_unit=16,
    )


DECODERS: dict[GGMLQuantizationType, Callable[[torch.Tensor, int], GroupedWeight]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q6_K: _q6_k,
}
"""From blocks [rows, blocks, bytes of one] uint8."""


def _halves(nibbles: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, 16] -> codes [rows, blocks * 32]."""
    return torch.cat([nibbles & 15, nibbles >> 4], -1).flatten(1)


def _half(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """[rows, blocks] fp16 at a byte of each block."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0]
