"""Copies parts of blocks between a rank's caches and flat buffers, on a CPU or a GPU. Knows no peer and no frame order.

Layers and heads count over the whole model, as in frames; a buffer holds [layers, keys and values, blocks, block_size,
heads, head_dim]. Elements are moved as integers, so that every type of cache is moved alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch

from manta.engine.layers.attention import LayerCache

from .frames import Geometry
from .layout import Span
from .messages import KvShard

A = TypeVar("A", np.ndarray, torch.Tensor)


class BlockStore(ABC, Generic[A]):
    """What stores of both kinds know of their caches; A is the kind of array that they copy from and to."""

    def __init__(self, caches: Sequence[LayerCache], shard: KvShard) -> None:
        """`caches`: one entry for each layer of the shard, [num_blocks, block_size, the shard's heads, head_dim]."""
        keys = caches[0][0]
        self.num_blocks, block_size, num_heads, head_dim = keys.shape
        assert len(caches) == shard.layers[1] - shard.layers[0], "one cache for each layer of the shard"
        assert num_heads == shard.kv_heads[1] - shard.kv_heads[0], "caches hold the heads of the shard"
        self.shard = shard
        self.device = keys.device
        self.geometry = Geometry(block_size, head_dim, str(keys.dtype).removeprefix("torch."))
        self._head_bytes = head_dim * keys.element_size()
        self._caches = [tuple(self._units(side) for side in layer) for layer in caches]

    def block_bytes(self, heads: Span) -> int:
        """Keys and values of one block of one layer."""
        return 2 * self.geometry.block_size * (heads[1] - heads[0]) * self._head_bytes

    def holds(self, layers: Span, heads: Span) -> bool:
        """Whether the rectangle is a part of what this rank has."""
        own_layers, own_heads = self.shard.layers, self.shard.kv_heads
        return (
            own_layers[0] <= layers[0] < layers[1] <= own_layers[1]
            and own_heads[0] <= heads[0] < heads[1] <= own_heads[1]
        )

    @abstractmethod
    def _units(self, side: torch.Tensor) -> A:
        """Keys or values of a layer, [blocks, block_size, heads, units of a head]."""

    def _sides(self, layers: Span, heads: Span) -> Iterator[tuple[int, int, A]]:
        """Layer and side in a buffer, and where the heads of all blocks lie."""
        first_layer, first_head = self.shard.layers[0], self.shard.kv_heads[0]
        for index, layer in enumerate(range(*layers)):
            for side, cache in enumerate(self._caches[layer - first_layer]):
                yield index, side, cache[:, :, heads[0] - first_head : heads[1] - first_head]

    def _shape(self, layers: Span, heads: Span, num_blocks: int) -> tuple[int, ...]:
        """Of a buffer in bytes."""
        num_layers, num_heads = layers[1] - layers[0], heads[1] - heads[0]
        return num_layers, 2, num_blocks, self.geometry.block_size, num_heads, self._head_bytes


class HostStore(BlockStore[np.ndarray]):
    """Of caches in host memory. Any thread may copy blocks that nobody else writes."""

    def read(self, into: np.ndarray, layers: Span, heads: Span, block_ids: Sequence[int]) -> int:
        """Copy blocks to the front of `into` (bytes). How many bytes."""
        shape = self._shape(layers, heads, len(block_ids))
        buffer = into[: prod(shape)].reshape(shape)
        for index, side, cache in self._sides(layers, heads):
            for place, block in enumerate(block_ids):
                buffer[index, side, place] = cache[block]
        return prod(shape)

    def write(self, source: np.ndarray, layers: Span, heads: Span, block_ids: Sequence[int]) -> None:
        """Copy the front of `source` (bytes) into blocks."""
        shape = self._shape(layers, heads, len(block_ids))
        buffer = source[: prod(shape)].reshape(shape)
        for index, side, cache in self._sides(layers, heads):
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
        buffer, size = self._buffer(into, layers, heads, len(block_ids))
        for index, side, cache in self._sides(layers, heads):
            torch.index_select(cache, 0, block_ids, out=buffer[index, side])
        return size

    def write(self, source: torch.Tensor, layers: Span, heads: Span, block_ids: torch.Tensor) -> None:
        """Copy the front of `source` (bytes, on the device) into blocks."""
        buffer, _ = self._buffer(source, layers, heads, len(block_ids))
        for index, side, cache in self._sides(layers, heads):
            cache.index_copy_(0, block_ids, buffer[index, side])

    def _units(self, side: torch.Tensor) -> torch.Tensor:
        return side.view(self._unit)

    @property
    def _unit(self) -> torch.dtype:
        """Wide ones are moved faster."""
        return torch.int64 if self._head_bytes % 8 == 0 else torch.uint8

    def _buffer(self, flat: torch.Tensor, layers: Span, heads: Span, num_blocks: int) -> tuple[torch.Tensor, int]:
        shape = self._shape(layers, heads, num_blocks)
        return flat[: prod(shape)].view(self._unit).view(*shape[:-1], -1), prod(shape)
