"""Hand-overs of caches in 8 bits: scales go with the codes, to any split, and to no cache of another type."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from manta.engine.core import EngineCore
from manta.engine.kv_transfer.block_store import HostStore
from manta.engine.kv_transfer.messages import KvShard
from manta.engine.layers.attention import LayerCache
from manta.engine.request import SamplingParams
from manta.kernels.quantized.kv_cache import CacheScales
from tests.engine.kv_transfer.pairs import Pair, alone, start, tiny_model, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0, ignore_eos=True)
PROMPTS = [[20 + (37 * (index + first) ** 2 + 11 * index) % 280 for index in range(first)] for first in (1, 17, 40, 70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def p(model: str) -> Iterator[EngineCore]:
    core = start(model, kv_cache="int8")
    yield core
    core.close()


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    """Tokens of an engine that does everything itself, with such a cache."""
    core = start(model, kv_cache="int8", kv_transfer=False)
    tokens = [tokens_of(deltas) for deltas in alone(core, PROMPTS, GREEDY)]
    core.close()
    return tokens


def random_caches(dtype: torch.dtype, *, heads: int, seed: int) -> list[LayerCache]:
    generator = torch.Generator().manual_seed(seed)
    size = 6, 16, heads, 8

    def side() -> torch.Tensor:
        return torch.randint(0, 120, size, generator=generator, dtype=torch.uint8).view(dtype)

    def scales() -> torch.Tensor:
        return torch.rand(6, heads, 16, generator=generator)

    return [LayerCache(side(), side(), CacheScales(scales(), scales())) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_lie_behind_the_codes_of_the_same_heads(dtype: torch.dtype):
    source, target = (random_caches(dtype, heads=heads, seed=heads) for heads in (3, 2))
    before = [[tensor.clone() for tensor in layer.tensors] for layer in target]
    whole, part = HostStore(source, KvShard((0, 2), (0, 3))), HostStore(target, KvShard((0, 2), (1, 3)))
    buffer = np.zeros(1 << 16, np.uint8)
    size = whole.read(buffer, (1, 2), (1, 3), [4, 2])
    assert size == 2 * whole.block_bytes((1, 3)) == 2 * 2 * 16 * 2 * (8 + 4)
    part.write(buffer[:size], (1, 2), (1, 3), [0, 5])
    for found, sent in zip(target[1].tensors, source[1].tensors, strict=True):
        heads = 1 if found.dtype == torch.float32 else 2
        wanted = sent.view(torch.uint8).narrow(heads, 1, 2)[[4, 2]]
        assert torch.equal(found.view(torch.uint8)[[0, 5]], wanted)
    for layer, old in zip(target, before, strict=True):
        for found, tensor in zip(layer.tensors, old, strict=True):
            kept = slice(None) if layer is target[0] else slice(1, 5)
            assert torch.equal(found.view(torch.uint8)[kept], tensor.view(torch.uint8)[kept])


@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_tokens_are_those_of_one_engine(p: EngineCore, model: str, expected: list[list[int]], tp_size: int):
    p.scheduler.cache.pool.evict_all()
    d = start(model, kv_cache="int8", tensor_parallel_size=tp_size)
    pair = Pair(p, d)
    for index, prompt in enumerate(PROMPTS):
        pair.begin(f"q{index}", prompt, GREEDY)
    pair.run(*pair.tokens)
    assert list(pair.tokens.values()) == expected
    assert (d.snapshot().num_kv_received, d.snapshot().num_kv_recomputed) == (4, 0)
    d.close()


def test_a_cache_of_another_type_is_refused_and_the_prompt_computed_again(
    p: EngineCore, model: str, caplog: pytest.LogCaptureFixture
):
    p.scheduler.cache.pool.evict_all()
    d, plain = start(model), start(model, kv_transfer=False)
    pair = Pair(p, d)
    with caplog.at_level(logging.WARNING):
        pair.begin("other", PROMPTS[2], GREEDY)
        pair.run("other")
    assert pair.tokens["other"] == tokens_of(alone(plain, [PROMPTS[2]], GREEDY)[0])
    assert d.snapshot().num_kv_recomputed == 1
    assert "int8" in caplog.text
    assert "float32" in caplog.text
    for core in (d, plain):
        core.close()
