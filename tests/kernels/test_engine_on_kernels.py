"""The engine's model over the kernels instead of their references: tiny, in bf16, under the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.model_runner import BuiltRunner
from manta.engine.request import SamplingParams
from manta.engine.weights import load
from tests.engine.runners import Driver, build, padded, save_tiny

PROMPTS = [[5, 17, 99, 3, 44], list(range(20, 61)), [7]]
LOGPROBS = SamplingParams(temperature=0.0, seed=0, logprobs=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    save_tiny(folder, vocab_size=208, intermediate_size=96, num_hidden_layers=2, **sizes)
    return folder


def on_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool = False, kv_cache: str = "auto"
) -> BuiltRunner:
    """As on a GPU: gate and up in turns, decode steps padded."""
    allocate = load.allocate_parameters

    def interleaved(*args: Any, **kwargs: Any) -> Any:
        parameters = allocate(*args, **kwargs)
        parameters.interleaved = True
        return parameters

    monkeypatch.setattr(load, "allocate_parameters", interleaved)
    options = {"deterministic": deterministic, "kv_cache": kv_cache, "cpu_cache_gib": 0.002}
    built = build(folder, dtype="bfloat16", block_size=16, **options)
    return padded(built, deterministic=deterministic)


def first_logprobs(driver: Driver) -> list[tuple[int, float]]:
    result = next(result for _, result in driver.results if result.token_ids)
    return [(entry.token_id, entry.logprob) for _, entry in sorted(result.logprobs.items())]


@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8"])
def test_log_probabilities_are_those_of_the_references(
    tiny: Path, kv_cache: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("tests/engine/test_gpu.py and quant/test_gpu.py have this on a GPU")
    found = Driver(on_kernels(tiny, monkeypatch, kv_cache=kv_cache))
    found.generate(PROMPTS, 3, LOGPROBS)
    monkeypatch.undo()
    expected = Driver(build(tiny, dtype="bfloat16", block_size=16, cpu_cache_gib=0.002, kv_cache=kv_cache))
    expected.generate(PROMPTS, 3, LOGPROBS)
    for (_, found_logprob), (_, logprob) in zip(first_logprobs(found), first_logprobs(expected), strict=True):
        assert found_logprob == pytest.approx(logprob, abs=0.1)


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_deterministic_tokens_are_the_same_alone_among_others_and_in_chunks(
    tiny: Path, kv_cache: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("tests/engine/test_gpu.py has this on a GPU")
    built = on_kernels(tiny, monkeypatch, deterministic=True, kv_cache=kv_cache)
    alone = Driver(built).generate([PROMPTS[1]], 4)[0]
    assert Driver(built).generate(PROMPTS, 4)[1] == alone
    assert Driver(built).generate([PROMPTS[1]], 4, chunk=17)[0] == alone
