"""Writes the tables of the documents below from the results of the benchmarks: `python -m manta.bench.tables`.

A table stands between `<!-- table NAME -->` and `<!-- /table -->`; text outside is left alone. A result that is not
there leaves a sentence that says which command makes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import ROOT

DOCUMENTS = [ROOT / "docs" / name for name in ("performance.md", "planning.md", "quantization.md")]
RESULTS = ROOT / "bench" / "results" / "h200"

GOALS = {
    "b1_tpot_ms": (4.3, 4.0),
    "b8_tpot_ms": (4.6, 4.2),
    "b32_tpot_ms": (5.2, 4.8),
    "b64_tpot_ms": (6.1, 5.8),
    "b128_tpot_ms": (7.8, 7.3),
    "b256_tpot_ms": (12.6, 11.9),
    "ttft_512_ms": (14, 12),
    "ttft_2048_ms": (50, 46),
    "ttft_8192_ms": (212, 203),
    "ttft_32768_ms": (1300, 1200),
    "d1_s": (16, 15),
    "d2_s": (20, 18),
    "prefix_cold_s": (0.58, 0.50),
    "prefix_warm_s": (0.54, 0.45),
    "ready_cold_s": (25, 15),
    "ready_warm_s": (12, 8),
}
"""Headline figure -> (target, stretch)."""

Tree = Mapping[str, Any]


def headlines(engine: Tree) -> list[list[str]]:
    rows = [["figure", "Manta", "vLLM 0.24", "ratio", "floor", "ratio", "target", "stretch", "met"]]
    for row in engine["details"]["headlines"]:
        name, value = row["name"], row["value"]
        target, stretch = GOALS.get(name, (None, None))
        met = "" if target is None or stretch is None else _verdict(value, target, stretch)
        ratios = [_number(value / known) if known else "" for known in (row["vllm"], row["floor"])]
        known = [_number(row["vllm"]), ratios[0], _number(row["floor"]), ratios[1]]
        rows.append([f"`{name}`", _number(value), *known, _number(target), _number(stretch), met])
    return rows


def exposed(engine: Tree) -> list[list[str]]:
    """Device and host time of decode steps, and what d1 and d2 leave idle."""
    rows = [["workload", "step on the device, ms", "host exposed, mean ms", "p50", "p99", "idle in the steady part, %"]]
    figures = engine["figures"]
    for name in (*(f"b{batch}" for batch in engine["workload"]["batch_sizes"]), "d1", "d2"):
        parts = ("device_step_ms", "exposed_host_ms", "exposed_host_p50_ms", "exposed_host_p99_ms")
        values = [figures.get(f"{name}_{part}") for part in (*parts, "steady_device_idle_percent")]
        if values[0] is not None:
            rows.append([name, *map(_number, values)])
    return rows


def ready(engine: Tree) -> list[list[str]]:
    figures = engine["figures"]
    phases = [found[1] for name in figures if (found := re.fullmatch(r"ready_cold_(\w+)_s", name))]
    rows = [["phase", "cold, s", "warm, s"]]
    for phase in phases:
        pair = (figures[f"ready_{kind}_{phase}_s"] for kind in ("cold", "warm"))
        rows.append([phase.replace("_", " "), *map(_number, pair)])
    return [*rows, ["in all", _number(figures["ready_cold_s"]), _number(figures["ready_warm_s"])]]


def kinds(trace: Tree) -> list[list[str]]:
    """Microseconds a step for each kind of kernel, a column for each traced scene."""
    scenes, figures = trace["details"], trace["figures"]
    names = sorted(
        {row["name"] for scene in scenes.values() for row in scene["kinds"]},
        key=lambda name: -max(_kind_us(scene, name) for scene in scenes.values()),
    )
    rows = [["us a step", *(scene.replace("_", " ") for scene in scenes)]]
    rows += [[name, *(_number(_kind_us(scene, name) or None) for scene in scenes.values())] for name in names]
    for label, figure in (
        ("whole, traced", "wall_us_per_step"),
        ("whole, untraced", "untraced_us_per_step"),
        ("kernels a step", "kernels_per_step"),
        ("idle, %", "idle_percent"),
        ("idle in gaps of at least 5 us, %", "idle_in_long_gaps_percent"),
    ):
        rows.append([label, *(_number(figures.get(f"{scene}_{figure}")) for scene in scenes)])
    return rows


def kernels(trace: Tree, scene: str) -> list[list[str]]:
    rows = [["kernel", "a step", "us a step", "%"]]
    for row in trace["details"][scene]["kernels"][:15]:
        name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."
        rows.append([f"`{name}`", *(_number(row[key]) for key in ("count_per_step", "us_per_step", "percent"))])
    return rows


def policies(schedule: Tree) -> list[list[str]]:
    rows = [["policy", "d2, s", "steps", "longest step with decodes, ms", "TTFT p50, s", "TPOT p50, ms"]]
    for name, one in schedule["details"].items():
        if isinstance(one, Mapping):
            times = (one["longest_decode_step_s"] * 1e3, one["ttft_p50_s"], one["tpot_p50_s"] * 1e3)
            numbers = (one["duration_s"], one["num_steps"], *times)
            rows.append([name.replace("_", " "), *map(_number, numbers)])
    return rows


def quantized_layers(result: Tree) -> list[list[str]]:
    """Sums over a model's four layers for each scheme and number of rows."""
    speeds = ("of the floor", "x our bf16", "x torch's bf16", "x the library", "bare product x the library's")
    rows = [["scheme", "rows", "us", *speeds]]
    lines = result["lines"]
    for scheme, num_rows in dict.fromkeys((line["scheme"], line["rows"]) for line in lines):
        some = [line for line in lines if (line["scheme"], line["rows"]) == (scheme, num_rows)]
        us, products = _sum(some, "us"), (_sum(some, "library_product_us"), _sum(some, "product_us"))
        ratios = [_ratio(_sum(some, key), us) for key in ("floor_us", "bf16_us", "torch_us", "library_us")]
        rows.append([f"`{scheme.removeprefix('linear_')}`", str(num_rows), f"{us:.1f}", *ratios, _ratio(*products)])
    return rows


def beside_bf16(engine: Tree) -> list[list[str]]:
    """What was measured of a model held otherwise, beside the same in bf16 in the same run."""
    figures = engine["figures"]
    names = [
        name.removeprefix("bf16_") for name in figures if re.fullmatch(r"bf16_(b\d+_tpot_ms|ttft_\d+_ms|kv_\w+)", name)
    ]
    rows = [["figure", "quantized", "bf16", "ratio"]]
    for name in names:
        values = (figures[name], figures[f"bf16_{name}"])
        rows.append([f"`{name}`", *map(_number, values), _number(values[0] / values[1])])
    return rows


def step_errors(errors: Tree) -> list[list[str]]:
    """Steps that a profile did not see, and how far each way of predicting them is off."""
    (judged,) = errors["details"].values()
    ways = {"profile_ms": "by the profile", "fitted_ms": "fitted to the profile", "peaks_ms": "peaks alone"}
    rows = [["step", "measured, ms", *ways.values()]]
    for row in judged["rows"]:
        off = [f"{_number(row[way])} ({row[way] / row['measured_ms'] - 1:+.1%})" for way in ways]
        rows.append([row["step"], _number(row["measured_ms"]), *off])
    return rows


ENGINE, TRACE, SCHEDULE = "engine-llama8b-bf16.json", "trace-llama8b-bf16.json", "schedule-llama8b-bf16.json"
LAYERS, FP8, INT4 = "quantized-linears.json", "engine-llama8b-fp8.json", "engine-llama8b-int4.json"
KV_FP8, ERRORS = "engine-llama8b-kv-fp8.json", "step-errors-llama8b-bf16.json"
COMMANDS = {ENGINE: "engine", TRACE: "trace", SCHEDULE: "schedule", LAYERS: "quantized"}
COMMANDS |= {KV_FP8: "engine --set kv_cache=fp8 --against bf16", ERRORS: "step-errors PROFILE"}
COMMANDS |= {FP8: "engine --set quantization=fp8 --against bf16", INT4: "engine --set quantization=int4 --against bf16"}
TABLES: dict[str, tuple[str, Callable[[Tree], list[list[str]]]]] = {
    "headlines": (ENGINE, headlines),
    "exposed": (ENGINE, exposed),
    "ready": (ENGINE, ready),
    "kinds": (TRACE, kinds),
    "decode 64": (TRACE, lambda trace: kernels(trace, "decode_batch_64")),
    "prefill 8192": (TRACE, lambda trace: kernels(trace, "prefill_8192")),
    "policies": (SCHEDULE, policies),
    "layers": (LAYERS, quantized_layers),
    "engine fp8": (FP8, beside_bf16),
    "engine int4": (INT4, beside_bf16),
    "engine kv fp8": (KV_FP8, beside_bf16),
    "step errors": (ERRORS, step_errors),
}
"""Name -> (file in RESULTS, what makes rows of it, the first of which is the header)."""


def fill(text: str, results: Path) -> str:
    """The document with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        file, rows_of = TABLES[match[1]]
        path = results / file
        if path.is_file():
            body = markdown(rows_of(json.loads(path.read_text(encoding="utf-8"))))
        else:
            body = (
                f"Not measured yet: `manta bench {COMMANDS[file]} --json bench/results/h200/{file}` makes this table.\n"
            )
        return f"<!-- table {match[1]} -->\n{body}<!-- /table -->"

    return re.sub(r"<!-- table ([\w ]+) -->\n.*?<!-- /table -->", table, text, flags=re.DOTALL)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the header; all columns but the first stand right."""
    header, *body = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join("| " + " | ".join(row) + " |\n" for row in (header, rule, *body))


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(fill(document.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


def _sum(lines: Sequence[Tree], key: str) -> float | None:
    """None where a part is missing."""
    values = [line[key] for line in lines]
    return None if None in values else sum(values)


def _ratio(over: float | None, under: float | None) -> str:
    return "" if over is None or not under else f"{over / under:.2f}"


def _verdict(value: float, target: float, stretch: float) -> str:
    if value > target:
        return "missed"
    return "stretch" if value <= stretch else "target"


def _kind_us(scene: Tree, name: str) -> float:
    return sum(row["us_per_step"] for row in scene["kinds"] if row["name"] == name)


def _number(value: float | None) -> str:
    """Four significant digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
