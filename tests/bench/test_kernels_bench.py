"""The kernel benchmark without a GPU: it refuses to run, and every call that it would time is a valid one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manta.bench import kernels as bench
from manta.engine.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need a CUDA GPU"):
        bench.run(tmp_path / "kernels.json")
    assert list(tmp_path.iterdir()) == []


def test_every_timed_call_works_on_small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HIDDEN": 64, "INTER": 96, "HEADS": 4, "KV_HEADS": 2, "DIM": 16, "VOCAB": 300, "ROTATE_BYTES": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(bench, name, size)
    monkeypatch.setattr(bench, "PREFILL_LENGTHS", (128,))
    monkeypatch.setattr(bench, "DECODE_SHAPES", ((1, 128), (3, 70)))
    monkeypatch.setattr(bench, "TOKENS", (1, 5))
    monkeypatch.setattr(bench, "ROWS", (1, 4))
    outputs: dict[int, int] = {}

    def call_once(calls: bench.Calls) -> float:
        outputs[len(outputs)] = len([call() for call in calls])
        return 2.0

    monkeypatch.setattr(bench, "time_us", call_once)
    monkeypatch.setattr(bench, "causal_by_cudnn", lambda q, k, v: None)
    peaks = bench.Peaks(1e12, 1e14)
    device = torch.device("cpu")
    lines = [line for measure in bench.SECTIONS for line in measure(peaks, device)]
    assert {line.kernel for line in lines} == {
        "rms_norm_residual", "silu_and_mul", "rope_and_store", "store_kv", "attention_decode", "attention_prefill",
        "argmax", "sample", "sample_top_k50_top_p95", "sample_top_p95",
    }  # fmt: skip
    assert all(count >= 1 for count in outputs.values())
    assert all(line.share_of_floor == line.floor_us / 2.0 for line in lines)
    flat = bench.figures(peaks, lines)
    assert flat["argmax_4_rows_ratio_to_library"] == 1.0
    assert json.loads(json.dumps(flat)) == flat
