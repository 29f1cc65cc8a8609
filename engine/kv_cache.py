"""The paged KV cache's memory: bytes a block, how many blocks fit and why, the tensors. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from manta.kernels.quantized.kv_cache import SCALE_DTYPE, CacheScales

from .errors import ConfigError
from .layers.attention import LayerCache
from .model_shape import ModelShape
from .parallel.layout import ShardLayout
from .precision import kv_head_bytes

KvDtype = Literal["auto", "fp8", "int8"]
QUANTIZED_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class CacheLayout:
    """What follows from model and block size. Every layer keeps all tokens (full attention)."""

    num_layers: int
    num_kv_heads: int
    """Layers and heads of one rank."""
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Of the elements; with 8 bits each token and head also has a scale."""

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        block_size: int,
        dtype: torch.dtype,
        layout: ShardLayout | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> CacheLayout:
        """Of a rank that holds `layout` (None: all layers and heads) of a model in `dtype`."""
        layout = ShardLayout.whole(shape) if layout is None else layout
        held = dtype if kv_dtype == "auto" else QUANTIZED_DTYPES[kv_dtype]
        return cls(len(layout.layers), len(layout.kv_heads), shape.head_dim, block_size, held)

    @property
    def is_quantized(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block's tokens over all layers."""
        head_bytes = kv_head_bytes(self.head_dim, self.dtype.itemsize)
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * head_bytes

    def allocate(self, num_blocks: int, device: torch.device) -> list[LayerCache]:
        """Keys and values a layer, [num_blocks, block_size, kv_heads, head_dim], zeroed: memory that was never
        written must hold no NaN. Scales, where there are some, are [num_blocks, kv_heads, block_size]."""
        size = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

        def zeros() -> torch.Tensor:
            return torch.zeros(size, dtype=self.dtype, device=device)

        def scales() -> torch.Tensor:
            size = (num_blocks, self.num_kv_heads, self.block_size)
            return torch.zeros(size, dtype=SCALE_DTYPE, device=device)

        def of_layer() -> LayerCache:
            return LayerCache(zeros(), zeros(), CacheScales(scales(), scales()) if self.is_quantized else None)

        return [of_layer() for _ in range(self.num_layers)]


@dataclass(frozen=True)
class NumBlocks:
    """How many blocks, and the sentence that says why."""

    count: int
    reason: str


def blocks_wanted(count: int) -> NumBlocks:
    """As the configuration says."""
    return NumBlocks(count, f"{count} blocks, as cache.num_blocks says")


def blocks_in_host_memory(layout: CacheLayout, cpu_cache_gib: float) -> NumBlocks:
    """As many as `cpu_cache_gib` holds. Raises ConfigError when that is not even two."""
    count = int(cpu_cache_gib * GIB) // layout.block_bytes
    if count < 2:
        raise ConfigError(
            f"cache.cpu_cache_gib = {cpu_cache_gib}: a block takes {layout.block_bytes / MIB:.1f} MiB, "
            "and the cache needs at least two",
            field="cache.cpu_cache_gib",
        )
    return NumBlocks(count, f"{count} blocks of {layout.block_bytes / MIB:.2f} MiB fit {cpu_cache_gib:g} GiB")


def blocks_in_device_memory(
    layout: CacheLayout,
    *,
    total_bytes: int,
    used_bytes: int,
    reserve_bytes: int,
    memory_fraction: float,
    num_sharing: int = 1,
) -> NumBlocks:
    """As many as `memory_fraction` of the device holds beside what is in use and what steps need at their peak.

    `num_sharing` ranks share the device, each with a cache and steps of its own. Raises ConfigError when that is
    not even two blocks.
    """
    allowed = int(total_bytes * memory_fraction)
    room = (allowed - used_bytes) // num_sharing - reserve_bytes
    count = room // layout.block_bytes
    shares = (
        f"{memory_fraction:.0%} of {total_bytes / GIB:.1f} GiB less {used_bytes / GIB:.1f} GiB in use (weights, "
        f"workspace, CUDA itself, other processes) and {reserve_bytes / GIB:.1f} GiB for a step's activations"
    )
    if num_sharing > 1:
        shares += f", shared by {num_sharing} ranks"
    if count < 2:
        raise ConfigError(
            f"cache.memory_fraction = {memory_fraction}: {shares} leave {room / GIB:.1f} GiB, too little for "
            f"two blocks of {layout.block_bytes / MIB:.1f} MiB: raise it, lower scheduler.max_num_batched_tokens or "
            "free the device",
            field="cache.memory_fraction",
        )
    return NumBlocks(count, f"{count} blocks of {layout.block_bytes / MIB:.2f} MiB fit {room / GIB:.1f} GiB: {shares}")
