"""How many blocks fit, with literal sizes, and the cache's tensors."""

from __future__ import annotations

import pytest
import torch

from manta.engine.errors import ConfigError
from manta.engine.kv_cache import GIB, CacheLayout, blocks_in_device_memory, blocks_in_host_memory, blocks_wanted

LLAMA_8B = CacheLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16)


def test_a_block_holds_keys_and_values_of_all_layers():
    assert LLAMA_8B.block_bytes == 8 * 1024 * 1024
    assert CacheLayout(30, 3, 64, 16, torch.float32).block_bytes == 2 * 30 * 16 * 3 * 64 * 4


def test_the_tensors_have_the_layout_and_are_zero():
    layout = CacheLayout(2, 3, 8, 16, torch.float16)
    caches = layout.allocate(5, torch.device("cpu"))
    assert len(caches) == 2
    for cache in caches:
        for tensor in cache.tensors:
            assert tensor.shape == (5, 16, 3, 8)
            assert tensor.dtype == torch.float16
            assert not tensor.any()
    assert sum(t.numel() * t.element_size() for cache in caches for t in cache.tensors) == 5 * layout.block_bytes


def test_host_memory_is_what_the_configuration_gives():
    assert blocks_in_host_memory(LLAMA_8B, 1.0).count == 128
    assert "128 blocks of 8.00 MiB fit 1 GiB" in blocks_in_host_memory(LLAMA_8B, 1.0).reason
    with pytest.raises(ConfigError, match=r"cpu_cache_gib = 0\.01") as caught:
        blocks_in_host_memory(LLAMA_8B, 0.01)
    assert caught.value.field == "cache.cpu_cache_gib"


def test_device_memory_is_a_fraction_less_what_is_used_and_reserved():
    found = blocks_in_device_memory(
        LLAMA_8B, total_bytes=100 * GIB, used_bytes=16 * GIB, reserve_bytes=4 * GIB, memory_fraction=0.9
    )
    assert found.count == 70 * 128
    for part in ("90% of 100.0 GiB", "16.0 GiB in use", "4.0 GiB for a step", "8960 blocks"):
        assert part in found.reason
    with pytest.raises(ConfigError, match=r"memory_fraction = 0\.2: 20% of 100\.0 GiB") as caught:
        blocks_in_device_memory(
            LLAMA_8B, total_bytes=100 * GIB, used_bytes=16 * GIB, reserve_bytes=4 * GIB, memory_fraction=0.2
        )
    assert caught.value.field == "cache.memory_fraction"


def test_a_number_of_blocks_is_taken_as_it_is():
    assert blocks_wanted(7).count == 7
