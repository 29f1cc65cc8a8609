"""`manta bench step-errors`: how far the step-time model is off, with a profile, fitted shares, and by peaks alone.

Reads what was measured before: profiles of `manta profile`, or a report of `manta bench engine`, whose decode and
prefill figures are steps too (a mean decode step of each batch size, and a prompt's chunks up to its first token).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manta.engine.errors import ConfigError
from manta.engine.hardware import Hardware, hardware_named, hardware_of
from manta.engine.model_shape import ModelShape
from manta.engine.step_fit import ErrorTable, errors, fit_shares, held_out_errors
from manta.engine.step_profile import StepPoint, StepProfile, read_profile
from manta.engine.step_time import H200_SHARES, PEAKS, Shares, StepTimeModel

from .report import Report
from .yardsticks import decode_work, prefill_work

FOLDS = 5


@dataclass(frozen=True)
class Measured:
    """Steps of one model on one device."""

    source: str
    shape: ModelShape
    hardware: Hardware
    dtype: str
    points: tuple[StepPoint, ...]
    """All that shares may be fitted to."""
    held_out: tuple[StepPoint, ...]
    """To judge by; none: the points judge each other, fold by fold."""
    profile: StepProfile | None

    def model(self, shares: Shares = PEAKS) -> StepTimeModel:
        """The roofline, corrected by shares."""
        return StepTimeModel(self.shape, self.hardware, dtype=self.dtype, shares=shares)


def read_measured(file: Path, shape: ModelShape | None = None) -> Measured:
    """A profile, or an engine's report; `shape` is what the latter does not say. Raises ConfigError."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if isinstance(tree, dict) and tree.get("bench") == "engine":
        return _from_report(file, tree, shape)
    profile = read_profile(file)
    held_out = tuple(profile.held_out)
    points = (*profile.decode, *profile.prefill)
    return Measured(
        file.name, _shape_of(profile), hardware_named(profile.gpu), profile.dtype, points, held_out, profile
    )


def run(
    files: Sequence[Path],
    *,
    shape: ModelShape | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Errors for each file, as figures named after it. Raises ConfigError."""
    report = Report("step_errors", model={}, workload={"files": [file.name for file in files]})
    for file in files:
        measured = read_measured(file, shape)
        tables = tables_of(measured)
        stem = file.stem.replace("-", "_").replace(".", "_")
        for name, table in tables.items():
            report.figures[f"{stem}_{name}_error_median_percent"] = table.median_percent
            report.figures[f"{stem}_{name}_error_max_percent"] = table.max_percent
        shares = fit_shares(measured.model(), measured.points)
        report.model[file.name] = {"gpu": measured.hardware.name, "dtype": measured.dtype}
        report.details[file.name] = {
            "shares": {name: float(f"{value:.4g}") for name, value in asdict(shares).items()},
            "rows": _rows(tables),
        }
        if console is not None:
            console.print(_shown(measured, tables, shares))
    report.finish(console, json_path)
    return report


def tables_of(measured: Measured) -> dict[str, ErrorTable]:
    """Errors on held-out steps by what predicts them: `peaks`, `fitted` shares and, where there is one, `profile`."""
    judged = measured.held_out or measured.points
    tables = {"peaks": errors(measured.model().predict, judged)}
    if measured.held_out:
        tables["fitted"] = errors(measured.model(fit_shares(measured.model(), measured.points)).predict, judged)
    else:
        tables["fitted"] = held_out_errors(measured.model, measured.points, folds=min(FOLDS, len(measured.points)))
    tables["h200_shares"] = errors(measured.model(H200_SHARES).predict, judged)
    if measured.profile is not None:
        model = StepTimeModel(measured.shape, measured.hardware, dtype=measured.dtype, profile=measured.profile)
        tables["profile"] = errors(model.predict, judged)
    return tables


def _from_report(file: Path, tree: dict[str, Any], shape: ModelShape | None) -> Measured:
    device = str(tree["environment"].get("gpu") or tree["model"].get("device", ""))
    hardware = hardware_of(device)
    if shape is None or hardware is None:
        raise ConfigError(f"{file}: a report of an engine on {device!r} needs --model, and a GPU with known peaks")
    figures, workload = tree["figures"], tree["workload"]
    points = []
    for batch in workload["batch_sizes"]:
        prompt, output = workload["prompt_len"], workload["output_len"]
        if batch == 1:
            prompt, output = workload["single_prompt_len"], workload["single_output_len"]
        [step] = decode_work(batch, prompt, output)
        seconds = figures[f"b{batch}_tpot_ms"] / 1e3
        points.append(StepPoint(0, batch, step.num_decode_context_tokens, 0, seconds))
    for length in workload["prefill_lens"]:  # long ones were several steps, whose overheads are a part of a percent
        [step] = prefill_work(length)
        points.append(StepPoint(length, 0, 0, step.num_prefill_pairs, figures[f"ttft_{length}_ms"] / 1e3))
    return Measured(file.name, shape, hardware, tree["model"]["dtype"], tuple(points), (), None)


def _shape_of(profile: StepProfile) -> ModelShape:
    """As far as step times depend on it. Profiles do not say whether embedding and head are one, which changes nothing
    but how many of their bytes there are: a step reads the head once."""
    sizes: dict[str, Any] = dict(profile.model)
    return ModelShape("profiled", max_position_embeddings=0, dtype=profile.dtype, **sizes)


def _rows(tables: dict[str, ErrorTable]) -> list[dict[str, Any]]:
    by_point: dict[StepPoint, dict[str, Any]] = {}
    for name, table in tables.items():
        for row in table.rows:
            found = by_point.setdefault(row.point, {"step": _said(row.point), "measured_ms": _ms(row.point.seconds)})
            found[f"{name}_ms"] = _ms(row.predicted_s)
    return list(by_point.values())


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")


def _said(point: StepPoint) -> str:
    parts = []
    if point.num_decode_seqs:
        parts.append(f"{point.num_decode_seqs} decodes of {point.num_decode_context_tokens // point.num_decode_seqs}")
    if point.num_prefill_tokens:
        tokens = point.num_prefill_tokens
        start = max(0, round((point.num_prefill_pairs - tokens * (tokens + 1) / 2) / tokens))
        parts.append(f"{tokens} prompt tokens" + (f" behind {start}" if start else ""))
    return " + ".join(parts)


def _shown(measured: Measured, tables: dict[str, ErrorTable], shares: Shares) -> Table:
    title = (
        f"{measured.source}: shares of the peaks: matrices {shares.matrices:.2f}, attention {shares.attention:.2f}, "
        f"context {shares.context:.2f}, {(shares.overhead_s or math.nan) * 1e3:.2f} ms a step"
    )
    shown = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("step")
    for column in ("measured ms", *(f"{name} ms" for name in tables)):
        shown.add_column(column, justify="right")
    for row in _rows(tables):
        shown.add_row(row["step"], f"{row['measured_ms']:.4g}", *(f"{row[f'{name}_ms']:.4g}" for name in tables))
    shown.add_row("median error", "", *(f"{table.median_percent:.1f} %" for table in tables.values()))
    return shown
