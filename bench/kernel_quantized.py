"""Times the linear layers of a decoder with quantized weights beside 16-bit ones and the library's 8-bit products.

Knows the schemes and what limits them; the frame is kernel_timing's, configurations come from kernels/quantized/linear,
which kernel_quantized_tuning finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from manta.kernels.quantized import linear as quantized
from manta.kernels.quantized.eight_bit import row_group
from manta.kernels.quantized.layout import (
    FP8_DTYPE,
    Format,
    QuantizedWeight,
    num_groups,
    num_words,
    uniform_rows_of,
)
from manta.kernels.quantized.library import int8_sums, library_product, library_takes
from manta.kernels.quantized.quantize import quantize_rows

from .kernel_linears import (
    EPS,
    Layer,
    Operands,
    first_and_last,
    layers_of,
    poisoned_memory,
    shipped_tiles,
)
from .kernel_timing import LLAMA_8B, Line, ModelShape, Peaks, line_of, num_rotations, random, time_us

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
LEAST_DEQUANTIZED_ROWS = 64


@dataclass(frozen=True)
class Scheme:
    """How a layer's weight and activations are kept; `name` as in the tables."""

    format: Format
    activations: Format | None
    group: int | None

    @property
    def name(self) -> str:
        return quantized.scheme_name(self.format, self.activations, self.group)


SCHEMES = (
    Scheme(Format.INT4, None, 128),
    Scheme(Format.FP8, None, None),
    Scheme(Format.FP8, Format.FP8, None),
    Scheme(Format.INT8, None, None),
    Scheme(Format.FP8, Format.FP8, 128),
    Scheme(Format.INT8, Format.INT8, None),
)
"""FP8 weights with 16-bit activations first: FP8 activations try what those took."""


def random_weight(scheme: Scheme, layer: Layer, device: torch.device) -> QuantizedWeight:
    """Random numbers of about the size that give results of order one; blocks of 128 rows share scales of groups."""
    n_size, k_size, group = layer.n_size, layer.k_size, scheme.group or layer.k_size
    deviation = {Format.INT4: 4.6, Format.INT8: 74.0, Format.FP8: 100.0}[scheme.format]
    if scheme.format is Format.INT4:
        shape = (n_size, num_words(k_size, group))
        numbers = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device)
    elif scheme.format is Format.INT8:
        numbers = torch.randint(-128, 128, (n_size, k_size), dtype=torch.int8, device=device)
    else:
        numbers = (100 * random(device, n_size, k_size)).clamp(-448, 448).to(FP8_DTYPE)
    groups = num_groups(k_size, group)
    if scheme.group is not None and scheme.format is Format.FP8:
        scales = torch.rand(groups, n_size // 256, 1, 2, device=device).expand(-1, -1, 128, -1).reshape(groups, n_size)
    else:
        scales = torch.rand(groups, n_size, device=device)
    scales = (scales + 0.5) * k_size**-0.5 / deviation
    if scheme.format is Format.INT4:
        return QuantizedWeight(scheme.format, numbers, scales.bfloat16(), k_size, group)
    return QuantizedWeight(scheme.format, numbers, scales, k_size, group, uniform_rows=uniform_rows_of(scales))


class QuantizedOperands:
    """Inputs of one layer for up to `max_rows` rows, weights in as many copies as pass over the L2 cache."""

    def __init__(
        self, scheme: Scheme, layer: Layer, max_rows: int, device: torch.device, *, copies: int | None = None
    ) -> None:
        self.scheme, self.layer = scheme, layer
        self._x = random(device, max_rows, layer.k_size)
        self._residual = random(device, max_rows, layer.n_size) if layer.kind == "add" else None
        self._norm_weight = random(device, layer.k_size) if layer.kind != "add" else None
        first = random_weight(scheme, layer, device)
        copies = copies or num_rotations(first.weight.numel() * first.weight.element_size())
        self._weights = [first] + [
            replace(first, weight=first.weight.clone(), scales=first.scales.clone()) for _ in range(copies - 1)
        ]

    def floor_s(self, peaks: Peaks, rows: int) -> float:
        """Weights, input and output once over the bus, or the operations, whichever takes longer. 8-bit operands are
        given twice the 16-bit rate."""
        layer, weight = self.layer, self._weights[0]
        moved = weight.num_bytes + 2 * rows * (layer.k_size + layer.out_size * (2 if layer.kind == "add" else 1))
        rate = peaks.matmul_flop_per_s * (1 if self.scheme.activations is None else 2)
        return max(moved / peaks.read_bytes_per_s, 2 * rows * layer.n_size * layer.k_size / rate)

    def calls(self, tiles: Any, rows: int) -> list[Callable[[], torch.Tensor]]:
        """The whole layer, norm or quantization and all, once for each copy of the weight."""
        residual = None if self._residual is None else self._residual[:rows].clone()
        call = partial(
            quantized.apply,
            tiles,
            self._x[:rows],
            activations=self.scheme.activations,
            norm_weight=self._norm_weight,
            eps=EPS,
            gated=self.layer.kind == "gated",
            residual=residual,
        )
        return [partial(call, weight) for weight in self._weights]

    def shipped(self, rows: int) -> Any:
        kind, weight = self.layer.kind, self._weights[0]
        return quantized.choose(kind, self._x[:rows], weight, self.scheme.activations, deterministic=False)

    def takes_library(self, rows: int) -> bool:
        """Whether the library is worth a try: few rows never pay for a weight that is written out first."""
        if self.scheme.activations is None:
            return rows >= LEAST_DEQUANTIZED_ROWS
        return library_takes(rows, self._weights[0], torch.bfloat16)

    def bare_calls(self, tiles: Any, rows: int) -> list[Callable[[], torch.Tensor]]:
        """Products of rows that are quantized already: ours with gate or residual, the library's (None) without, and
        int8 not even scaled."""
        assert self.scheme.activations is not None
        x = quantize_rows(self._x[:rows], self.scheme.activations, row_group(self._weights[0]))
        if tiles is not None:
            kernel = quantized.eight_bit_product(tiles)
            residual = None if self._residual is None else self._residual[:rows].clone()
            gated = self.layer.kind == "gated"
            call = partial(kernel, x, dtype=torch.bfloat16, tiles=tiles, gated=gated, residual=residual)
        elif self.scheme.format is Format.INT8:
            return [partial(int8_sums, x.values, weight.weight) for weight in self._weights]
        else:
            call = partial(library_product, x, dtype=torch.bfloat16)
        return [partial(call, weight=weight) for weight in self._weights]

    def expected(self, rows: int, *, rounds: bool) -> torch.Tensor:
        """What the checked rows should be, from fp32; `rounds`: with the activations' rounding to 8 bits."""
        at = first_and_last(rows)
        residual = None if self._residual is None else self._residual[:rows][at].float()
        activations = self.scheme.activations if rounds else None
        return quantized.linear_reference(
            self._x[:rows][at].float(),
            self._weights[0],
            activations=activations,
            norm_weight=self._norm_weight,
            eps=EPS,
            gated=self.layer.kind == "gated",
            residual=residual,
        )

    def relative_error(self, tiles: Any, rows: int, expected: torch.Tensor) -> float:
        """Of one call whose outputs and workspaces were NaN before; infinite if any element still is."""
        with poisoned_memory():
            result = self.calls(tiles, rows)[0]()
        if not bool(result.isfinite().all()):
            return float("inf")
        difference = result[first_and_last(rows)].float() - expected
        return float(difference.norm() / expected.norm())


def bf16_us(layer: Layer, rows: tuple[int, ...], device: torch.device) -> dict[int, tuple[float, float]]:
    """By rows: the layer in bfloat16 as shipped, and torch's product alone."""
    operands = Operands(layer, max(rows), device)
    found: dict[int, tuple[float, float]] = {}
    for count in rows:
        x = random(device, count, layer.k_size)
        alone = [partial(torch.mm, x, weight.t()) for weight in operands._weights]
        found[count] = (time_us(operands.calls(shipped_tiles(layer, count, device), count)), time_us(alone))
    return found


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    """Each scheme's layers as shipped, by rows, beside the same layer in bfloat16 as shipped."""
    if model is not LLAMA_8B:
        return
    for layer in layers_of(model)[:4]:
        dense = Operands(layer, max(ROWS), device)
        for scheme in SCHEMES:
            operands = QuantizedOperands(scheme, layer, max(ROWS), device)
            for rows in ROWS:
                yield line_of(
                    f"{scheme.name.removeprefix('linear_')}_{layer.name}",
                    f"{rows} rows",
                    operands.calls(operands.shipped(rows), rows),
                    operands.floor_s(peaks, rows),
                    "bf16 as shipped",
                    dense.calls(shipped_tiles(layer, rows, device), rows),
                )
