"""A KV cache in 8 bits: its bytes, its error, and a model that reads it, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine import model_runner
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from manta.engine.hardware import hardware_named
from manta.engine.kv_cache import CacheLayout, KvDtype
from manta.engine.model_runner import check_kv_dtype
from manta.engine.startup import start_engine
from manta.engine.stats import EngineInfo
from manta.engine.step_time import StepTimeModel
from manta.kernels.quantized.kv_cache import (
    dequantize_heads,
    gather_quantized_reference,
    quantize_heads,
    store_quantized_reference,
)
from tests.engine.parallel.shards import generate, random_shape
from tests.engine.runners import Driver, build, save_tiny

DTYPES: dict[KvDtype, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SHAPE = random_shape(q=6, kv=3)
PROMPTS = [[5, 6, 7] * 9, [1, 2] * 20]


@pytest.mark.parametrize("name", DTYPES)
def test_a_block_takes_a_byte_an_element_and_a_scale_a_head(name: KvDtype):
    layout = CacheLayout.of(SHAPE, block_size=16, dtype=torch.bfloat16, kv_dtype=name)
    assert layout.block_bytes == 2 * 3 * 16 * 3 * (16 + 4)
    caches = layout.allocate(5, torch.device("cpu"))
    held = sum(tensor.numel() * tensor.element_size() for layer in caches for tensor in layer.tensors)
    assert held == 5 * layout.block_bytes


@pytest.mark.parametrize(("name", "bound"), [("fp8", 0.04), ("int8", 0.01)])
def test_heads_keep_their_values(name: KvDtype, bound: float):
    x = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    found = dequantize_heads(*quantize_heads(x, DTYPES[name]))
    errors = (found - x).norm(dim=-1) / x.norm(dim=-1)
    assert float(errors.max()) < bound
    zeros = torch.zeros(2, 3, 64)
    assert torch.equal(dequantize_heads(*quantize_heads(zeros, DTYPES[name])), zeros)


@pytest.mark.parametrize("name", DTYPES)
def test_what_was_stored_is_read_and_slots_of_minus_one_are_left(name: KvDtype):
    codes = torch.zeros(4, 8, 3, 16, dtype=DTYPES[name])
    scales = torch.zeros(4, 3, 8)
    x = torch.randn(3, 3, 16, generator=torch.Generator().manual_seed(0))
    store_quantized_reference(x, codes, scales, torch.tensor([17, -1, 9]))
    found = gather_quantized_reference(codes, scales, torch.tensor([2, 1]))
    torch.testing.assert_close(found[0, 1], x[0], rtol=0.07, atol=0.05)
    torch.testing.assert_close(found[1, 1], x[2], rtol=0.07, atol=0.05)
    assert int((found != 0).any(-1).sum()) == 6


@pytest.mark.parametrize("name", DTYPES)
def test_ranks_with_quantized_caches_give_the_tokens_of_one(name: str):
    alone = generate(SHAPE, PROMPTS, 12, kv_cache=name)
    plain = generate(SHAPE, PROMPTS, 12)
    assert not torch.equal(alone.logprobs, plain.logprobs)
    torch.testing.assert_close(alone.logprobs[:, 0, 1:], plain.logprobs[:, 0, 1:], rtol=0, atol=0.1)
    for tp_size in (2, 3):
        gang = generate(SHAPE, PROMPTS, 12, tp_size=tp_size, kv_cache=name)
        assert gang.token_ids == alone.token_ids


@pytest.mark.parametrize("name", DTYPES)
def test_chunks_and_batches_change_no_token(tmp_path: Path, name: str):
    save_tiny(tmp_path)
    prompts = [[5, 6, 7] * 9, [1, 2] * 20, [9]]
    whole = Driver(build(tmp_path, kv_cache=name)).generate(prompts, 10)
    chunks = Driver(build(tmp_path, kv_cache=name)).generate(prompts, 10, chunk=7)
    alone = [Driver(build(tmp_path, kv_cache=name)).generate([prompt], 10)[0] for prompt in prompts]
    assert whole == chunks == alone


def test_fp8_on_a_gpu_without_such_numbers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_runner, "capability", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"quantization\.kv_cache = 'fp8'.*A100; use int8"):
        check_kv_dtype(EngineConfig.build("random", kv_cache="fp8"), device)
    check_kv_dtype(EngineConfig.build("random", kv_cache="int8"), device)


def test_a_cache_is_planned_with_the_bytes_that_it_takes():
    for name in DTYPES:
        layout = CacheLayout.of(SHAPE, block_size=64, dtype=torch.bfloat16, kv_dtype=name)
        model = StepTimeModel(SHAPE, hardware_named("h200"), kv_dtype=name)
        assert layout.block_bytes == 64 * model.kv_bytes_per_token


def simulated(folder: Path, **overrides: Any) -> EngineInfo:
    core = start_engine(EngineConfig.build(str(folder), device="sim", dtype="bfloat16", num_blocks=100, **overrides))
    core.close()
    return core.info


def test_a_simulated_device_holds_what_a_quantized_model_holds(tmp_path: Path):
    save_tiny(tmp_path)
    plain, fp8, int4 = (simulated(tmp_path, quantization=name) for name in ("auto", "fp8", "int4"))
    held = [info.memory_ledger_bytes["weights"] for info in (plain, fp8, int4)]
    assert held[0] > held[1] > held[2]
    caches = [simulated(tmp_path, kv_cache=name).memory_ledger_bytes["kv_cache"] for name in ("auto", "int8")]
    assert caches[1] / caches[0] == (8 + 4) / 16


def test_a_simulated_device_refuses_schemes_without_kernels_by_name(tmp_path: Path):
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization\.weights = 'nf4'.*simulated"):
        simulated(tmp_path, quantization="nf4")
