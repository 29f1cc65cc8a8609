"""What asking L2 for a product's weights while its predecessor runs is worth, over a decoder layer's products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from manta.kernels import dependent_launch

from .kernel_linears import Operands, layers_of, shipped_tiles
from .kernel_quantized import SCHEMES, QuantizedOperands
from .kernel_timing import LLAMA_8B, Calls, Line, ModelShape, Peaks, line_of

ROWS = (1, 8, 32, 64)
BYTES = (512, 1024, 2048, 4096)
"""Of each row of a program's weights."""


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    """The four products of a layer with their norms, bf16, FP8 and int4 as shipped, beside the same without asking."""
    if model is not LLAMA_8B:
        return
    layers = layers_of(model)[:4]
    schemes = [scheme for scheme in SCHEMES if scheme.name in ("linear_w4a16", "linear_fp8")]
    for rows in ROWS:
        dense = [Operands(layer, rows, device) for layer in layers]
        products = [
            operands.calls(shipped_tiles(layer, rows, device), rows)
            for layer, operands in zip(layers, dense, strict=True)
        ]
        floor_s = sum(layer.floor_s(peaks, rows) for layer in layers)
        yield from _lines("bf16", rows, products, floor_s)
        for scheme in schemes:
            quantized = [QuantizedOperands(scheme, layer, rows, device) for layer in layers]
            products = [operands.calls(operands.shipped(rows), rows) for operands in quantized]
            floor_s = sum(operands.floor_s(peaks, rows) for operands in quantized)
            yield from _lines(scheme.name.removeprefix("linear_"), rows, products, floor_s)


def _lines(name: str, rows: int, products: Sequence[Calls], floor_s: float) -> Iterator[Line]:
    chain = _in_turn(products)
    for num_bytes in BYTES:
        asking = [partial(_with_prefetch, num_bytes, call) for call in chain]
        yield line_of(
            f"prefetch_{num_bytes}_{name}",
            f"{rows} rows",
            asking,
            floor_s,
            "no prefetch",
            [partial(_with_prefetch, 0, call) for call in chain],
        )


def _in_turn(products: Sequence[Calls]) -> list[Callable[[], None]]:
    """One call runs all products once; the next one with the next copies of their weights."""

    def layer(number: int) -> None:
        for calls in products:
            calls[number % len(calls)]()

    return [partial(layer, number) for number in range(max(len(calls) for calls in products))]


def _with_prefetch(num_bytes: int, call: Callable[[], None]) -> None:
    before, dependent_launch.PREFETCH_BYTES = dependent_launch.PREFETCH_BYTES, num_bytes
    try:
        call()
    finally:
        dependent_launch.PREFETCH_BYTES = before
