"""Which heads, columns, rows and layers of a model each rank holds. Pure arithmetic; knows no tensors and no groups.

Heads go whole: a rank has whole KV groups or, with fewer KV heads than ranks, a part of one KV head's query heads. So
a rank's query heads always share its KV heads evenly. What cannot be split evenly is split unevenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape

from .place import RankPlace

_TP_FIELD = "parallel.tensor_parallel_size"
_PP_FIELD = "parallel.pipeline_parallel_size"
_INTERMEDIATE_UNITS = (16, 1)
_VOCAB_UNITS = (64, 1)
"""Boundaries between ranks are multiples of the first that gives every rank something: kernels like aligned sizes."""


@dataclass(frozen=True)
class ShardLayout:
    """A rank's part of a model. Ranges count heads, columns of the feed-forward block, token ids and layers."""

    heads: range
    kv_heads: range
    intermediate: range
    vocab: range
    layers: range
    has_embedding: bool
    has_head: bool
    vocab_sizes: tuple[int, ...]
    """How many token ids each rank of the stage has, in order."""
    is_first_part: bool = True
    """Whether this is the first rank of its stage: the one that adds biases to sums over ranks."""

    @classmethod
    def of(cls, shape: ModelShape, place: RankPlace) -> ShardLayout:
        """The part of `place`. Raises ConfigError naming the numbers that clash."""
        check_sizes(shape, tp_size=place.tp_size, pp_size=place.pp_size)
        heads, kv_heads = _head_ranges(shape, place.tp_size)
        vocab = _split_evenly(shape.vocab_size, place.tp_size, _VOCAB_UNITS)
        part = place.tp_rank
        return cls(
            heads=heads[part],
            kv_heads=kv_heads[part],
            intermediate=_intermediate_ranges(shape, heads, kv_heads)[part],
            vocab=vocab[part],
            layers=stage_layers(shape, place.pp_size)[place.pp_rank],
            has_embedding=place.is_first_stage,
            has_head=place.is_last_stage,
            vocab_sizes=tuple(len(ids) for ids in vocab),
            is_first_part=part == 0,
        )

    @classmethod
    def whole(cls, shape: ModelShape) -> ShardLayout:
        """Everything on one rank."""
        return cls.of(shape, RankPlace(0))


def check_sizes(shape: ModelShape, *, tp_size: int, pp_size: int) -> None:
    """Raises ConfigError naming the numbers that clash when the model cannot be split so."""
    group_size, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if rest:
        raise ConfigError(
            f"{shape.num_heads} query heads cannot be divided among {shape.num_kv_heads} KV heads: the model's "
            "config is wrong",
            field="model.model",
        )
    if tp_size > shape.num_heads:
        raise ConfigError(
            f"{_TP_FIELD} = {tp_size}: the model's {shape.num_heads} query heads ({group_size} for each of "
            f"{shape.num_kv_heads} KV heads) cannot be divided among more ranks (GPUs) than heads; ask for at most "
            f"{shape.num_heads}",
            field=_TP_FIELD,
        )
    if tp_size > min(shape.intermediate_size, shape.vocab_size):
        raise ConfigError(
            f"{_TP_FIELD} = {tp_size}: an intermediate size of {shape.intermediate_size} and a vocabulary of "
            f"{shape.vocab_size} cannot be divided among so many ranks (GPUs)",
            field=_TP_FIELD,
        )
    if pp_size > shape.num_layers:
        raise ConfigError(
            f"{_PP_FIELD} = {pp_size}: the model has {shape.num_layers} layers, and every stage needs one; ask for at "
            f"most {shape.num_layers}",
            field=_PP_FIELD,
        )


def stage_layers(shape: ModelShape, pp_size: int) -> list[range]:
    """The layers of each stage, so that the heaviest stage is as light as can be.

    A stage's weight is its parameters; the first also has the embedding and the last the head (tied or not: both
    stages hold it). At least one layer a stage.
    """
    table = shape.vocab_size * shape.hidden_size
    layer = _layer_parameters(shape)
    weights = [layer] * pp_size
    weights[0] += table
    weights[-1] += table
    counts = [1] * pp_size
    for _ in range(shape.num_layers - pp_size):
        lightest = weights.index(min(weights))
        counts[lightest] += 1
        weights[lightest] += layer
    return _ranges(counts)


def shard_parameters(shape: ModelShape, layout: ShardLayout) -> int:
    """Weights that the rank holds, biases left out; a head tied to an embedding on the same rank is counted once."""
    attention = shape.hidden_size * shape.head_dim * 2 * (len(layout.heads) + len(layout.kv_heads))
    layer = attention + 3 * shape.hidden_size * len(layout.intermediate) + 2 * shape.hidden_size
    tables = layout.has_embedding + layout.has_head
    if shape.tie_word_embeddings and tables == 2:
        tables = 1
    final_norm = shape.hidden_size if layout.has_head else 0
    return len(layout.layers) * layer + tables * len(layout.vocab) * shape.hidden_size + final_norm


def _layer_parameters(shape: ModelShape) -> int:
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size


def _head_ranges(shape: ModelShape, tp_size: int) -> tuple[list[range], list[range]]:
    """Query heads and KV heads of each rank."""
    group_size = shape.num_heads // shape.num_kv_heads
    if shape.num_kv_heads >= tp_size:
        kv_heads = _ranges(_shares(shape.num_kv_heads, tp_size))
        return [range(kv.start * group_size, kv.stop * group_size) for kv in kv_heads], kv_heads
    heads, kv_heads = [], []
    for kv_head, num_ranks in enumerate(_shares(tp_size, shape.num_kv_heads)):
        first = kv_head * group_size
        heads += [range(first + part.start, first + part.stop) for part in _ranges(_shares(group_size, num_ranks))]
        kv_heads += [range(kv_head, kv_head + 1)] * num_ranks
    return heads, kv_heads


def _intermediate_ranges(shape: ModelShape, heads: Sequence[range], kv_heads: Sequence[range]) -> list[range]:
    """Columns of the feed-forward block: a rank with fewer heads takes more of them, so that all read as much."""
    attention = [
        2 * shape.head_dim * (len(of_rank) + len(kv_of_rank))
        for of_rank, kv_of_rank in zip(heads, kv_heads, strict=True)
    ]
    size, num_ranks = shape.intermediate_size, len(heads)
    even = (sum(attention) + 3 * size) / num_ranks
    wanted = [(even - own) / 3 for own in attention]
    unit = next(unit for unit in _INTERMEDIATE_UNITS if size >= unit * num_ranks)
    if size % unit:
        unit = 1
    bounds, reached = [0], 0.0
    for rank, share in enumerate(wanted[:-1]):
        reached += share
        lowest = bounds[-1] + unit
        highest = size - unit * (num_ranks - 1 - rank)
        bounds.append(min(max(round(reached / unit) * unit, lowest), highest))
    bounds.append(size)
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def _split_evenly(size: int, num_parts: int, units: Sequence[int]) -> list[range]:
    """Parts whose boundaries are multiples of the first unit that leaves none empty."""
    unit = next(unit for unit in units if -(-size // unit) >= num_parts)
    parts = _ranges(_shares(-(-size // unit), num_parts))
    return [range(part.start * unit, min(part.stop * unit, size)) for part in parts]


def _shares(count: int, num_parts: int) -> list[int]:
    """`count` things in `num_parts` shares that differ by at most one, larger ones first."""
    share, rest = divmod(count, num_parts)
    return [share + 1] * rest + [share] * (num_parts - rest)


def _ranges(counts: Sequence[int]) -> list[range]:
    """Ranges of these lengths, one behind the other."""
    found, first = [], 0
    for count in counts:
        found.append(range(first, first + count))
        first += count
    return found
