"""Quantized weights and caches on a CUDA GPU: graphs, shared prefixes, room, how weights are made. `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.config import EngineConfig
from manta.engine.kv_cache import CacheLayout
from manta.engine.model_runner import BuiltRunner
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.plan import NewSequence, Row
from manta.engine.request import SamplingParams
from manta.engine.weights.load import load_weights
from tests.engine.runners import GREEDY, Driver, build, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LLAMA_8B = Path(__file__).parents[3] / "deploy/configs/llama_3_1_8b/config.json"
HAS_ROOM = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 40 << 30
PROMPTS = [[(31 * i + 7 * row) % 200 + 3 for i in range(5 + 9 * row)] for row in range(11)]
KV_DTYPES = ["fp8", "int8"]
SCHEMES = ["int8", "int4", "fp8", "fp8_tensor", "fp8_block", "w8a8"]
FIRST = SamplingParams(temperature=0.0, logprobs=0, seed=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    save_tiny(folder, intermediate_size=256, **sizes)
    return folder


@pytest.fixture(autouse=True)
def released_memory() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def cuda(model: str | Path, **overrides: Any) -> BuiltRunner:
    small = {"memory_fraction": 0.3, "max_num_batched_tokens": 2048, "max_num_seqs": 32, "num_blocks": 200}
    return build(model, **{"device": "cuda", "dtype": "bfloat16", **small, **overrides})


def first_logprobs(driver: Driver) -> list[float]:
    result = next(result for _, result in driver.results if result.token_ids)
    return [entry.logprob for _, entry in sorted(result.logprobs.items())]


def assert_graphs_change_no_token(model: Path, **overrides: Any) -> None:
    """One row has the same kernels either way; more are padded, so that near ties may fall the other way."""
    found = []
    for cuda_graphs in (False, True):
        built = cuda(model, cuda_graphs=cuda_graphs, **overrides)
        batches = [PROMPTS, PROMPTS[:1], PROMPTS, PROMPTS[:1]]  # twice, so that graphs are replayed
        found.append([Driver(built).generate(batch, 20) for batch in batches])
        built.runner.close()
    assert found[1][:2] == found[1][2:]
    assert found[1][1] == found[0][1]
    flat = [[token for tokens in batches for row in tokens for token in row] for batches in found]
    pairs = list(zip(*flat, strict=True))
    assert sum(x == y for x, y in pairs) > 0.9 * len(pairs)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kv_cache", KV_DTYPES)
def test_graphs_change_no_token_of_an_8_bit_cache(tiny: Path, kv_cache: str, block_size: int):
    assert_graphs_change_no_token(tiny, kv_cache=kv_cache, block_size=block_size)


@pytest.mark.parametrize("quantization", SCHEMES)
def test_graphs_change_no_token_of_quantized_weights(tiny: Path, quantization: str):
    assert_graphs_change_no_token(tiny, quantization=quantization, kv_cache="fp8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache", KV_DTYPES)
def test_log_probabilities_over_an_8_bit_cache_are_those_of_the_cpu(tiny: Path, kv_cache: str, dtype: str):
    found = []
    for device in ("cuda", "cpu"):
        built = cuda(tiny, device=device, dtype=dtype, kv_cache=kv_cache, block_size=16)
        driver = Driver(built)
        driver.generate(PROMPTS, 1, FIRST)
        found.append(first_logprobs(driver))
        built.runner.close()
    assert found[0] == pytest.approx(found[1], abs=0.02 if dtype == "float32" else 0.15)


@pytest.mark.parametrize("kv_cache", KV_DTYPES)
def test_rows_that_share_a_prefix_give_the_tokens_of_rows_that_do_not(
    tiny: Path, kv_cache: str, monkeypatch: pytest.MonkeyPatch
):
    from manta.engine import runner

    prefix = [3 + i % 190 for i in range(192)]
    prompts = [[*prefix, 100 + i] for i in range(6)]
    found = []
    for shares in (False, True):
        monkeypatch.setattr(runner, "pays", lambda *sizes, shares=shares: shares)
        built = cuda(tiny, dtype="float32", block_size=64, kv_cache=kv_cache)
        driver = Driver(built)
        driver.tokens |= {slot: [] for slot in range(6)}
        new = [NewSequence(s, p, len(p), [20, 21, 22, 30 + s], GREEDY, []) for s, p in enumerate(prompts)]
        driver.launch([Row(s, 0, len(p), [], True, False) for s, p in enumerate(prompts)], new)
        for step in range(7):
            driver.launch([Row(s, len(p) + step, 1, [], True, True) for s, p in enumerate(prompts)])
        driver.finish()
        found.append([driver.tokens[slot] for slot in range(6)])
        assert built.runner._graphs is not None
        assert any(kind.shares_prefix for _, kind in built.runner._graphs._steps) == shares
        built.runner.close()
    assert found[0] == found[1]


@pytest.mark.alone
@pytest.mark.parametrize("kv_cache", KV_DTYPES)
def test_as_much_memory_holds_more_blocks(tiny: Path, kv_cache: str):
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    fraction = min(0.2, 0.5 * free_bytes / total_bytes)
    counts, sizes = [], []
    for name in ("auto", kv_cache):
        built = cuda(tiny, num_blocks=None, memory_fraction=fraction, kv_cache=name, block_size=64)
        counts.append(built.num_blocks)
        sizes.append(built.memory_ledger_bytes["kv_cache"])
        built.runner.close()
        torch.cuda.empty_cache()
    assert counts[1] > 1.3 * counts[0]  # other processes may take memory in between
    assert sizes[1] / counts[1] == sizes[0] / counts[0] * (32 + 4) / (2 * 32)


@pytest.mark.skipif(not HAS_ROOM, reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize(("quantization", "held_bytes"), [("fp8", 9.08e9), ("int4", 5.70e9)])
def test_weights_are_quantized_on_the_device_tensor_by_tensor(quantization: str, held_bytes: float):
    """At no time are there two layers in 16 bits, or one in 32."""
    config = EngineConfig.build(str(LLAMA_8B), load_format="dummy", quantization=quantization)
    source, device = resolve_model(config.model), torch.device("cuda")
    shape = load_shape(source)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    parameters = load_weights(source, shape, dtype=torch.bfloat16, device=device, quantization=config.quantization)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert held == pytest.approx(held_bytes, rel=0.02)
    assert peak - held < 2.5e9
    assert not any("no kernel" in note for note in parameters.notes)


@pytest.mark.skipif(not HAS_ROOM, reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_quantized_dummy_of_llama_8b_runs_at_its_full_sizes(quantization: str):
    options: dict[str, Any] = {"quantization": quantization, "kv_cache": "fp8", "load_format": "dummy"}
    built = build(LLAMA_8B, device="cuda", dtype="bfloat16", max_num_seqs=64, num_blocks=600, **options)
    layout = CacheLayout.of(
        load_shape(resolve_model(EngineConfig.build(str(LLAMA_8B), **options).model)),
        block_size=64,
        dtype=torch.bfloat16,
        kv_dtype="fp8",
    )
    assert built.memory_ledger_bytes["kv_cache"] == built.num_blocks * layout.block_bytes
    driver = Driver(built)
    prompts = [[(101 * i + slot) % 120_000 + 10 for i in range(700)] for slot in range(8)]
    tokens = driver.generate(prompts, 8, FIRST)
    assert len({tuple(each) for each in tokens}) == 8
    entries = [entry for _, result in driver.results for entry in result.logprobs.values()]
    assert all(-14.0 < entry.logprob < 0.0 for entry in entries)
    built.runner.close()
