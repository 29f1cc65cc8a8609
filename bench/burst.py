"""`manta bench serving --workload d2`: all requests of a workload at once over HTTP. Knows the API and /metrics only.

The load comes from several client processes, so that it is the server that is measured. Beside the clients' times stand
the CPU that each of the server's processes used and the times of the engine's steps while the streams were live; with
the results of `manta bench engine` for the same workload, their ratios to the same engine without any server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from manta.deploy.checks import free_ports, raise_file_limit
from manta.engine.errors import ConfigError
from manta.replicas.step_histogram import quantile

from .http_client import HttpClient
from .load import Load, Target, find_target, open_loop
from .process_cpu import serving_role, tree_cpu_s
from .report import Report, sayer
from .server_process import manta_command, running
from .stats import RequestRecord, median, summarize
from .workloads import Item, from_lengths, mix_lengths

WORKLOADS = ("d2",)
METRICS_AGE_S = 1.2
"""Edges hear of step times every half second."""
SETTLE_S = 5.0
"""After the warm-up: what the engine prepares in a pause is ready then."""
START_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Burst:
    """What is sent, and by how many processes."""

    workload: str = "d2"
    num_requests: int = 1000
    length_divisor: int = 1
    """Prompts and outputs shorter by this factor, for small machines."""
    num_clients: int = 8
    """Processes that send; each bears about a hundred streams."""
    repeats: int = 3
    vocab_size: int = 32_000
    seed: int = 0


@dataclass(frozen=True)
class Server:
    """Where the requests go. `pid`: its root process, whose CPU and that of all below is counted; None: not counted."""

    url: str
    api_key: str | None = None
    model: str | None = None
    pid: int | None = None


@dataclass
class Sample:
    """One burst."""

    records: list[RequestRecord]
    client_cpu_s: list[float]
    """Of each client process."""
    server_cpu_s: dict[str, float] = field(default_factory=dict)
    step_counts: list[float] = field(default_factory=list)
    """Steps of all engines in the buckets of StepHistogram."""

    @property
    def duration_s(self) -> float:
        """From the first request to the last token."""
        return summarize(self.records).duration_s


def run(
    server: Server | None,
    burst: Burst = Burst(),
    *,
    serve: str | None = None,
    overrides: Sequence[str] = (),
    in_process: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure `server`, or one that `manta serve <serve> --set <overrides>` starts for this.

    `in_process`: JSON of `manta bench engine` with the same workload. Raises ConfigError, ServerDied or ServerProblem.
    """
    if burst.workload not in WORKLOADS:
        raise ConfigError(f"--workload {burst.workload!r}: must be one of {', '.join(WORKLOADS)}", field="workload")
    if min(burst.num_requests, burst.length_divisor, burst.num_clients, burst.repeats) < 1:
        raise ConfigError("requests, clients, repeats and the length divisor must be at least 1")
    yardstick = _read_figures(in_process) if in_process is not None else {}
    raise_file_limit()
    report = Report("serving", model={}, workload={**asdict(burst), "serve": serve, "overrides": list(overrides)})
    asyncio.run(_run(server, burst, serve, overrides, yardstick, report, console))
    report.finish(console, json_path)
    return report


async def _run(
    server: Server | None,
    burst: Burst,
    serve: str | None,
    overrides: Sequence[str],
    yardstick: dict[str, float],
    report: Report,
    console: Console | None,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if server is None:
            assert serve is not None
            server = await stack.enter_async_context(_started(serve, overrides, report))
        client = HttpClient(server.url, api_key=server.api_key)
        stack.push_async_callback(client.close)
        target = await find_target(client, server.model)
        report.model.update(name=target.model, url=server.url, max_model_len=target.max_model_len)
        clients = [stack.enter_context(_client_process()) for _ in range(burst.num_clients)]
        samples = []
        for repeat in range(burst.repeats + 1):
            sample = await _sample(client, clients, server, target, burst, seed=burst.seed + repeat)
            sayer(console)(f"{burst.workload}: {sample.duration_s:.3f} s" + ("" if repeat else " (warm-up)"))
            if repeat:
                samples.append(sample)
            else:
                await asyncio.sleep(SETTLE_S)
    _add_figures(report, burst.workload, samples, yardstick)


@contextlib.asynccontextmanager
async def _started(serve: str, overrides: Sequence[str], report: Report) -> AsyncIterator[Server]:
    (port,) = free_ports(1)
    sets = [word for override in overrides for word in ("--set", override)]
    command = manta_command("serve", serve, "--port", str(port), *sets)
    async with running(command, f"http://127.0.0.1:{port}", timeout_s=START_TIMEOUT_S) as process:
        report.figures["serve_startup_s"] = process.startup_s
        yield Server(process.url, pid=process.pid)


@contextlib.contextmanager
def _client_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(raise_file_limit).result()  # the process has begun and imported what it needs
        yield pool


async def _sample(
    client: HttpClient,
    clients: Sequence[ProcessPoolExecutor],
    server: Server,
    target: Target,
    burst: Burst,
    *,
    seed: int,
) -> Sample:
    items = _items(burst, seed)
    await asyncio.sleep(METRICS_AGE_S)
    steps_before, cpu_before = await _step_counts(client), _server_cpu_s(server)
    start_s = time.monotonic() + 1.0  # by then every client has its requests and waits
    shares = [items[index :: len(clients)] for index in range(len(clients))]
    loop = asyncio.get_running_loop()
    loads = await asyncio.gather(
        *(
            loop.run_in_executor(pool, _send, server.url, server.api_key, target, share, start_s)
            for pool, share in zip(clients, shares, strict=True)
        )
    )
    cpu_after = _server_cpu_s(server)
    await asyncio.sleep(METRICS_AGE_S)
    steps_after = await _step_counts(client)
    return Sample(
        [record for load in loads for record in load.records],
        [load.client_cpu_s for load in loads],
        {name: seconds - cpu_before.get(name, 0.0) for name, seconds in cpu_after.items()},
        [after - before for after, before in zip(steps_after, steps_before, strict=True)],
    )


def _items(burst: Burst, seed: int) -> list[Item]:
    prompt_lens, output_lens = (
        [max(4, length // burst.length_divisor) for length in lengths] for lengths in mix_lengths(burst.num_requests)
    )
    return from_lengths(prompt_lens, output_lens, vocab_size=burst.vocab_size, seed=seed)


def _send(url: str, api_key: str | None, target: Target, items: Sequence[Item], start_s: float) -> Load:
    """In a client process: all of its requests at `start_s`, each on a connection of its own."""

    async def send() -> Load:
        client = HttpClient(url, api_key=api_key)
        try:
            await asyncio.sleep(start_s - time.monotonic())
            return await open_loop(client, target, items)
        finally:
            await client.close()

    gc.collect()
    gc.disable()
    try:
        return asyncio.run(send())
    finally:
        gc.enable()


def _server_cpu_s(server: Server) -> dict[str, float]:
    return {} if server.pid is None else tree_cpu_s(server.pid, name_of=serving_role)


async def _step_counts(client: HttpClient) -> list[float]:
    """As `step_counts`; empty for a server that shows no metrics."""
    reply = await client.request("GET", "/metrics")
    shows_metrics = reply.status == 200 and reply.headers.get("content-type", "").startswith("text/plain")
    return step_counts(reply.body.decode()) if shows_metrics else []


def step_counts(metrics: str) -> list[float]:
    """Steps in the buckets of StepHistogram, over all engines in a text of Prometheus; empty without that metric."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "manta_step_seconds_bucket":
                bound = sample.labels["le"]
                totals[bound] = totals.get(bound, 0.0) + sample.value
    counts = [totals[bound] for bound in sorted(totals, key=float)]
    return [count - below for count, below in zip(counts, [0.0, *counts], strict=False)]


def _read_figures(file: Path) -> dict[str, float]:
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--in-process {file}: no results of `manta bench engine` ({error})") from None
    return figures


def _add_figures(report: Report, name: str, samples: Sequence[Sample], yardstick: dict[str, float]) -> None:
    figures = report.figures
    middle = sorted(samples, key=lambda sample: sample.duration_s)[(len(samples) - 1) // 2]
    result = summarize(middle.records)
    figures[f"{name}_http_s"] = median([sample.duration_s for sample in samples])
    figures |= result.figures(f"{name}_http_")
    figures[f"{name}_http_errors"] = float(sum(sum(summarize(one.records).errors.values()) for one in samples))
    for share, label in ((0.5, "median"), (0.99, "p99")):
        values = [value for one in samples if (value := quantile(one.step_counts, share)) is not None]
        if values:
            figures[f"{name}_http_step_{label}_ms"] = median(values) * 1e3
    _add_cpu(report, name, middle, sum(record.num_output_tokens for record in middle.records))
    rate = yardstick.get(f"{name}_output_tokens_per_s")
    if rate:
        figures[f"{name}_http_ratio_to_in_process"] = figures[f"{name}_http_output_tokens_per_s"] / rate
    for label in ("median", "p99"):
        alone_ms, served_ms = yardstick.get(f"{name}_step_{label}_ms"), figures.get(f"{name}_http_step_{label}_ms")
        if alone_ms and served_ms:
            figures[f"{name}_step_{label}_ms_in_process"] = alone_ms
            figures[f"{name}_step_{label}_ratio_to_in_process"] = served_ms / alone_ms
    report.details["seconds_of_repeats"] = [round(sample.duration_s, 3) for sample in samples]
    report.details["errors_by_kind"] = [summarize(sample.records).errors for sample in samples]


def _add_cpu(report: Report, name: str, sample: Sample, num_tokens: int) -> None:
    """CPU of each process as cores in use, and of the whole server a token. Idle CPU is included."""
    figures, duration_s = report.figures, sample.duration_s
    figures[f"{name}_http_busiest_client_cores"] = max(sample.client_cpu_s) / duration_s
    if not sample.server_cpu_s:
        return
    by_kind: dict[str, list[float]] = {}
    for process, cpu_s in sample.server_cpu_s.items():
        by_kind.setdefault(process.split(" ")[0] if process.startswith("edge ") else process, []).append(cpu_s)
    for kind, seconds in sorted(by_kind.items()):
        figures[f"{name}_http_cpu_cores_{kind.replace(' ', '_')}"] = sum(seconds) / duration_s
    if "edge" in by_kind:
        figures[f"{name}_http_cpu_cores_busiest_edge"] = max(by_kind["edge"]) / duration_s
    figures[f"{name}_http_cpu_us_per_token"] = sum(sample.server_cpu_s.values()) * 1e6 / num_tokens
    report.details["server_cpu_s_by_process"] = {
        process: round(cpu_s, 2) for process, cpu_s in sorted(sample.server_cpu_s.items())
    }
