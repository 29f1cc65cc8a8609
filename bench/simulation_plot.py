"""Draws how fleets followed a load: arrivals, replicas, attainment over time. Knows no policy; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from manta.autoscaling.simulator.elastic import ElasticRun
from manta.autoscaling.simulator.sightings import Sample
from manta.engine.errors import ConfigError

from .report import check_plot

WINDOW_S = 30.0
"""Over which arrivals and attainment are averaged."""
COLORS = {
    "manta": "tab:blue",
    "fixed_peak": "tab:gray",
    "serve_stock": "tab:orange",
    "queue_depth": "tab:green",
    "oracle": "black",
}


def draw_course(path: Path, runs: Mapping[str, ElasticRun], *, title: str) -> None:
    """As PNG. Raises ConfigError without matplotlib or when it cannot be written."""
    check_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    load, replicas, good = figure.subplots(3, 1, sharex=True)
    first = next(iter(runs.values()))
    minutes, rates = _rates(first.samples)
    load.plot(minutes, rates, color="tab:red", linewidth=1)
    load.set_ylabel("requests/s")
    load.set_title(title, fontsize=10)
    for name, run in runs.items():
        style = {"color": COLORS.get(name), "linewidth": 1.6 if name == "manta" else 1.0, "label": name}
        up = [sample.num_ready + sample.num_starting + sample.num_draining for sample in run.samples]
        replicas.step([sample.time_s / 60 for sample in run.samples], up, where="post", **style)
        good.plot(*_attainment(run.samples), **style)
    replicas.set_ylabel("replicas that cost GPUs")
    replicas.legend(fontsize=8, ncols=len(runs), loc="upper left")
    replicas.set_ylim(bottom=0)
    good.set_ylabel("within the objective")
    good.set_ylim(-0.02, 1.02)
    good.set_xlabel("minutes")
    for axes in (load, replicas, good):
        axes.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write the plot to {path}: {error.strerror}") from None


def _rates(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Minutes, and arrivals a second over the window before."""
    minutes, rates = [], []
    for before, after in _windows(samples):
        minutes.append(after.time_s / 60)
        rates.append((after.num_arrived - before.num_arrived) / (after.time_s - before.time_s))
    return minutes, rates


def _attainment(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Minutes, and the share of the requests that ended in the window before which were within the objective."""
    minutes, shares = [], []
    for before, after in _windows(samples):
        num_ended = after.num_ended - before.num_ended
        if num_ended:
            minutes.append(after.time_s / 60)
            shares.append((after.num_good - before.num_good) / num_ended)
    return minutes, shares


def _windows(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    pairs, first = [], 0
    for sample in samples:
        while first < len(samples) - 1 and samples[first + 1].time_s <= sample.time_s - WINDOW_S:
            first += 1
        if samples[first].time_s < sample.time_s:
            pairs.append((samples[first], sample))
    return pairs
