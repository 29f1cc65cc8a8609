"""Which rank sends which layers and KV heads to which rank of another engine. Pure arithmetic; knows no blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manta.engine.errors import ConfigError

from .messages import KvShard

Span = tuple[int, int]
"""Half-open."""


class Part(NamedTuple):
    """A rectangle of layers and KV heads, counted over the whole model, that one source rank sends one target rank."""

    source: int
    target: int
    layers: Span
    kv_heads: Span

    @property
    def size(self) -> int:
        """Layers times heads."""
        return (self.layers[1] - self.layers[0]) * (self.kv_heads[1] - self.kv_heads[0])


def parts_between(sources: Sequence[KvShard], targets: Sequence[KvShard]) -> list[Part]:
    """What goes where so that every target gets each layer of each of its heads from exactly one source.

    Where several sources hold a head, the one that has the least to send takes it; all ranks come to the same result.
    Raises ConfigError when a target holds what no source has: the two do not hold the same model.
    """
    to_send = [0] * len(sources)
    found: list[Part] = []
    for target, wanted in enumerate(targets):
        layer_cuts = _cuts(wanted.layers, (source.layers for source in sources))
        head_cuts = _cuts(wanted.kv_heads, (source.kv_heads for source in sources))
        for layers in itertools.pairwise(layer_cuts):
            row: list[Part] = []
            for heads in itertools.pairwise(head_cuts):
                source = _lightest_holder(sources, layers, heads, to_send)
                part = Part(source, target, layers, heads)
                to_send[source] += part.size
                if row and row[-1].source == source:
                    row[-1] = row[-1]._replace(kv_heads=(row[-1].kv_heads[0], heads[1]))
                else:
                    row.append(part)
            found += row
    return found


def _cuts(span: Span, others: Iterable[Span]) -> list[int]:
    """The ends of `span` and all ends of others inside it, in order."""
    inside = {end for other in others for end in other if span[0] < end < span[1]}
    return sorted({*span, *inside})


def _lightest_holder(sources: Sequence[KvShard], layers: Span, heads: Span, to_send: Sequence[int]) -> int:
    holders = [
        rank for rank, held in enumerate(sources) if _contains(held.layers, layers) and _contains(held.kv_heads, heads)
    ]
    if not holders:
        raise ConfigError(
            f"no rank that sends has layers {layers[0]} to {layers[1] - 1} of KV heads {heads[0]} to {heads[1] - 1}: "
            "both pools must serve the same model",
            field="pools",
        )
    return min(holders, key=lambda rank: (to_send[rank], rank))


def _contains(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
