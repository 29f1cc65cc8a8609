"""Copies parts of blocks between a rank's caches and flat buffers, on a CPU or a GPU. Knows no peer and no frame order.

Layers and heads count over the whole model, as in frames; a buffer holds [layers, keys and values, blocks, block_size,
heads, head_dim] and, of caches in 8 bits, behind that their scales [layers, keys and values, blocks, heads,
block_size]. Elements are moved as integers, so that every type of cache is moved alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch

from manta.engine.layers.attention import LayerCache

from .frames import Geometry
from .layout import Span
from .messages import KvShard

A = TypeVar("A", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class _Region(Generic[A]):
    """A range of a buffer in bytes, its shape in bytes, and what it holds: of each layer, keys and values of the wanted
    heads of all blocks."""

    place: slice
    shape: tuple[int, ...]
    layers: list[tuple[A, A]]


class BlockStore(ABC, Generic[A]):
    """What stores of both kinds know of their caches; A is the kind of array that they copy from and to."""

    def __init__(self, caches: Sequence[LayerCache], shard: KvShard) -> None:
        """`caches`: one entry for each layer of the shard, [num_blocks, block_size, the shard's heads, head_dim]."""
        keys, _, scales = caches[0]
        self.num_blocks, block_size, num_heads, head_dim = keys.shape
        assert len(caches) == shard.layers[1] - shard.layers[0], "one cache for each layer of the shard"
        assert num_heads == shard.kv_heads[1] - shard.kv_heads[0], "caches hold the heads of the shard"
        self.shard = shard
        self.device = keys.device
        self.geometry = Geometry(block_size, head_dim, str(keys.dtype).removeprefix("torch."))
        self._head_bytes = head_dim * keys.element_size()
        self._scale_bytes = 0 if scales is None else scales.keys.element_size()
        self._entries = [(self._units(layer.keys), self._units(layer.values)) for layer in caches]
        self._scales = [tuple(map(self._units, layer.scales)) for layer in caches if layer.scales is not None]

    def block_bytes(self, heads: Span) -> int:
        """Keys and values of one block of one layer."""
        return 2 * self.geometry.block_size * (heads[1] - heads[0]) * (self._head_bytes + self._scale_bytes)

    def holds(self, layers: Span, heads: Span) -> bool:
        """Whether the rectangle is a part of what this rank has."""
        own_layers, own_heads = self.shard.layers, self.shard.kv_heads
        return (
            own_layers[0] <= layers[0] < layers[1] <= own_layers[1]
            and own_heads[0] <= heads[0] < heads[1] <= own_heads[1]
        )

    @abstractmethod
    def _units(self, side: torch.Tensor) -> A:
        """The same memory with integers as elements; the last dimension holds a head's, or a block's scales."""

    def _regions(self, layers: Span, heads: Span, num_blocks: int) -> Iterator[_Region[A]]:
        """What a buffer of `num_blocks` blocks is made of, front to end."""
        first_layer, first_head = self.shard.layers[0], self.shard.kv_heads[0]
        held = slice(layers[0] - first_layer, layers[1] - first_layer)
        wanted = slice(heads[0] - first_head, heads[1] - first_head)
        num_heads, block_size = heads[1] - heads[0], self.geometry.block_size
        lead = layers[1] - layers[0], 2, num_blocks
        shape = *lead, block_size, num_heads, self._head_bytes
        end = prod(shape)
        entries = [(keys[:, :, wanted], values[:, :, wanted]) for keys, values in self._entries[held]]
        yield _Region(slice(0, end), shape, entries)
        if self._scale_bytes:
            shape = *lead, num_heads, block_size * self._scale_bytes
            scales = [(keys[:, wanted], values[:, wanted]) for keys, values in self._scales[held]]
            yield _Region(slice(end, end + prod(shape)), shape, scales)


class HostStore(BlockStore[np.ndarray]):
    """Of caches in host memory. Any thread may copy blocks that nobody else writes."""

    def read(self, into: np.ndarray, layers: Span, heads: Span, block_ids: Sequence[int]) -> int:
        """Copy blocks to the front of `into` (bytes). How many bytes."""
        size = 0
        for region in self._regions(layers, heads, len(block_ids)):
            buffer = into[region.place].reshape(region.shape)
            for index, sides in enumerate(region.layers):
                for side, cache in enumerate(sides):
                    for place, block in enumerate(block_ids):
                        buffer[index, side, place] = cache[block]
            size = region.place.stop
        return size

    def write(self, source: np.ndarray, layers: Span, heads: Span, block_ids: Sequence[int]) -> None:
        """Copy the front of `source` (bytes) into blocks."""
        for region in self._regions(layers, heads, len(block_ids)):
            buffer = source[region.place].reshape(region.shape)
            for index, sides in enumerate(region.layers):
                for side, cache in enumerate(sides):
                    for place, block in enumerate(block_ids):
                        cache[block] = buffer[index, side, place]

    def _units(self, side: torch.Tensor) -> np.ndarray:
        return side.view(torch.uint8).numpy()


class DeviceStore(BlockStore[torch.Tensor]):
    """Of caches on a GPU: copies are put on the current stream of the calling thread, which is in inference mode."""

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Block ids as `read` and `write` take them, there once the current stream comes to it."""
        return torch.tensor(block_ids, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)

    def read(self, into: torch.Tensor, layers: Span, heads: Span, block_ids: torch.Tensor) -> int:
        """Copy blocks to the front of `into` (bytes, on the device). How many bytes."""
        size = 0
        for region in self._regions(layers, heads, len(block_ids)):
            buffer = self._buffer(into, region)
            for index, sides in enumerate(region.layers):
                for side, cache in enumerate(sides):
                    torch.index_select(cache, 0, block_ids, out=buffer[index, side])
            size = region.place.stop
        return size

    def write(self, source: torch.Tensor, layers: Span, heads: Span, block_ids: torch.Tensor) -> None:
        """Copy the front of `source` (bytes, on the device) into blocks."""
        for region in self._regions(layers, heads, len(block_ids)):
            buffer = self._buffer(source, region)
            for index, sides in enumerate(region.layers):
                for side, cache in enumerate(sides):
                    cache.index_copy_(0, block_ids, buffer[index, side])

    def _units(self, side: torch.Tensor) -> torch.Tensor:
        return side.view(_unit_of(side.shape[-1] * side.element_size()))

    def _buffer(self, flat: torch.Tensor, region: _Region[torch.Tensor]) -> torch.Tensor:
        return flat[region.place].view(_unit_of(region.shape[-1])).view(*region.shape[:-1], -1)


def _unit_of(num_bytes: int) -> torch.dtype:
    """Wide ones are moved faster."""
    return torch.int64 if num_bytes % 8 == 0 else torch.uint8
