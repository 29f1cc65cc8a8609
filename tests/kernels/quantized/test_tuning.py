"""The tuner of quantized layers: kernels run in the interpreter (or on the GPU), times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.bench import kernel_quantized_tuning as tuning
from manta.bench.kernel_linears import Layer, layers_of
from manta.bench.kernel_quantized import SCHEMES, QuantizedOperands, Scheme
from manta.bench.kernel_quantized_candidates import TUNED_ROWS, candidates, fallback
from manta.bench.kernel_timing import LLAMA_8B, Peaks
from manta.kernels.quantized import linear as quantized
from manta.kernels.quantized.eight_bit import SwappedTiles
from manta.kernels.quantized.layout import Format
from manta.kernels.quantized.weight_only import WeightOnlyTiles

PEAKS = Peaks(4.5e12, 8e14)
LAYER = Layer("qkv", "plain", 256, 256)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's time is the narrower, the longer; the library takes 1000 us. Layers are small and copied once."""

    def time_us(calls: list[Callable[[], torch.Tensor]]) -> float:
        tiles = calls[0].args[0]  # pyright: ignore[reportFunctionMemberAccess]
        return 1000.0 if tiles is None else 2000.0 / getattr(tiles, "num_stages", 1)

    monkeypatch.setattr(tuning, "time_us", time_us)
    monkeypatch.setattr(tuning, "TUNED_ROWS", (1, 16))


def test_the_fastest_right_candidate_is_entered(device: torch.device, times: None) -> None:
    scheme = SCHEMES[0]
    entries, lines = tuning.tune_layer(scheme, LAYER, PEAKS, device, {}, {})
    plan = quantized.parse_plan(entries, quantized.KERNELS)
    assert plan.tiles_for(1) == WeightOnlyTiles(64, 8, 128, 4, 4, 1)
    assert [line["rows"] for line in lines] == [1, 16]
    assert lines[0]["us"] == 500.0
    assert lines[0]["library_us"] is None, "few rows do not pay for writing the weight out"
    assert all(line["floor_us"] > 0 for line in lines)


class DonePool:
    """A pool for which everything is compiled already, but what it is told fails."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> DonePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, *args: Any) -> Future[str | None]:
        future: Future[str | None] = Future()
        if getattr(args[-1], "block_n", 64) == 128:
            future.set_result("too large")
        elif getattr(args[-1], "splits", 1) == 2:
            future.set_exception(RuntimeError("the pool broke"))
        else:
            future.set_result(None)
        return future

    def shutdown(self, **_: object) -> None:
        pass


def test_a_run_writes_tables_and_measurements(
    device: torch.device, times: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = replace(LAYER, name="o", kind="add")
    monkeypatch.setattr(tuning, "ProcessPoolExecutor", DonePool)
    monkeypatch.setattr(tuning, "layers_of", lambda _: [LAYER, add])
    monkeypatch.setattr(tuning, "measure_peaks", lambda _: PEAKS)
    monkeypatch.setattr(tuning, "bf16_us", lambda layer, rows, _: dict.fromkeys(rows, (3000.0, 4000.0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    table, json_path = tmp_path / "gpu.json", tmp_path / "result.json"
    result = tuning.run(table, json_path, schemes=SCHEMES[:1], device=device)
    assert list(json.loads(table.read_text())["linear_w4a16"]) == ["plain 256x256 g128", "add 256x256 g128"]
    assert json.loads(json_path.read_text())["lines"] == result["lines"]
    assert len(result["lines"]) == 4
    assert not [tried for line in result["lines"] for tried in line["candidates"] if tried["block_n"] == 128]
    assert all(line["bf16_us"] == 3000.0 for line in result["lines"])


def test_layers_after_the_time_limit_are_left_out_and_said_so(
    device: torch.device, times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ProcessPoolExecutor", DonePool)
    monkeypatch.setattr(tuning, "measure_peaks", lambda _: PEAKS)
    monkeypatch.setattr(tuning, "bf16_us", lambda layer, rows, _: dict.fromkeys(rows, (3000.0, 4000.0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    result = tuning.run(None, None, schemes=SCHEMES[:1], device=device, time_limit_s=-1.0)
    assert result["lines"] == []
    assert len(result["skipped"]) == 4


def test_the_library_stays_where_nothing_is_faster(
    device: torch.device, times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "time_us", lambda calls: 7.0)
    monkeypatch.setattr(QuantizedOperands, "takes_library", lambda *_: True)
    entries, lines = tuning.tune_layer(SCHEMES[0], LAYER, PEAKS, device, {}, {})
    assert entries == [{"kernel": "library"}]
    assert lines[0]["kernel"] == "library"


def test_a_wrong_candidate_gives_place_to_the_one_without_assembly(
    device: torch.device, times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = QuantizedOperands.relative_error

    def wrong(self: QuantizedOperands, tiles: Any, rows: int, expected: torch.Tensor) -> float:
        return 1.0 if getattr(tiles, "inline_ptx", False) else right(self, tiles, rows, expected)

    monkeypatch.setattr(QuantizedOperands, "relative_error", wrong)
    entries, _ = tuning.tune_layer(SCHEMES[0], LAYER, PEAKS, device, {}, {})
    assert all(entry["inline_ptx"] is False for entry in entries)


def test_a_candidate_that_fails_ends_no_other(
    device: torch.device, times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizedOperands, "relative_error", lambda *_: 1 / 0)
    entries, lines = tuning.tune_layer(SCHEMES[0], LAYER, PEAKS, device, {}, {})
    assert entries == [{"kernel": "library"}]
    assert lines[0]["us"] is None


def test_eight_bit_activations_also_try_what_the_weight_alone_took(device: torch.device, times: None) -> None:
    fp8 = next(scheme for scheme in SCHEMES if scheme.name == "linear_fp8")
    deep = WeightOnlyTiles(64, 16, 64, 4, 9)
    entry = tuning.entries_of([deep, deep])
    tables = {"linear_fp8_a16": {quantized.shape_key("plain", 256, 256, None): entry}}
    assert tuning.weight_only_winner(LAYER, 16, tables) == [deep]
    assert tuning.weight_only_winner(LAYER, 16, {}) == []
    times_of = tuning.time_all(
        QuantizedOperands(fp8, LAYER, 1, device, copies=1), 1, [deep, SwappedTiles(64, 16, 128, 4, 3)]
    )
    assert set(times_of) == {deep, SwappedTiles(64, 16, 128, 4, 3)}


def test_results_are_written_beside_what_the_table_holds(tmp_path: Path) -> None:
    table = tmp_path / "gpu.json"
    table.write_text(json.dumps({"linear": {"plain 1x1": []}}))
    tuning.write(table, {"linear_fp8": {"x": []}}, tmp_path / "result.json", {"lines": []})
    assert json.loads(table.read_text()) == {"linear": {"plain 1x1": []}, "linear_fp8": {"x": []}}


def test_the_report_sums_over_layers_and_says_what_is_missing() -> None:
    line = {"scheme": "linear_w4a16", "rows": 1, "kernel": "weight_only", "us": 2.0, "floor_us": 1.0, "bf16_us": 5.0}
    line |= {"torch_us": 6.0, "library_us": None, "product_us": None, "library_product_us": None}
    text = tuning.report({"lines": [line, line], "skipped": ["linear_fp8 o"]})
    row = text.splitlines()[1].split()
    assert row[:6] == ["linear_w4a16", "1", "4.0", "0.50", "2.50", "3.00"]
    assert "linear_fp8 o" in text


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_candidates_are_few_and_fit_the_scheme(scheme: Scheme) -> None:
    for layer in layers_of(LLAMA_8B)[:4]:
        for rows in TUNED_ROWS:
            tried = candidates(scheme, layer, rows)
            assert len(tried) <= 11  # half as many took 40 s for all schemes on an H200
            assert len(set(tried)) == len(tried)
            is_wide = [isinstance(tiles, WeightOnlyTiles) for tiles in tried]
            assert all(is_wide) if scheme.activations is None else not all(is_wide)


def test_the_fallback_has_no_assembly() -> None:
    tiles = WeightOnlyTiles(64, 8, 128, 4, 3)
    assert fallback(tiles) == replace(tiles, inline_ptx=False)
    assert fallback(fallback(tiles)) is None
    assert fallback(SwappedTiles(64, 16, 128, 4, 3)) is None


def test_floors_count_the_bytes_of_the_numbers_and_scales(device: torch.device) -> None:
    operands = QuantizedOperands(Scheme(Format.INT4, None, 128), LAYER, 1, device, copies=1)
    moved = 256 * 256 // 2 + 2 * 2 * 256 + 2 * (256 + 256)
    assert operands.floor_s(PEAKS, 1) == pytest.approx(moved / 4.5e12)
