"""The schemes by which plain weights are quantized when they are loaded, and the bytes that each should take.

One dict of all. A scheme creates a `QuantizedWeight` by rounding to the nearest; better roundings (GPTQ, AWQ) come from
`manta quantize` as checkpoints. What a weight does with activations is the weight's own matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from manta.engine.config import QuantizationConfig

from .codebooks import quantize_mxfp4, quantize_nf4, quantize_nvfp4
from .fp8 import Activations, quantize_fp8
from .grouped import quantize_grouped
from .int8 import quantize_int8
from .weight import QuantizedWeight

FP8_BLOCK = 128
LLM_INT8_THRESHOLD = 6.0


@dataclass(frozen=True)
class Scheme:
    """`create` quantizes a weight [out, in]; `num_bytes(out, in)` is what it then takes."""

    create: Callable[[torch.Tensor], QuantizedWeight]
    num_bytes: Callable[[int, int], int]
    is_rowwise: bool = True
    """Whether a row's codes and scales depend on that row alone: then a rank needs no other rows."""


def _int8(config: QuantizationConfig) -> Scheme:
    """Integers of 8 bits, a scale a row."""
    symmetric = config.symmetric
    return Scheme(
        lambda weight: quantize_grouped(weight, bits=8, symmetric=symmetric, scale_dtype=torch.float32),
        lambda rows, columns: rows * columns + rows * (4 if symmetric else 5),
    )


def _int4(config: QuantizationConfig) -> Scheme:
    """Integers of 4 bits, a scale in fp16 (and a zero in one byte) a group."""
    size, symmetric = None if config.group_size == "row" else config.group_size, config.symmetric

    def num_bytes(rows: int, columns: int) -> int:
        num_groups = -(-columns // (size or columns))
        return rows * (-(-columns // 2) + num_groups * (2 if symmetric else 3))

    return Scheme(
        lambda weight: quantize_grouped(weight, bits=4, group_size=size, symmetric=symmetric),
        num_bytes,
    )


def _fp8(config: QuantizationConfig) -> Scheme:
    """A scale a row; activations per token."""
    return Scheme(
        lambda weight: quantize_fp8(weight, block=(1, weight.shape[1]), activations=Activations.TOKEN),
        lambda rows, columns: rows * columns + 4 * rows,
    )


def _fp8_weight_only(config: QuantizationConfig) -> Scheme:
    """A scale a row; activations as they are."""
    return Scheme(
        lambda weight: quantize_fp8(weight, block=(1, weight.shape[1])),
        lambda rows, columns: rows * columns + 4 * rows,
    )


def _fp8_tensor(config: QuantizationConfig) -> Scheme:
    """A scale a tensor; activations per token. Rows know which tensor they are of: 4 bytes each."""
    return Scheme(
        lambda weight: quantize_fp8(weight, block=None, activations=Activations.TOKEN),
        lambda rows, columns: rows * columns + 4 * rows + 4,
        is_rowwise=False,
    )


def _fp8_block(config: QuantizationConfig) -> Scheme:
    """A scale a block of 128 x 128; activations per token and 128 columns. Rows and columns know their blocks."""

    def num_bytes(rows: int, columns: int) -> int:
        blocks = -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
        return rows * columns + 4 * (blocks + rows + columns)

    return Scheme(
        lambda weight: quantize_fp8(weight, block=(FP8_BLOCK, FP8_BLOCK), activations=Activations.BLOCK),
        num_bytes,
        is_rowwise=False,
    )


def _w8a8(config: QuantizationConfig) -> Scheme:
    """Weights by row, activations by token, both int8."""
    return Scheme(quantize_int8, lambda rows, columns: rows * columns + 4 * rows)


def _llm_int8(config: QuantizationConfig) -> Scheme:
    """The same with outlying columns of activations left out."""
    return Scheme(
        lambda weight: quantize_int8(weight, outlier_threshold=LLM_INT8_THRESHOLD),
        lambda rows, columns: rows * columns + 4 * rows,
    )


def _nf4(config: QuantizationConfig) -> Scheme:
    """Groups of 64 with scales in fp16."""
    return Scheme(quantize_nf4, lambda rows, columns: rows * (columns // 2 + 2 * -(-columns // 64)) + 64)


def _mxfp4(config: QuantizationConfig) -> Scheme:
    """Groups of 32 with powers of two in a byte."""
    return Scheme(quantize_mxfp4, lambda rows, columns: rows * (columns // 2 + -(-columns // 32)) + 64)


def _nvfp4(config: QuantizationConfig) -> Scheme:
    """Groups of 16 with scales in FP8, and one in fp32 for the tensor, which each row has."""
    return Scheme(
        quantize_nvfp4,
        lambda rows, columns: rows * (columns // 2 + -(-columns // 16) + 4) + 64,
        is_rowwise=False,
    )


SCHEMES: dict[str, Callable[[QuantizationConfig], Scheme]] = {
    "int8": _int8,
    "int4": _int4,
    "fp8": _fp8,
    "fp8_weight_only": _fp8_weight_only,
    "fp8_tensor": _fp8_tensor,
    "fp8_block": _fp8_block,
    "w8a8": _w8a8,
    "llm_int8": _llm_int8,
    "nf4": _nf4,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
