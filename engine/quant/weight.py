"""What every quantized weight can do, whatever its scheme: be cut, stacked, applied and dequantized. Knows no model.

A weight is that of a linear layer, [out, in]. It is held in its logical order (rows are output features, columns input
features), so that a checkpoint's packing, a rank's slice and a kernel's layout do not know each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch.nn import functional


class RankMaximum(Protocol):
    """The maximum over the ranks that share a layer's input features, in place; called by all of them."""

    def __call__(self, x: torch.Tensor) -> None: ...


class QuantizedWeight(ABC):
    """The weight of a linear layer, or a rank's part of it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(output features, input features)."""

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """[out, in] fp32."""

    @abstractmethod
    def rows(self, index: slice | torch.Tensor) -> QuantizedWeight:
        """Some output features, in the order of `index`."""

    @abstractmethod
    def columns(self, part: range) -> QuantizedWeight:
        """The input features `part`; scales stay those of the whole."""

    def apply(self, x: torch.Tensor, rank_maximum: RankMaximum | None = None) -> torch.Tensor:
        """x W^T [rows, out] for `x` [rows, in] in plain torch.

        `rank_maximum`: where other ranks have the other input features of the same tokens, and `x` is quantized.
        """
        return functional.linear(x, self.dequantize().to(x.dtype))

    @property
    def num_bytes(self) -> int:
        """Of everything that is kept."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield value

    def to(self, device: torch.device) -> Self:
        """A copy on `device`, or itself."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)  # type: ignore[type-var]

    def joined(self, others: Sequence[Any]) -> QuantizedWeight | None:
        """The rows of `others`, of the same class, below these; None where one weight cannot hold them."""
        return None


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Rows on rows: one weight where the parts are alike, else a `StackedWeight`."""
    first, *others = parts
    if not others:
        return first
    joined = first.joined(others) if all(type(other) is type(first) for other in others) else None
    return StackedWeight(tuple(parts)) if joined is None else joined


@dataclass(frozen=True)
class PlainWeight(QuantizedWeight):
    """A weight that a checkpoint leaves as it is, beside quantized ones."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dequantize(self) -> torch.Tensor:
        return self.weight.float()

    def rows(self, index: slice | torch.Tensor) -> PlainWeight:
        return PlainWeight(self.weight[index])

    def columns(self, part: range) -> PlainWeight:
        return PlainWeight(self.weight[:, part.start : part.stop].contiguous())

    def joined(self, others: Sequence[PlainWeight]) -> PlainWeight:
        return PlainWeight(torch.cat([self.weight, *(other.weight for other in others)]))


@dataclass(frozen=True)
class StackedWeight(QuantizedWeight):
    """Parts of different kinds, rows on rows; `order` picks from the stacked rows (None: as they are)."""

    parts: tuple[QuantizedWeight, ...]
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_rows = sum(part.shape[0] for part in self.parts) if self.order is None else len(self.order)
        return num_rows, self.parts[0].shape[1]

    def dequantize(self) -> torch.Tensor:
        return self._ordered(torch.cat([part.dequantize() for part in self.parts]), dim=0)

    def rows(self, index: slice | torch.Tensor) -> StackedWeight:
        device = next(self.parts[0].tensors()).device
        order = torch.arange(self.shape[0], device=device) if self.order is None else self.order
        return StackedWeight(self.parts, order[index])

    def columns(self, part: range) -> StackedWeight:
        return StackedWeight(tuple(one.columns(part) for one in self.parts), self.order)

    def apply(self, x: torch.Tensor, rank_maximum: RankMaximum | None = None) -> torch.Tensor:
        return self._ordered(torch.cat([part.apply(x, rank_maximum) for part in self.parts], dim=1), dim=1)

    def tensors(self) -> Iterator[torch.Tensor]:
        for part in self.parts:
            yield from part.tensors()
        if self.order is not None:
            yield self.order

    def to(self, device: torch.device) -> StackedWeight:
        order = None if self.order is None else self.order.to(device)
        return StackedWeight(tuple(part.to(device) for part in self.parts), order)

    def _ordered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x if self.order is None else x.index_select(dim, self.order)
