"""The kernel benchmark without a GPU: it refuses to run, and every call that it would time is a valid one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manta.bench import (
    kernel_decode,
    kernel_decode_tuning,
    kernel_prefill,
    kernel_timing,
    kernels,
)
from manta.bench.kernel_timing import Calls, ModelShape, Peaks
from manta.deploy import bench_engine_cli
from manta.engine.errors import ConfigError
from manta.kernels import decode_schedule

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


def test_tuning_ranks_keeps_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"linear": {"plain 1x2": [1]}}))
    monkeypatch.setattr(kernels, "_device", lambda: CPU)
    monkeypatch.setattr(kernels, "measure_peaks", lambda device: Peaks(1e12, 1e14))
    monkeypatch.setattr(kernels, "TUNERS", {"linear_ranks": lambda *_: {"plain 3x4": [2]}})
    assert kernels.tune(["linear_ranks"], path) == {"linear": {"plain 1x2": [1], "plain 3x4": [2]}}


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
    monkeypatch.setattr(kernel_decode, "MIXED", (3,))
    monkeypatch.setattr(kernel_decode, "SHARED", ((3, 2, 64),))
    monkeypatch.setattr(kernels, "TOKENS", (1, 5))
    monkeypatch.setattr(kernels, "ROWS", (1, 4))
    monkeypatch.setattr(kernel_prefill, "causal_by_cudnn", lambda q, k, v: None)
    peaks = Peaks(1e12, 1e14)
    sections = [kernels.SECTIONS[name] for name in ("elementwise", "decode", "prefill", "sampling")]
    lines = [line for measure in sections for line in measure(peaks, CPU, SMALL)]
    assert {line.kernel for line in lines} == {
        "rms_norm_residual", "silu_and_mul", "rope_and_store", "store_kv", "attention_decode", "attention_prefill",
        "attention_decode_fp8", "attention_shared_prefix",
        "deterministic_attention", "argmax", "sample", "sample_top_k50_top_p95", "sample_top_p95",
    }  # fmt: skip
    assert min(num_calls) >= 1
    assert all(line.share_of_floor == line.floor_us / 2.0 for line in lines)
    assert all(line.kernel in kernel_timing.row_of(line) for line in lines)
    flat = kernels.figures(peaks, {"8b": lines, "70b_tp8": lines})
    assert flat["argmax_4_rows_ratio_to_library"] == flat["70b_tp8_argmax_4_rows_ratio_to_library"] == 1.0
    assert json.loads(json.dumps(flat)) == flat


def test_mixed_lengths_are_fixed_and_spread() -> None:
    lengths = kernel_decode.mixed_lengths(256)
    assert lengths == kernel_decode.mixed_lengths(256)
    assert (min(lengths), max(lengths), len(lengths)) == (30, 3000, 256)
    assert lengths != sorted(lengths)


def test_shared_batch_shares_blocks_and_no_others() -> None:
    batch = kernel_decode.make_batch(SMALL, [70, 200, 210], CPU, num_members=2, num_shared=128, rotations=2)
    first, second = batch.block_tables
    assert first[1, :2].tolist() == first[2, :2].tolist()
    used = [*first[0, :2].tolist(), *first[1, :4].tolist(), *first[2, 2:4].tolist()]
    assert len(set(used)) == len(used) == 8
    assert set(used).isdisjoint(second[1, :4].tolist())
    assert batch.read_bytes == (70 + 200 + 82) * SMALL.token_bytes


def test_batches_over_codes_are_attended_to_like_others(num_calls: list[int]) -> None:
    for codes in (torch.float8_e4m3fn, torch.int8):
        batch = kernel_decode.make_batch(SMALL, [70, 200], CPU, rotations=1, codes=codes)
        assert batch.read_bytes == 270 * (SMALL.token_bytes // 2 + 2 * SMALL.kv_heads * 4)
        out = batch.calls()[0]()
        assert out.isfinite().all()
        assert 0.05 < float(out.std()) < 1.0
    tuned = kernel_decode_tuning.shape_of(SMALL, torch.int8)
    assert (tuned.operation, tuned.has_codes) == ("attention_decode_codes", True)


def test_decode_tuning_finds_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times depend on the configuration in force; the table says which was best up to which number of rows."""
    shape = kernel_decode_tuning.shape_of(SMALL)
    monkeypatch.setattr(kernel_timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(kernel_decode_tuning, "MODELS", (SMALL,))
    monkeypatch.setattr(kernel_decode_tuning, "cases", lambda: {1: [[70]], 4: [[64] * 4, [1, 2, 3, 300]]})
    monkeypatch.setattr(kernel_decode_tuning, "compile_ahead", lambda *_: None)

    def time_us(calls: Calls) -> float:
        for call in calls:
            call()
        config = decode_schedule.decode_config(len(calls[0].args[0]), shape, CPU)  # pyright: ignore
        return 50.0 + abs(config.percent - 200) + 10 * config.swapped + 3 * config.num_stages + config.merges_apart

    monkeypatch.setattr(kernel_decode_tuning, "time_us", time_us)
    usual = decode_schedule.decode_config
    found = kernel_decode_tuning.tune(Peaks(1e12, 1e14), CPU)
    assert decode_schedule.decode_config is usual
    (entries,) = found.values()
    assert list(found) == [shape.key]
    assert [entry.get("rows") for entry in entries] == [1, None]
    for entry in entries:
        config = decode_schedule.config_of(entry)
        assert (config.percent, config.swapped, config.num_stages, config.merges_apart) == (200, False, 2, False)
    assert len(entries[1]["shares"]) == 2
    assert json.loads(json.dumps(found)) == found


def test_shared_prefix_tuning_finds_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(kernel_decode_tuning, "MODELS", (SMALL,))
    monkeypatch.setattr(kernel_decode_tuning, "SHARED", ((3, 128), (2, 192)))
    shape = kernel_decode_tuning.shape_of(SMALL)
    monkeypatch.setattr(
        kernel_decode_tuning, "time_us", lambda calls: 1.0 + abs(decode_schedule.prefix_tiles(shape, CPU).tile - 128)
    )
    found = kernel_decode_tuning.tune_shared_prefix(Peaks(1e12, 1e14), CPU)
    assert found == {shape.key: {"block_m": 64, "tile": 128, "num_warps": 4, "num_stages": 3}}


def test_a_section_that_fails_leaves_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> Iterator[kernel_timing.Line]:
        raise RuntimeError("an illegal memory access")
        yield

    line = kernel_timing.Line("norm", "1 rows", 2.0, 1.0, 0.5, None, None, None)
    monkeypatch.setattr(kernels, "SECTIONS", {"good": lambda *args: iter([line]), "bad": fails})
    monkeypatch.setattr(kernels, "_device", lambda: CPU)
    monkeypatch.setattr(kernels, "measure_peaks", lambda device: Peaks(1e12, 1e14))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
    path = tmp_path / "kernels.json"
    with pytest.raises(RuntimeError, match="illegal"):
        kernels.run(path)
    assert json.loads(path.read_text())["figures"]["norm_1_rows_us"] == 2.0


def test_the_help_names_every_section_and_operation() -> None:
    text = "".join(inspect.getsource(bench_engine_cli.kernels_command).split())
    assert not [name for name in kernels.SECTIONS if name not in text]
    assert not [name for name in kernels.TUNERS if name not in text and not name.startswith(("linear_w", "linear_fp8"))]
