"""`manta bench spike`: arguments in. The measuring is bench/spike.py's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def spike_command(
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write figures and decisions.")] = None,
    prometheus_json: Annotated[
        Path | None, typer.Option("--prometheus-json", metavar="FILE", help="Keep what Prometheus saw.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw what Prometheus saw.")] = None,
    spike_rate: Annotated[float, typer.Option("--spike-rate", min=0.1, help="Requests a second.")] = 18.0,
    spike: Annotated[float, typer.Option("--spike", min=1, help="Seconds that the spike lasts.")] = 60.0,
) -> int:
    """A spike on 2 -> 6 -> 2 simulated replicas over HTTP on Ray Serve; 1 if any request failed."""
    from rich.console import Console

    from manta.bench.spike import SpikeCase, run_spike

    case = SpikeCase(spike_rate=spike_rate, spike_s=spike)
    report = run_spike(
        case, json_path=json, prometheus_json=prometheus_json, plot=plot, console=Console(soft_wrap=True)
    )
    return 1 if report.figures["num_failed"] else 0
