"""The kernel benchmark without a GPU: it refuses to run, and every call that it would time is a valid one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manta.bench import kernel_decode, kernel_prefill, kernel_timing, kernels
from manta.bench.kernel_timing import Calls, ModelShape, Peaks
from manta.engine.errors import ConfigError

SMALL = ModelShape("8b", hidden=64, inter=96, heads=4, kv_heads=2, dim=16, vocab=300)
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need a CUDA GPU"):
        kernels.run(tmp_path / "kernels.json")
    with pytest.raises(ConfigError, match="need a CUDA GPU"):
        kernels.tune(list(kernels.TUNERS), tmp_path / "tuned.json")
    assert list(tmp_path.iterdir()) == []


def test_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no section 'decoding': choose from elementwise"):
        kernels.run(sections=["decode", "decoding"])
    with pytest.raises(ConfigError, match="no operation 'decode'"):
        kernels.tune(["decode"], tmp_path / "tuned.json")


def test_tuning_keeps_other_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned" / "gpu.json"
    monkeypatch.setattr(kernels, "_device", lambda: CPU)
    monkeypatch.setattr(kernels, "measure_peaks", lambda device: Peaks(1e12, 1e14))
    monkeypatch.setattr(kernels, "TUNERS", {"one": lambda *_: {"a": 1}, "two": lambda *_: {"b": 2}})
    assert kernels.tune(["one"], path) == {"one": {"a": 1}}
    assert kernels.tune(["two"], path) == {"one": {"a": 1}, "two": {"b": 2}} == json.loads(path.read_text())


@pytest.fixture
def num_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls are made once and take 2 us; how many there were in each timing."""
    counts: list[int] = []

    def call_once(calls: Calls) -> float:
        counts.append(len([call() for call in calls]))
        return 2.0

    monkeypatch.setattr(kernel_timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(kernel_timing, "time_us", call_once)
    return counts


def test_every_timed_call_works_on_small_shapes(num_calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = kernel_prefill.Prompts("128 tokens", 128, 128), kernel_prefill.Prompts("chunk", 16, 40, 2)
    monkeypatch.setattr(kernel_prefill, "WORK", prompts)
    monkeypatch.setattr(kernel_prefill, "SINGLE_QUERIES", kernel_prefill.Prompts("single", 1, 70, 3))
    monkeypatch.setattr(kernel_decode, "SHAPES", ((1, 128), (3, 70)))
    monkeypatch.setattr(kernels, "TOKENS", (1, 5))
    monkeypatch.setattr(kernels, "ROWS", (1, 4))
    monkeypatch.setattr(kernel_prefill, "causal_by_cudnn", lambda q, k, v: None)
    peaks = Peaks(1e12, 1e14)
    sections = [kernels.SECTIONS[name] for name in ("elementwise", "decode", "prefill", "sampling")]
    lines = [line for measure in sections for line in measure(peaks, CPU, SMALL)]
    assert {line.kernel for line in lines} == {
        "rms_norm_residual", "silu_and_mul", "rope_and_store", "store_kv", "attention_decode", "attention_prefill",
        "deterministic_attention", "argmax", "sample", "sample_top_k50_top_p95", "sample_top_p95",
    }  # fmt: skip
    assert min(num_calls) >= 1
    assert all(line.share_of_floor == line.floor_us / 2.0 for line in lines)
    assert all(line.kernel in kernel_timing.row_of(line) for line in lines)
    flat = kernels.figures(peaks, {"8b": lines, "70b_tp8": lines})
    assert flat["argmax_4_rows_ratio_to_library"] == flat["70b_tp8_argmax_4_rows_ratio_to_library"] == 1.0
    assert json.loads(json.dumps(flat)) == flat
