"""How a deployment scaled over a while, read from its Prometheus and drawn: load, replicas, latency, decisions.

Knows no server and no autoscaler, only the metrics of the table; what it read is kept as JSON, from which it can be
drawn again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from manta.deploy.observability.queries import now, quantile, rate, with_values
from manta.engine.errors import ConfigError, Unavailable

from .report import check_plot

WINDOW = "15s"
"""Of rates: some scrapes of a Prometheus that asks every second or five."""
MOST_POINTS = 2000


@dataclass(frozen=True)
class Line:
    """One query over time; each series of it gets the legend with its labels filled in."""

    panel: str
    legend: str
    expression: str


LINES = (
    Line("requests a second", "finished", rate("manta_requests_total")),
    Line("requests a second", "arrivals (autoscaler)", now("manta_scaling_arrivals_requests_per_second")),
    Line("requests a second", "forecast", now("manta_scaling_forecast_requests_per_second")),
    Line("replicas", "{pool} desired", now("manta_scaling_desired_replicas", "pool")),
    Line("replicas", "{pool} {state}", now("manta_scaling_replicas", "pool", "state")),
    Line("sequences", "running", now("manta_requests_running")),
    Line("sequences", "waiting in replicas", now("manta_requests_waiting")),
    Line("sequences", "waiting in edges", now("manta_edge_requests_waiting")),
    Line("seconds", "TTFT p50", quantile(0.5, "manta_time_to_first_token_seconds")),
    Line("seconds", "TTFT p95", quantile(0.95, "manta_time_to_first_token_seconds")),
    Line("seconds", "TTFT limit", now("manta_slo_limit_seconds", match='limit="ttft"')),
    Line("outcomes a second", "{outcome}", rate("manta_slo_requests_total", "outcome")),
)
DECISIONS = Line("", "{pool}: {reason}", now("manta_scaling_decisions_total", "pool", "reason"))


@dataclass(frozen=True)
class Series:
    """One line: seconds of the calendar, and values."""

    panel: str
    legend: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Course:
    """What happened between two moments."""

    begin_s: float
    end_s: float
    series: tuple[Series, ...]
    decisions: tuple[tuple[float, str], ...]
    """When they were first seen, and pool with reason."""

    def tree(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "begin_s": self.begin_s,
            "end_s": self.end_s,
            "series": [
                {"panel": one.panel, "legend": one.legend, "points": [list(point) for point in one.points]}
                for one in self.series
            ],
            "decisions": [list(one) for one in self.decisions],
        }

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Course:
        """Inverse of `tree`. Raises KeyError, TypeError or ValueError for what is none."""
        series = tuple(
            Series(one["panel"], one["legend"], tuple((float(at), float(value)) for at, value in one["points"]))
            for one in tree["series"]
        )
        decisions = tuple((float(at), str(text)) for at, text in tree["decisions"])
        return cls(float(tree["begin_s"]), float(tree["end_s"]), series, decisions)


def read_course(
    url: str, *, begin_s: float, end_s: float, job: str = "manta", transport: httpx.BaseTransport | None = None
) -> Course:
    """From a Prometheus, between two moments of the calendar. Raises ConfigError for one that has nothing of the
    deployment, Unavailable for one that does not answer."""
    step_s = max(1.0, math.ceil((end_s - begin_s) / MOST_POINTS))
    client = httpx.Client(base_url=url, timeout=30.0, trust_env=False, transport=transport)
    with client:
        series = [one for line in LINES for one in _range(client, line, job, begin_s, end_s, step_s)]
        steps = _range(client, DECISIONS, job, begin_s, end_s, 1.0 if end_s - begin_s < MOST_POINTS else step_s)
    if not series:
        raise ConfigError(
            f"the Prometheus at {url} knows nothing of the job {job!r} in that time; name another with --job, or look "
            "further back with --minutes"
        )
    return Course(begin_s, end_s, tuple(series), tuple(sorted(_rises(steps))))


def load_course(file: Path) -> Course:
    """What was kept. Raises ConfigError."""
    try:
        return Course.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not what `manta bench plot-spike --json` wrote ({error})") from None


def draw(course: Course, file: Path, *, title: str) -> None:
    """As PNG or SVG, one picture a panel, with a line where something was decided. Raises ConfigError."""
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(one.panel for one in course.series))
    figure = Figure(figsize=(10, 2.4 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        for one in course.series:
            if one.panel == panel:
                is_step = panel == "replicas"
                x = [at - course.begin_s for at, _ in one.points]
                y = [value for _, value in one.points]
                style = "--" if "desired" in one.legend or "limit" in one.legend else "-"
                axis.plot(x, y, style, label=one.legend, lw=1.2, drawstyle="steps-post" if is_step else "default")
        for at, _ in course.decisions:
            axis.axvline(at - course.begin_s, color="tab:orange", lw=0.8, alpha=0.6)
        axis.set_ylabel(panel)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="x-small", ncols=2, loc="upper right")
    for at, text in course.decisions:
        axes[0].annotate(
            text, (at - course.begin_s, 0.98), xycoords=("data", "axes fraction"), rotation=90, fontsize=6, va="top"
        )
    axes[-1].set_xlabel("seconds")
    figure.suptitle(title)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}: cannot be written ({error})", field="plot") from None


def _range(client: httpx.Client, line: Line, job: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
    query = with_values(line.expression, window=WINDOW, job=job)
    fields = {"query": query, "start": begin_s, "end": end_s, "step": step_s}
    try:
        reply = client.get("/api/v1/query_range", params=fields)
        answer = reply.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise ConfigError(
            f"--prometheus {str(client.base_url)!r}: give an address like http://127.0.0.1:9000"
        ) from None
    except httpx.HTTPError:
        raise Unavailable(f"no Prometheus answers at {client.base_url}", retry_after_s=5.0) from None
    except ValueError:
        raise ConfigError(f"{client.base_url} does not answer as Prometheus does; is the address right?") from None
    if reply.status_code != 200:
        raise ConfigError(f"the Prometheus at {client.base_url} refused {query!r}: {answer.get('error', answer)}")
    found = []
    for one in answer["data"]["result"]:
        points = [(float(at), float(value)) for at, value in one["values"]]
        finite = tuple((at, value) for at, value in points if math.isfinite(value))
        if finite:
            found.append(Series(line.panel, line.legend.format(**one["metric"]), finite))
    return found


def _rises(series: Sequence[Series]) -> list[tuple[float, str]]:
    """When counters rose, once for each that was counted. By values, not by Prometheus' `increase`, which takes two
    decisions within its window for one and does not see the first of a reason."""
    found = []
    for one in series:
        before = one.points[0][1]
        for at, value in one.points:
            num = value - before if value >= before else value  # who counts began anew
            found += [(at, one.legend)] * round(num)
            before = value
    return found
