"""A benchmark's report: what was measured on what, as table, JSON and PNG. Knows no benchmark.

The JSON holds `bench`, `figures` (name -> number, the unit in the name), `model`, `workload`, `environment` (hardware,
versions, commit, command) and `details`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manta.engine.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "ray", "transformers", "tokenizers", "uvicorn")


@dataclass
class Report:
    """What one run of a benchmark found."""

    bench: str
    model: dict[str, Any]
    workload: dict[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=lambda: environment())

    def tree(self) -> dict[str, Any]:
        """As it is written: figures rounded to six digits; those that are not a number are an error of ours."""
        wrong = [name for name, value in self.figures.items() if not math.isfinite(value)]
        assert not wrong, f"figures that are no numbers: {wrong}"
        return {
            "bench": self.bench,
            "figures": {name: float(f"{value:.6g}") for name, value in self.figures.items()},
            "model": self.model,
            "workload": self.workload,
            "environment": self.environment,
            "details": self.details,
        }

    def finish(self, console: Console | None, json_path: Path | None) -> None:
        """Write the JSON to `json_path`, then print the table to `console`, each if given."""
        if json_path is not None:
            write_json(json_path, self.tree())
        if console is not None:
            console.print(describe(self.environment), highlight=False)
            console.print("model: " + _inline(self.model), highlight=False)
            console.print("workload: " + _inline(self.workload), highlight=False)
            console.print(figures_table(self.bench, self.figures))


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the results to {path}: {error.strerror}") from None


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, command and time of this run."""
    found: dict[str, Any] = {
        "command": shlex.join(["manta", *sys.argv[1:]]),
        "commit": commit(),
        "time_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    torch = sys.modules.get("torch")  # a benchmark that does without it does not load it for this
    if torch is not None:
        found["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            found["gpu"] = properties.name
            found["gpu_memory_bytes"] = properties.total_memory
            found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The commit of the sources, with `+changes` when product files differ from it; None outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_figures(limit_bytes: float | None = None) -> dict[str, float]:
    """Peak memory of this process: GPU memory where torch uses one, else resident memory; and its share of `limit`."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak, limit = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
        figures = {"gpu_memory_peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30}
        name = "gpu_memory_peak_reserved"
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limit = limit_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        figures, name = {}, "host_memory_peak"
    return {**figures, f"{name}_gib": peak / 2**30, f"{name}_percent": 100 * peak / limit}


def describe(found: Mapping[str, Any]) -> str:
    """The environment in two lines."""
    hardware = found.get("gpu") or f"{found['num_cpus']} x {found['cpu']}"
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", *PACKAGES) if found.get(name))
    return f"{hardware}; {versions}\ncommit {found['commit']}; {found['command']}"


def sayer(console: Console | None) -> Callable[[str], None]:
    """Prints a line of progress, where there is somebody to read it."""
    return lambda text: None if console is None else console.print(text, highlight=False)


def figures_table(title: str, figures: Mapping[str, float]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.5g}" if abs(value) < 1000 else f"{value:,.0f}")
    return table


@dataclass(frozen=True)
class CurvePoint:
    """One setting of a sweep: its label, output tokens a second and latencies in ms."""

    label: str
    output_tokens_per_s: float
    ttft_p95_ms: float
    tpot_median_ms: float


def check_plot() -> None:
    """Raise ConfigError when curves cannot be drawn: before a long measurement, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'manta-llm[plot]'", field="plot") from None


def plot_curve(path: Path, points: Sequence[CurvePoint], *, title: str) -> None:
    """Draw throughput against latency as PNG. Raises ConfigError without matplotlib or when it cannot be written."""
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    ordered = sorted(points, key=lambda point: point.output_tokens_per_s)
    throughput = [point.output_tokens_per_s for point in ordered]
    top.set_title(title, fontsize=10)
    for axes, name, values in (
        (top, "TTFT p95, ms", [point.ttft_p95_ms for point in ordered]),
        (bottom, "TPOT median, ms", [point.tpot_median_ms for point in ordered]),
    ):
        axes.plot(throughput, values, marker="o")
        for point, value in zip(ordered, values, strict=True):
            axes.annotate(
                point.label, (point.output_tokens_per_s, value), textcoords="offset points", xytext=(4, 4), fontsize=8
            )
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    bottom.set_xlabel("output tokens/s")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write the plot to {path}: {error.strerror}") from None


def _inline(tree: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in tree.items())
