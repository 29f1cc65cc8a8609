"""The in-process benchmark on a simulated device, and the form of its report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from manta.bench import engine
from manta.bench.drive import HOST_BOUND_WAIT_S, device_figures, drive, host_figures, idle_percent, start
from manta.bench.report import Report, check_plot, write_json
from manta.bench.workloads import Item, uniform
from manta.deploy.config import load_engine_config
from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.stats import StepStats


def simulated(**overrides: object) -> EngineConfig:
    config = load_engine_config("sim-h200")
    return with_overrides(config, {"device": "sim:2ms", "model.tokenizer": None, **overrides})


def test_a_step_s_time_is_the_device_s() -> None:
    core, figures = start(simulated())
    try:
        result = drive(core, uniform(4, 16, 20, vocab_size=2000, seed=1))
    finally:
        core.close()
    assert figures["startup_total_s"] > 0
    assert [len(record.token_ids) for record in result.records] == [20] * 4
    assert result.decode_step_s is not None
    assert 1.9e-3 < result.decode_step_s < 6e-3  # a busy machine is late, never early
    assert result.duration_s >= 20 * 2e-3
    assert len(result.steps) == 20
    for record in result.records:
        assert record.ttft_s is not None
        assert record.queue_s is not None
        assert 0 <= record.queue_s <= record.ttft_s


def test_items_wait_for_their_arrival_and_queue_time_is_seen() -> None:
    core, _ = start(simulated(device="sim:10ms", max_num_seqs=1))
    try:
        first, second, third = drive(core, [Item([1], 10), Item([2], 10), Item([3], 2, arrival_s=0.5)]).records
    finally:
        core.close()
    assert first.queue_s is not None
    assert second.queue_s is not None
    assert third.queue_s is not None
    assert first.queue_s < 50e-3
    assert second.queue_s >= 9 * 10e-3
    assert third.queue_s < 50e-3
    assert third.due_s - first.due_s == pytest.approx(0.5)


def test_a_request_that_cannot_run_ends_the_measurement() -> None:
    core, _ = start(simulated(max_model_len=64))
    try:
        with pytest.raises(EngineFailed, match="refused"):
            drive(core, [Item(list(range(100)), 10)])
    finally:
        core.close()


def test_every_workload_and_the_report(tmp_path: Path) -> None:
    report = engine.run(
        simulated(max_num_batched_tokens=2048),
        batch_sizes=[1, 3, 10_000],
        prefill_lens=[256, 100_000],
        num_requests=3,
        repeats=1,
        json_path=tmp_path / "deep" / "out.json",
        plot_path=tmp_path / "out.png",
    )
    tree = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert set(tree) == {"bench", "figures", "model", "workload", "environment", "details"}
    assert tree["bench"] == "engine"
    assert all(isinstance(value, float) and math.isfinite(value) for value in tree["figures"].values())
    for name in (
        "decode_batch_1_tpot_ms",
        "decode_batch_3_output_tokens_per_s",
        "decode_batch_3_host_per_step_median_us",
        "prefill_256_ttft_ms",
        "d1_total_tokens_per_s",
        "d1_queue_p95_ms",
        "d2_requests_per_s",
        "d2_steps",
        "prefix_warm_s",
        "startup_total_s",
        "host_memory_peak_gib",
        *("b1_tpot_ms", "b3_tpot_ms", "ttft_256_ms", "d1_s", "d2_s", "prefix_cold_s"),
    ):
        assert tree["figures"][name] > 0, name
    assert not any("_over_" in name for name in tree["figures"])  # a device of 2 ms a step has no yardsticks
    assert 1.9 < report.figures["decode_batch_3_tpot_ms"] < 6
    assert [text.split(":")[0] for text in tree["details"]["skipped"]] == ["decode_batch_10000", "prefill_100000"]
    assert {"command", "commit", "cpu", "python", "torch", "ray"} <= set(tree["environment"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_ready_and_the_floors_of_a_device_with_known_peaks() -> None:
    report = engine.run(simulated(device="sim:h200"), workloads=["startup", "decode"], batch_sizes=[2], repeats=1)
    figures = report.figures
    assert 0 < figures["ready_warm_first_token_s"] < figures["ready_warm_s"]
    assert figures["ready_cold_light_imports_s"] > 0
    (cold,) = report.details["startup"]["cold"]
    assert cold["heavy_modules"] == []
    assert sum(cold["phases_s"].values()) == pytest.approx(cold["total_s"])
    assert next(iter(cold["phases_s"])) == "python"
    assert figures["b2_tpot_ms_over_floor"] > 1
    assert not any(name.endswith("_over_vllm") for name in figures)
    assert [row["name"] for row in report.details["headlines"]] == ["b2_tpot_ms", "ready_cold_s", "ready_warm_s"]


def test_wrong_requests_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="unknown workload 'dcode'"):
        engine.run(EngineConfig(), workloads=["decode", "dcode"])
    with pytest.raises(ConfigError, match="at least 1"):
        engine.run(simulated(), workloads=["decode"], batch_sizes=[0])


def step(wait_s: float = 0.0, device_s: float = 0.0, device_idle_s: float = 0.0) -> StepStats:
    return StepStats(
        step_id=0,
        num_prefill_tokens=0,
        num_decode_seqs=1,
        num_context_tokens=1,
        schedule_s=1e-5,
        launch_s=2e-5,
        wait_s=wait_s,
        update_s=3e-5,
        device_s=device_s,
        device_idle_s=device_idle_s,
    )


def test_exposed_host_time_is_the_device_s_idle_time_without_each_run_s_first() -> None:
    waiting = step(device_s=0.01, device_idle_s=5.0)
    run = [waiting, step(device_s=0.01, device_idle_s=0.001), step(device_s=0.03, device_idle_s=0.003)]
    figures = device_figures([run, [waiting]], "b2_")
    assert figures["b2_device_step_ms"] == pytest.approx(20)
    assert figures["b2_exposed_host_ms"] == pytest.approx(2)
    assert figures["b2_exposed_host_p50_ms"] == pytest.approx(2)
    assert figures["b2_exposed_host_p99_ms"] == pytest.approx(2.98)
    assert device_figures([[step()] * 3], "b2_") == {}


def test_the_idle_share_is_that_of_the_steady_part() -> None:
    ramp = [step(device_s=1.0, device_idle_s=1.0)] * 5
    steady = [step(device_s=0.99, device_idle_s=0.01)] * 80
    assert idle_percent([step(device_s=1.0, device_idle_s=99.0), *ramp, *steady, *ramp]) == pytest.approx(1.0)
    assert idle_percent([step()] * 3) is None


def test_host_bound_steps_are_counted() -> None:
    figures = host_figures([step(0.0), step(HOST_BOUND_WAIT_S * 2), step(1.0), step(2.0)], "x_")
    assert figures["x_host_per_step_median_us"] == pytest.approx(60)
    assert figures["x_host_bound_steps_percent"] == 25
    assert host_figures([], "x_") == {}


def test_a_figure_that_is_no_number_never_reaches_a_file() -> None:
    report = Report("x", model={}, workload={}, figures={"a_ms": math.nan})
    with pytest.raises(AssertionError, match="a_ms"):
        report.tree()


def test_what_cannot_be_written_or_drawn_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the results"):
        write_json(tmp_path / "file" / "x.json", {})
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'manta-llm\[plot\]'"):
        check_plot()


def test_what_is_measured_is_in_the_file_before_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def breaks(bench: engine.EngineBench) -> dict[str, float]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.EngineBench, "prefill", breaks)
    file = tmp_path / "results.json"
    config = EngineConfig.build("smollm2-135m", device="sim:2ms")
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.run(config, workloads=["decode", "prefill"], batch_sizes=[2], repeats=1, json_path=file)
    assert json.loads(file.read_text())["figures"]["decode_batch_2_tpot_ms"] > 1.0


def test_a_quantized_model_is_measured_against_the_model_as_it_is() -> None:
    config = simulated(device="sim:h200", quantization="fp8", kv_cache="fp8")
    sizes: dict[str, Any] = {"batch_sizes": [1], "prefill_lens": [128], "repeats": 1}
    report = engine.run(config, workloads=["decode", "prefill"], **sizes, against="bf16")
    figures = report.figures
    for name in ("b1_tpot_ms", "ttft_128_ms", "kv_tokens", "kv_requests"):
        assert figures[f"{name}_over_bf16"] == pytest.approx(figures[name] / figures[f"bf16_{name}"])
    assert figures["b1_tpot_ms"] < figures["bf16_b1_tpot_ms"]
    assert (report.model["weights"], report.model["kv_cache"]) == ("fp8", "fp8")
    assert (report.details["bf16"]["weights"], report.details["bf16"]["kv_cache"]) == ("auto", "auto")


def test_an_unknown_scheme_to_measure_against_is_refused() -> None:
    with pytest.raises(ConfigError, match="against = 'fp3'"):
        engine.run(simulated(), workloads=["decode"], against="fp3")
