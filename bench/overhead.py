"""`manta bench overhead`: what serving adds to an engine, on a simulated device whose steps take a fixed time.

Knows the command line and the HTTP API only. Starts `manta serve` behind each proxy, and beside it, in the same run, a
bare uvicorn that sends events of the same size. CPU is that of all server processes, their idle CPU subtracted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from manta.deploy.checks import free_ports
from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import EngineFailed

from .drive import drive, start
from .http_client import HttpClient
from .load import Load, Target, closed_loop, find_target
from .process_cpu import tree_cpu_s
from .report import Report
from .server_process import ServerProcess, manta_command, running
from .stats import RequestRecord, median, percentile, summarize
from .workloads import Item, uniform

PROXIES = ("haproxy", "serve")
VOCAB_SIZE = 32_000
PROMPT_LEN = 32


@dataclass(frozen=True)
class Sizes:
    step_ms: int = 20
    num_streams: int = 64
    num_tokens: int = 250
    """Of each stream."""
    num_single: int = 30
    """Requests, one after the other, for the time to first token."""
    single_tokens: int = 8
    idle_s: float = 5.0
    repeats: int = 5


@dataclass
class Sample:
    """One burst of streams against one server."""

    load: Load
    idle_cpu_s_per_s: float
    busy_cpu_s: float
    """All server processes during the burst, idle CPU included."""
    duration_s: float
    cpu_by_process: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(record.num_output_tokens for record in self.load.records)

    @property
    def cpu_us_per_token(self) -> float:
        return (self.busy_cpu_s - self.idle_cpu_s_per_s * self.duration_s) * 1e6 / self.num_tokens


def cpu_us_per_token(samples: Sequence[Sample]) -> float:
    """Over all bursts together: Ray works in periods of many seconds, so that one idle window says little."""
    idle_cpu_s_per_s = sum(sample.idle_cpu_s_per_s for sample in samples) / len(samples)
    busy_cpu_s = sum(sample.busy_cpu_s for sample in samples)
    idle_cpu_s = idle_cpu_s_per_s * sum(sample.duration_s for sample in samples)
    return (busy_cpu_s - idle_cpu_s) * 1e6 / sum(sample.num_tokens for sample in samples)


def lags_s(records: Sequence[RequestRecord], step_s: float) -> list[float]:
    """By how much each stream's last token came later after its first than the device's pace says."""
    return [
        record.arrivals_s[-1] - record.arrivals_s[0] - step_s * (record.num_output_tokens - 1) for record in records
    ]


def run(
    config: EngineConfig,
    *,
    target: str = "smollm2-135m",
    proxies: Sequence[str] = PROXIES,
    sizes: Sizes = Sizes(),
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure each proxy beside the bare server.

    `target` is what `manta serve` is given; `config` is the engine that it means, for the engine's own time to first
    token in this process. Both get the device `sim:<step>ms`. The tokenizer must know the model's whole vocabulary:
    simulated tokens come from all of it, and one without text makes no event, which would flatter the CPU per token.
    Raises ServerDied when a server does not start.
    """
    report = Report(
        "overhead",
        model={"target": target, "device": f"sim:{sizes.step_ms}ms"},
        workload={"proxies": list(proxies), "prompt_len": PROMPT_LEN, **vars(sizes)},
    )
    asyncio.run(Overhead(config, target, sizes, report, console).measure(proxies))
    report.finish(console, json_path)
    return report


class Overhead:
    """One run: the engine alone, then each proxy beside the bare server."""

    def __init__(
        self, config: EngineConfig, target: str, sizes: Sizes, report: Report, console: Console | None
    ) -> None:
        self._device = f"sim:{sizes.step_ms}ms"
        self._config = with_overrides(config, {"device": self._device})
        self._target = target
        self._sizes = sizes
        self._report = report
        self._console = console
        self._seed = 0

    async def measure(self, proxies: Sequence[str]) -> None:
        engine_ttft_s = self._engine_ttft_s()
        self._figure("engine_ttft_median_ms", engine_ttft_s * 1e3)
        for proxy in proxies:
            (port,) = free_ports(1)
            command = manta_command(
                *("serve", self._target, "--port", str(port)),
                *("--set", f"device={self._device}", "--set", f"serving.proxy={proxy}"),
            )
            async with running(command, f"http://127.0.0.1:{port}") as server:
                await self._measure_beside_bare(proxy, server, engine_ttft_s)

    async def _measure_beside_bare(self, name: str, server: ServerProcess, engine_ttft_s: float) -> None:
        sizes = self._sizes
        client = HttpClient(server.url)
        target = await find_target(client)
        event_bytes = await _event_bytes(client, target)
        await self._burst(client, target, server, tokens=25)  # warm-up, also of every stream's connection
        self._figure(f"{name}_event_bytes", event_bytes)
        self._figure(f"{name}_startup_s", server.startup_s)
        ttfts_s = await self._single_ttfts_s(client, target)
        self._figure(f"{name}_ttft_median_ms", median(ttfts_s) * 1e3)
        self._figure(f"{name}_ttft_p95_ms", percentile(ttfts_s, 95) * 1e3)
        self._figure(f"{name}_ttft_added_median_ms", (median(ttfts_s) - engine_ttft_s) * 1e3)
        (port,) = free_ports(1)
        arguments = [str(port), str(sizes.step_ms), str(event_bytes)]
        bare_command = [manta_command()[0], "-m", "manta.bench.bare_server", *arguments]
        ours: list[Sample] = []
        theirs: list[Sample] = []
        async with running(bare_command, f"http://127.0.0.1:{port}") as bare:
            bare_client = HttpClient(bare.url)
            bare_target = await find_target(bare_client)
            await self._burst(bare_client, bare_target, bare, tokens=25)
            bare_ttfts_s = await self._single_ttfts_s(bare_client, bare_target)
            for _ in range(sizes.repeats):
                ours.append(await self._sample(client, target, server))
                theirs.append(await self._sample(bare_client, bare_target, bare))
            await bare_client.close()
        await client.close()
        self._figure(f"{name}_bare_ttft_median_ms", median(bare_ttfts_s) * 1e3)
        self._add(name, ours)
        self._add(f"{name}_bare", theirs)
        ratio = self._report.figures[f"{name}_cpu_us_per_token"] / self._report.figures[f"{name}_bare_cpu_us_per_token"]
        self._figure(f"{name}_cpu_ratio_to_bare", ratio)

    def _engine_ttft_s(self) -> float:
        """The engine alone in this process, one request after the other."""
        core, _ = start(self._config)
        try:
            ttfts_s = []
            for _ in range(self._sizes.num_single):
                (record,) = drive(core, self._items(1, self._sizes.single_tokens)).records
                ttfts_s.append(record.ttft_s or 0.0)
        finally:
            core.close()
        return median(ttfts_s)

    async def _single_ttfts_s(self, client: HttpClient, target: Target) -> list[float]:
        items = self._items(self._sizes.num_single, self._sizes.single_tokens)
        return [record.ttft_s or 0.0 for record in _all_good(await closed_loop(client, target, items, concurrency=1))]

    async def _sample(self, client: HttpClient, target: Target, server: ServerProcess) -> Sample:
        """Idle for a while, then a burst."""
        await asyncio.sleep(1.0)
        before, begin_s = tree_cpu_s(server.pid), time.monotonic()
        await asyncio.sleep(self._sizes.idle_s)
        idle = (sum(tree_cpu_s(server.pid).values()) - sum(before.values())) / (time.monotonic() - begin_s)
        return await self._burst(client, target, server, tokens=self._sizes.num_tokens, idle_cpu_s_per_s=idle)

    async def _burst(
        self,
        client: HttpClient,
        target: Target,
        server: ServerProcess,
        *,
        tokens: int,
        idle_cpu_s_per_s: float = 0.0,
    ) -> Sample:
        items = self._items(self._sizes.num_streams, tokens)
        before, begin_s = tree_cpu_s(server.pid), time.monotonic()
        load = await closed_loop(client, target, items, concurrency=len(items))
        duration_s = time.monotonic() - begin_s
        after = tree_cpu_s(server.pid)
        _all_good(load)
        used = {process: cpu_s - before.get(process, 0.0) for process, cpu_s in after.items()}
        return Sample(load, idle_cpu_s_per_s, sum(used.values()), duration_s, used)

    def _add(self, name: str, samples: Sequence[Sample]) -> None:
        records = [record for sample in samples for record in sample.load.records]
        lags = lags_s(records, self._sizes.step_ms / 1e3)
        middle = sorted(samples, key=lambda sample: sample.cpu_us_per_token)[(len(samples) - 1) // 2]
        self._figure(f"{name}_cpu_us_per_token", cpu_us_per_token(samples))
        self._figure(f"{name}_idle_cpu_ms_per_s", median([sample.idle_cpu_s_per_s for sample in samples]) * 1e3)
        num_events = sum(record.num_events for record in records)
        self._figure(f"{name}_events_per_token", num_events / sum(record.num_output_tokens for record in records))
        self._figure(f"{name}_client_cpu_us_per_token", middle.load.client_cpu_s * 1e6 / middle.num_tokens)
        self._figure(f"{name}_burst_ttft_median_ms", summarize(middle.load.records).ttft.median * 1e3)
        self._figure(f"{name}_stream_lag_median_ms", median(lags) * 1e3)
        self._figure(f"{name}_stream_lag_max_ms", max(lags) * 1e3)
        paces = [(r.num_output_tokens - 1) / (r.arrivals_s[-1] - r.arrivals_s[0]) for r in records]
        self._figure(f"{name}_slowest_stream_tokens_per_s", min(paces))
        self._figure(f"{name}_median_stream_tokens_per_s", median(paces))
        per_process = sorted(middle.cpu_by_process.items(), key=lambda pair: -pair[1])
        self._report.details[f"{name}_cpu_us_per_token_by_process_idle_included"] = {
            process: round(cpu_s * 1e6 / middle.num_tokens, 1) for process, cpu_s in per_process if cpu_s > 0
        }
        self._report.details[f"{name}_cpu_us_per_token_of_repeats"] = [round(s.cpu_us_per_token, 1) for s in samples]

    def _figure(self, name: str, value: float) -> None:
        self._report.figures[name] = value
        if self._console is not None:
            self._console.print(f"{name} {value:.4g}", highlight=False)

    def _items(self, count: int, output_len: int) -> list[Item]:
        self._seed += 1
        return uniform(count, PROMPT_LEN, output_len, vocab_size=VOCAB_SIZE, seed=self._seed)


def _all_good(load: Load) -> list[RequestRecord]:
    errors = summarize(load.records).errors
    if errors:
        raise EngineFailed(f"Streams of the measurement failed: {errors}.")
    return load.records


async def _event_bytes(client: HttpClient, target: Target) -> int:
    """Mean size of a token's event, over one stream."""
    sizes: list[int] = []

    def count(now_s: float, data: bytes) -> None:
        sizes.extend(len(event) + 2 for event in data.split(b"\n\n") if b'"finish_reason":null' in event)

    body = f'{{"model":"{target.model}","prompt":[5000,5001],"max_tokens":40,"stream":true,"ignore_eos":true}}'
    reply = await client.request("POST", "/v1/completions", body.encode(), on_body=count)
    if not sizes:
        raise EngineFailed(f"A stream of the server held no token events ({reply.status} {reply.body[:200]!r}).")
    return round(sum(sizes) / len(sizes))
