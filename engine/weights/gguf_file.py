"""Reads the tensors of a GGUF file, dequantized by the `gguf` package, a few megabytes at a time.

Knows where tensors go only as a mapping from parameters to views; the header is read by engine/gguf_file.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from manta.engine.errors import CheckpointError
from manta.engine.gguf_file import GgufHeader, GgufTensor
from manta.engine.models.family import Family, Parameter

from .slices import SliceOf, TensorSlice

_CHUNK_ELEMENTS = 1 << 24
"""Elements that are dequantized at once."""


def read_gguf(
    header: GgufHeader, family: Family, views: Mapping[Parameter, torch.Tensor], slice_of: SliceOf, *, head_dim: int
) -> None:
    """Fill every view with its slice; other rows and blocks are not dequantized.

    Raises CheckpointError naming the tensor that is missing, short, mis-shaped or of a type that cannot be dequantized.
    """
    file = header.path
    data = np.memmap(file, dtype=np.uint8, mode="r")
    for parameter, view in views.items():
        part = slice_of(parameter)
        tensor = find_tensor(header, family.gguf_name(parameter), part)
        is_interleaved = family.gguf_interleaves_rotary and parameter.part in ("q", "k")
        for rows, values in _dequantized(file, data, tensor, part, rows_multiple=head_dim):
            chunk = view[rows : rows + values.shape[0]]
            if is_interleaved:
                # [heads, 2, dim / 2, ...] here is [heads, dim / 2, 2, ...] in the file
                halves = chunk.view(-1, 2, head_dim // 2, *chunk.shape[1:]).transpose(1, 2)
                halves.copy_(values.view(halves.shape))
            else:
                chunk.copy_(values)


def find_tensor(header: GgufHeader, name: str, part: TensorSlice) -> GgufTensor:
    """Raises CheckpointError naming the tensor that is missing or mis-shaped."""
    tensor = header.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{header.path}: tensor {name} is missing")
    if tensor.shape[::-1] != part.full:
        raise CheckpointError(
            f"{header.path}: tensor {name} has shape {tensor.shape[::-1]}, the metadata ask for {part.full}"
        )
    return tensor


def row_bytes_of(file: Path, tensor: GgufTensor, file_bytes: int) -> tuple[GGMLQuantizationType, int]:
    """The type and the bytes of a row. Raises CheckpointError for unknown types, broken rows and short files."""
    try:
        kind = GGMLQuantizationType(tensor.type_id)
    except ValueError:
        raise CheckpointError(f"{file}: tensor {tensor.name} is of unknown type {tensor.type_id}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row_elements, num_rows = row_sizes(tensor)
    row_bytes, rest = divmod(row_elements * block_bytes, block_elements)
    if rest:
        raise CheckpointError(f"{file}: rows of tensor {tensor.name} are no whole number of {kind.name} blocks")
    if tensor.offset + num_rows * row_bytes > file_bytes:
        raise CheckpointError(f"{file} is cut short: tensor {tensor.name} reaches beyond its end; get it again")
    return kind, row_bytes


def row_sizes(tensor: GgufTensor) -> tuple[int, int]:
    """Elements of a row and rows; a vector has rows of one element."""
    if len(tensor.shape) == 1:
        return 1, tensor.shape[0]
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _dequantized(
    file: Path, data: np.ndarray, tensor: GgufTensor, part: TensorSlice, *, rows_multiple: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row within the slice, fp32 values) of runs of rows, each a multiple of `rows_multiple` rows long, save
    the last."""
    kind, row_bytes = row_bytes_of(file, tensor, data.size)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row_elements, num_rows = row_sizes(tensor)
    rows = part.part if part.dim == 0 else range(num_rows)
    columns = range(row_elements) if part.dim == 0 else part.part
    # Of a row's columns, the whole blocks that hold them are dequantized.
    first_block, last_block = columns.start // block_elements, -(-columns.stop // block_elements)
    block_columns = slice(columns.start - first_block * block_elements, columns.stop - first_block * block_elements)
    num_at_once = max(_CHUNK_ELEMENTS // (row_elements * rows_multiple), 1) * rows_multiple
    for first in range(0, len(rows), num_at_once):
        count = min(num_at_once, len(rows) - first)
        start = tensor.offset + (rows.start + first) * row_bytes
        raw = data[start : start + count * row_bytes].reshape(count, row_bytes)
        try:
            values = dequantize(_blocks(raw, first_block * block_bytes, last_block * block_bytes), kind)
        except NotImplementedError:
            message = f"{file}: tensor {tensor.name} is of type {kind.name}, which cannot be dequantized"
            raise CheckpointError(message) from None
        values = np.ascontiguousarray(values, dtype=np.float32)
        values = values if values.flags.writeable else values.copy()
        found = torch.from_numpy(values)
        yield first, found.view(count) if len(tensor.shape) == 1 else found.view(count, -1)[:, block_columns]


def _blocks(raw: np.ndarray, first_byte: int, last_byte: int) -> np.ndarray:
    """Columns of bytes, contiguous; whole rows stay the mapped file."""
    return raw if last_byte - first_byte == raw.shape[1] else np.ascontiguousarray(raw[:, first_byte:last_byte])
