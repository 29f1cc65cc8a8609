"""`manta bench serving`: load over HTTP, rates or concurrencies swept, with knee and goodput. Knows no engine.

Open loop: requests come at a rate, whatever the answers do. Closed loop: a fixed number is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from manta.engine.errors import ConfigError

from . import workloads
from .http_client import HttpClient
from .load import Knee, Load, Target, closed_loop, find_knee, find_target, open_loop
from .report import CurvePoint, Report, check_plot, plot_curve
from .stats import LoadResult, Slo, summarize
from .traces import find_trace, read_trace, trace_items
from .workloads import Item

DEFAULT_VOCAB_SIZE = 32_000
"""Token ids of prompts stay below it; most vocabularies are larger."""
WARM_UP_REQUESTS = 4


@dataclass(frozen=True)
class Requests:
    """Which requests are sent."""

    prompt_lens: str = "lognormal:220:1.0:4:2000"
    output_lens: str = "lognormal:180:0.8:4:1000"
    trace: str | None = None
    """A trace's file or name; its lengths and, in an open loop with arrivals `trace`, its times are used."""
    arrivals: Literal["poisson", "constant", "trace"] = "poisson"
    duration_s: float = 30.0
    """Of the arrivals at each rate."""
    num_requests: int | None = None
    """At each setting; default: as many as arrive in `duration_s`, at least 20, or four for each concurrent stream."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    seed: int = 0


def run(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    rates: Sequence[float] | None = None,
    concurrency: Sequence[int] | None = None,
    knee: bool = False,
    slo: str | None = None,
    requests: Requests = Requests(),
    json_path: Path | None = None,
    plot_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure the server at `url` at each rate (requests/s) or each concurrency; default: concurrency 1, 2, 4, 8.

    `slo` such as "ttft=0.9,tpot=0.045" (seconds) gives goodput. `knee` searches from the first rate (or 1) upwards for
    the largest that keeps the SLO at p95; it needs `slo`. Raises ConfigError, or ServerProblem when nothing answers.
    """
    if rates and concurrency:
        raise ConfigError("give --rates (open loop) or --concurrency (closed loop), not both")
    if any(value <= 0 for value in (*(rates or ()), *(concurrency or ()))):
        raise ConfigError("rates and concurrencies must be above 0")
    if knee and (slo is None or concurrency):
        raise ConfigError("--knee searches over rates and needs --slo, for example --slo ttft=0.9,tpot=0.045")
    if plot_path is not None:
        check_plot()
    limits = Slo.parse(slo) if slo is not None else None
    return asyncio.run(
        _run(url, model, api_key, rates, concurrency, knee, limits, requests, json_path, plot_path, console)
    )


async def _run(
    url: str,
    model: str | None,
    api_key: str | None,
    rates: Sequence[float] | None,
    concurrency: Sequence[int] | None,
    knee: bool,
    slo: Slo | None,
    requests: Requests,
    json_path: Path | None,
    plot_path: Path | None,
    console: Console | None,
) -> Report:
    client = HttpClient(url, api_key=api_key)
    try:
        target = await find_target(client, model)
        sweep = Sweep(client, target, requests, slo, console)
        await sweep.warm_up()
        found: Knee | None = None
        if knee:
            assert slo is not None
            found = await find_knee(sweep.at_rate, slo.is_met_at_p95, start=rates[0] if rates else 1.0)
        elif rates:
            for rate in rates:
                await sweep.at_rate(rate)
        else:
            for number in concurrency or (1, 2, 4, 8):
                await sweep.at_concurrency(number)
    finally:
        await client.close()
    report = Report(
        "serving",
        model={"name": target.model, "url": url, "max_model_len": target.max_model_len},
        workload={**asdict(requests), "slo_s": None if slo is None else asdict(slo)},
        figures=sweep.figures(found),
        details={
            "points": [
                {"setting": p.name, **p.result.figures(), "errors_by_kind": p.result.errors} for p in sweep.points
            ]
        },
    )
    report.finish(console, json_path)
    if plot_path is not None:
        plot_curve(plot_path, [p.curve() for p in sweep.points], title=f"{target.model} at {url}")
    return report


@dataclass(frozen=True)
class Point:
    """One setting of the sweep."""

    name: str
    setting: float
    result: LoadResult
    client_cpu_us_per_token: float

    def curve(self) -> CurvePoint:
        result = self.result
        return CurvePoint(
            f"{self.setting:g}", result.output_tokens_per_s, result.ttft.p95 * 1e3, result.tpot.median * 1e3
        )

    @property
    def power(self) -> float:
        """Throughput over latency (Kleinrock 1979); its peak is where more load costs more than it gives."""
        return self.result.requests_per_s / self.result.e2e.median if self.result.e2e.count else 0.0


class Sweep:
    """Measures one setting after the other and keeps the points."""

    def __init__(
        self, client: HttpClient, target: Target, requests: Requests, slo: Slo | None, console: Console | None
    ) -> None:
        self.points: list[Point] = []
        self._client = client
        self._target = target
        self._requests = requests
        self._slo = slo
        self._console = console

    async def warm_up(self) -> None:
        await closed_loop(self._client, self._target, self._items(WARM_UP_REQUESTS, seed=10_000), concurrency=2)

    async def at_rate(self, rate: float) -> LoadResult:
        wanted = self._requests
        count = wanted.num_requests or max(20, round(rate * wanted.duration_s))
        items = self._items(count, seed=wanted.seed + len(self.points))
        if wanted.arrivals == "trace":
            items = workloads.rescaled(items, rate)
        else:
            items = workloads.at_rate(items, rate, process=wanted.arrivals, seed=wanted.seed + len(self.points))
        return self._add(f"rate_{rate:g}", rate, await open_loop(self._client, self._target, items))

    async def at_concurrency(self, concurrency: int) -> LoadResult:
        count = self._requests.num_requests or 4 * concurrency
        items = self._items(count, seed=self._requests.seed + len(self.points))
        load = await closed_loop(self._client, self._target, items, concurrency=concurrency)
        return self._add(f"concurrency_{concurrency}", concurrency, load)

    def figures(self, found: Knee | None) -> dict[str, float]:
        """All points, the knee and, with an SLO, the best goodput."""
        flat: dict[str, float] = {}
        for point in self.points:
            flat |= point.result.figures(f"{point.name}_")
            flat[f"{point.name}_client_cpu_us_per_token"] = point.client_cpu_us_per_token
        if found is not None:
            flat |= {"knee_requests_per_s": found.good} if found.good is not None else {}
            flat |= {"beyond_knee_requests_per_s": found.bad} if found.bad is not None else {}
        elif len(self.points) > 1:
            best = max(self.points, key=lambda point: point.power)
            unit = "requests_per_s" if best.name.startswith("rate") else "concurrency"
            flat[f"knee_by_power_{unit}"] = best.setting
        goodputs = [p.result.goodput_per_s for p in self.points if p.result.goodput_per_s is not None]
        return flat | ({"best_goodput_requests_per_s": max(goodputs)} if goodputs else {})

    def _add(self, name: str, setting: float, load: Load) -> LoadResult:
        result = summarize(load.records, self._slo)
        num_tokens = sum(record.num_output_tokens for record in load.records)
        point = Point(name, setting, result, load.client_cpu_s * 1e6 / max(1, num_tokens))
        self.points.append(point)
        if self._console is not None:
            self._console.print(point_table(point))
        return result

    def _items(self, count: int, *, seed: int) -> list[Item]:
        wanted, context = self._requests, self._target.max_model_len or 2**31
        if wanted.trace is not None:
            rows = read_trace(find_trace(wanted.trace), limit=count)
            return trace_items(rows, vocab_size=wanted.vocab_size, max_model_len=context, seed=seed)
        prompt_lens = workloads.lengths(wanted.prompt_lens, count, seed=2 * seed)
        output_lens = workloads.lengths(wanted.output_lens, count, seed=2 * seed + 1)
        output_lens = [min(length, context - 1) for length in output_lens]
        prompt_lens = [min(p, context - o) for p, o in zip(prompt_lens, output_lens, strict=True)]
        return workloads.from_lengths(prompt_lens, output_lens, vocab_size=wanted.vocab_size, seed=seed)


def point_table(point: Point) -> Table:
    result = point.result
    table = Table(title=f"{point.name}: {result.num_requests} requests in {result.duration_s:.1f} s", show_edge=False)
    for name in ("ms", "median", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name in ("ttft", "tpot", "itl", "e2e"):
        summary = getattr(result, name)
        values = (summary.median, summary.p90, summary.p95, summary.p99)
        table.add_row(name, *(f"{value * 1e3:,.1f}" for value in values))
    goodput = "" if result.goodput_per_s is None else f", goodput {result.goodput_per_s:.2f} req/s"
    errors = f", errors {result.errors}" if result.errors else ""
    table.caption = (
        f"{result.requests_per_s:.2f} req/s, {result.output_tokens_per_s:,.0f} output tok/s, "
        f"{result.total_tokens_per_s:,.0f} total{goodput}{errors}; client {point.client_cpu_us_per_token:.0f} us/token"
    )
    return table
