"""Error tables from profiles and from an engine's report."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from manta.bench.step_errors import read_measured, run, tables_of
from manta.engine.errors import ConfigError
from manta.engine.step_profile import StepPoint, StepProfile, model_sizes
from manta.engine.step_time import Shares, StepShape, StepTimeModel, hardware_named
from tests.engine.test_step_time import LLAMA_8B

REPORT = Path(__file__).parents[2] / "bench/results/h200/engine-llama8b-bf16.json"


def profile_file(folder: Path) -> Path:
    """Of a device that reaches 0.8 of its peaks in matrices, 0.6 in attention."""
    device = StepTimeModel(LLAMA_8B, hardware_named("h200"), shares=Shares(0.8, 0.6, 0.7, 5e-4))

    def point(tokens: int, seqs: int, context: int) -> StepPoint:
        pairs = tokens * (tokens + 1) // 2
        return StepPoint(
            tokens, seqs, seqs * context, pairs, device.predict(StepShape(tokens, seqs, seqs * context, pairs))
        )

    profile = StepProfile(
        gpu="h200",
        model=model_sizes(LLAMA_8B),
        dtype="bfloat16",
        decode=[point(0, seqs, context) for seqs in (1, 16, 256) for context in (128, 2048)],
        prefill=[point(tokens, 0, 0) for tokens in (128, 1024, 8192)],
        held_out=[point(0, 100, 700), point(3000, 0, 0), point(500, 64, 500)],
    )
    file = folder / "llama.json"
    file.write_bytes(msgspec.json.encode(profile))
    return file


def test_a_profile_predicts_its_held_out_steps_better_than_the_peaks(tmp_path: Path) -> None:
    tables = tables_of(read_measured(profile_file(tmp_path)))
    assert set(tables) == {"peaks", "fitted", "h200_shares", "profile"}
    assert tables["profile"].median_percent < 10.0 < tables["peaks"].median_percent
    assert tables["fitted"].median_percent < 1.0


def test_the_table_s_figures_and_rows_are_written(tmp_path: Path) -> None:
    report = run([profile_file(tmp_path)], json_path=tmp_path / "errors.json")
    written = json.loads((tmp_path / "errors.json").read_text())
    assert written["figures"]["llama_profile_error_median_percent"] == pytest.approx(
        report.figures["llama_profile_error_median_percent"], rel=1e-5
    )
    assert [row["step"] for row in written["details"]["llama.json"]["rows"]] == [
        "100 decodes of 700",
        "3000 prompt tokens",
        "64 decodes of 500 + 500 prompt tokens",
    ]


def test_an_engine_s_report_needs_the_model_it_is_about() -> None:
    with pytest.raises(ConfigError, match="needs --model"):
        read_measured(REPORT)


def test_a_file_that_is_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "else.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no step-time profile"):
        read_measured(tmp_path / "else.json")
