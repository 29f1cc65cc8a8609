"""Times the linear layers of a decoder beside the library's composition of them.

Knows the kernels' tiles and what limits them; the frame is kernel_timing's, configurations come from kernels/linear.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from manta.kernels import linear
from manta.kernels.gemm import DETERMINISTIC_TILES
from manta.kernels.gemv import gemv_reference

from .kernel_timing import Line, ModelShape, Peaks, line_of, num_rotations, random

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEAD_ROWS = 512
"""More rows than these never want logits at once."""
DETERMINISTIC_ROWS = (1, 16, 64, 256, 2048)
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """A linear layer [n_size, k_size] and its kind in the tables: plain, gated or add."""

    name: str
    kind: str
    n_size: int
    k_size: int
    is_behind_norm: bool = True
    """Unless it is an add, which never is."""

    @property
    def has_norm(self) -> bool:
        return self.is_behind_norm and self.kind != "add"

    @property
    def out_size(self) -> int:
        return self.n_size // 2 if self.kind == "gated" else self.n_size

    def floor_s(self, peaks: Peaks, rows: int) -> float:
        """Weights, input and output once over the bus, or the operations, whichever takes longer."""
        moved = self.n_size * self.k_size + rows * (self.k_size + self.out_size * (2 if self.kind == "add" else 1))
        operations = 2 * rows * self.n_size * self.k_size
        return max(2 * moved / peaks.read_bytes_per_s, operations / peaks.matmul_flop_per_s)


def layers_of(model: ModelShape) -> list[Layer]:
    """One decoder layer's four products and the head."""
    attention = model.heads * model.dim
    return [
        Layer("qkv", "plain", attention + 2 * model.kv_heads * model.dim, model.hidden),
        Layer("o", "add", model.hidden, attention),
        Layer("gate_up", "gated", 2 * model.inter, model.hidden),
        Layer("down", "add", model.hidden, model.inter),
        Layer("head", "plain", model.vocab, model.hidden),
    ]


def rank_layers_of(model: ModelShape) -> list[Layer]:
    """The same for a rank of several, which adds nothing by itself: its part of a sum goes to the others first."""
    return [
        replace(layer, kind="plain", is_behind_norm=False) if layer.kind == "add" else layer
        for layer in layers_of(model)
    ]


class Operands:
    """Inputs of one layer for up to `max_rows` rows, weights in as many copies as pass over the L2 cache."""

    def __init__(self, layer: Layer, max_rows: int, device: torch.device, *, copies: int | None = None) -> None:
        self.layer = layer
        self._x = random(device, max_rows, layer.k_size)
        self._residual = random(device, max_rows, layer.n_size) if layer.kind == "add" else None
        self._norm_weight = random(device, layer.k_size) if layer.has_norm else None
        copies = copies or num_rotations(2 * layer.n_size * layer.k_size)
        self._weights = [random(device, layer.n_size, layer.k_size) * layer.k_size**-0.5 for _ in range(copies)]

    def calls(self, tiles: linear.Tiles | None, rows: int) -> list[Callable[[], torch.Tensor]]:
        """The whole layer, norm and all, once for each copy of the weight. Results add up in one residual."""
        residual = None if self._residual is None else self._residual[:rows].clone()
        return [partial(self._call, tiles, self._x[:rows], weight, residual) for weight in self._weights]

    def _call(
        self, tiles: linear.Tiles | None, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        gated = self.layer.kind == "gated"
        return linear.apply(tiles, x, weight, norm_weight=self._norm_weight, eps=EPS, gated=gated, residual=residual)

    def pieced_call(self, plan: linear.Plan, rows: int, size: int) -> Callable[[], None]:
        """The layer of `rows` rows, `size` of them at a time; the next copy of the weight with each call."""
        out_size = self.layer.out_size
        out = torch.empty((rows, out_size), dtype=self._x.dtype, device=self._x.device)
        residual = None if self._residual is None else self._residual[:rows].clone()
        weights = itertools.cycle(self._weights)

        def call() -> None:
            weight = next(weights)
            for begin in range(0, rows, size):
                part = slice(begin, begin + size)
                linear.apply(
                    plan.tiles_for(size),
                    self._x[part],
                    weight,
                    norm_weight=self._norm_weight,
                    eps=EPS,
                    gated=self.layer.kind == "gated",
                    residual=None if residual is None else residual[part],
                    out=out[part],
                )

        return call

    def expected(self, rows: int) -> torch.Tensor:
        """What `first` of the results should be, from fp32."""
        at = first_and_last(rows)
        residual = None if self._residual is None else self._residual[:rows][at].clone()
        return gemv_reference(
            self._x[:rows][at],
            self._weights[0],
            norm_weight=self._norm_weight,
            eps=EPS,
            gated=self.layer.kind == "gated",
            residual=residual,
        ).float()

    def relative_error(self, tiles: linear.Tiles | None, rows: int, expected: torch.Tensor) -> float:
        """Of one call whose outputs and workspaces were NaN before; infinite if any element still is."""
        with poisoned_memory():
            result = self.calls(tiles, rows)[0]()
        if not bool(result.isfinite().all()):
            return float("inf")
        difference = result[first_and_last(rows)].float() - expected
        return float(difference.norm() / expected.norm())


def first_and_last(rows: int) -> torch.Tensor:
    """Indices of the rows that are checked: all of few, both ends of many."""
    return torch.arange(rows) if rows <= 128 else torch.cat((torch.arange(64), torch.arange(rows - 64, rows)))


class poisoned_memory:  # noqa: N801
    """While entered, `torch.empty` hands out NaN, where a type has it and `fill_`."""

    def __enter__(self) -> None:
        self._empty = torch.empty

        def empty(*args: Any, **options: Any) -> torch.Tensor:
            tensor = self._empty(*args, **options)
            has_nan = tensor.dtype.is_floating_point and tensor.element_size() >= 2
            return tensor.fill_(torch.nan) if has_nan else tensor

        torch.empty = empty

    def __exit__(self, *_: object) -> None:
        torch.empty = self._empty


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    """Each layer as shipped, by rows, beside norm kernel, cuBLAS and activation kernel; then the deterministic mode."""
    for layer in layers_of(model):
        rows_of_layer = [rows for rows in ROWS if layer.name != "head" or rows <= HEAD_ROWS]
        operands = Operands(layer, max(rows_of_layer), device)
        for rows in rows_of_layer:
            yield line_of(
                f"linear_{layer.name}",
                f"{rows} rows",
                operands.calls(shipped_tiles(layer, rows, device), rows),
                layer.floor_s(peaks, rows),
                "cuBLAS, own norm and silu",
                operands.calls(None, rows),
            )
        for rows in DETERMINISTIC_ROWS:
            if rows in rows_of_layer:
                calls = operands.calls(DETERMINISTIC_TILES, rows)
                yield line_of(f"deterministic_{layer.name}", f"{rows} rows", calls, layer.floor_s(peaks, rows))


def shipped_tiles(layer: Layer, rows: int, device: torch.device) -> linear.Tiles | None:
    return linear.plan(layer.kind, layer.n_size, layer.k_size, device).tiles_for(rows)
