"""Which slice of each tensor of a checkpoint a rank holds. Pure arithmetic; knows no files and no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manta.engine.model_shape import ModelShape
from manta.engine.models.family import Parameter
from manta.engine.parallel.layout import ShardLayout


@dataclass(frozen=True)
class TensorSlice:
    """`part` of dimension `dim` of a tensor of shape `full`."""

    full: tuple[int, ...]
    dim: int
    part: range

    @property
    def is_whole(self) -> bool:
        return len(self.part) == self.full[self.dim]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return (*self.full[: self.dim], len(self.part), *self.full[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """What picks it out of the whole tensor."""
        return (*(slice(None) for _ in range(self.dim)), slice(self.part.start, self.part.stop))


SliceOf = Callable[[Parameter], TensorSlice]


def slices(shape: ModelShape, layout: ShardLayout) -> SliceOf:
    """What a rank of `layout` holds of each parameter. Heads come whole, as so many rows of their width."""

    def heads(part: range) -> range:
        return range(part.start * shape.head_dim, part.stop * shape.head_dim)

    hidden = shape.hidden_size
    q_size, kv_size, inter = (
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.intermediate_size,
    )
    rows = {  # output features are split
        "embedding": (shape.vocab_size, layout.vocab),
        "head": (shape.vocab_size, layout.vocab),
        "q": (q_size, heads(layout.heads)),
        "k": (kv_size, heads(layout.kv_heads)),
        "v": (kv_size, heads(layout.kv_heads)),
        "gate": (inter, layout.intermediate),
        "up": (inter, layout.intermediate),
    }
    columns = {"output": (q_size, heads(layout.heads)), "down": (inter, layout.intermediate)}  # input features are

    def slice_of(parameter: Parameter) -> TensorSlice:
        is_bias = parameter.kind == "bias"
        if parameter.part in rows:
            size, part = rows[parameter.part]
            return TensorSlice((size,) if is_bias else (size, hidden), 0, part)
        if parameter.part in columns and not is_bias:
            size, part = columns[parameter.part]
            return TensorSlice((hidden, size), 1, part)
        size = shape.head_dim if parameter.part in ("q_norm", "k_norm") else hidden
        return TensorSlice((size,), 0, range(size))

    return slice_of
