"""`manta bench spike`: a spike over HTTP on Ray Serve, as the autoscaler follows it, with its Prometheus beside it.

Starts `manta serve` with simulated replicas, sends requests when they are due (a steady load, a spike, the steady load
again), and keeps every answer, the decision log and what Prometheus saw. The load is never what a slow server makes of
it: arrivals do not wait for answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from manta.cluster.slo import Slo
from manta.deploy.checks import free_ports
from manta.engine.errors import ConfigError, EngineFailed

from .http_client import HttpClient
from .load import Target, find_target, send_one
from .prometheus_plot import draw, read_course
from .report import Report, check_plot, sayer, write_json
from .server_process import manta_command, running
from .stats import RequestRecord
from .workloads import Item

TARGET = "sim-h200"
SETTLE_S = 60.0
"""At most so long the last answers and the last scaling step are waited for."""
PERIOD_S = 0.5


@dataclass(frozen=True)
class SpikeCase:
    """Loads in requests/s, times in seconds. The defaults are for two cores: 2 -> 6 -> 2 replicas."""

    steady_rate: float = 4.0
    spike_rate: float = 18.0
    before_s: float = 40.0
    spike_s: float = 60.0
    after_s: float = 60.0
    step_ms: int = 20
    """Of the simulated device."""
    max_num_seqs: int = 4
    """A replica's: with 50 tokens of 20 ms, it takes about 3.6 requests/s."""
    prompt_tokens: int = 64
    output_tokens: int = 50
    min_replicas: int = 2
    max_replicas: int = 6
    quiet_s: float = 15.0
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Poisson, seconds from the beginning."""
        rng, now_s, found = random.Random(self.seed), 0.0, []
        end_s = self.before_s + self.spike_s + self.after_s
        while True:
            in_spike = self.before_s <= now_s < self.before_s + self.spike_s
            now_s += rng.expovariate(self.spike_rate if in_spike else self.steady_rate)
            if now_s >= end_s:
                return found
            found.append(now_s)

    def settings(self, prometheus_port: int | None) -> list[str]:
        """Of `manta serve`."""
        found = {
            "device": f"sim:{self.step_ms}ms", "autoscaling.enabled": "true", "num_replicas": self.min_replicas,
            "autoscaling.min_replicas": self.min_replicas, "autoscaling.max_replicas": self.max_replicas,
            "quiet_s": self.quiet_s, "cold_start_s": 5, "max_num_seqs": self.max_num_seqs,
            "slo.ttft_s": self.ttft_s, "slo.tpot_s": self.tpot_s, "observability.prometheus": "never",
        }  # fmt: skip
        if prometheus_port is not None:
            found |= {
                "observability.prometheus": "always", "observability.prometheus_port": prometheus_port,
                "observability.scrape_interval_s": 1,
            }  # fmt: skip
        return [f"{name}={value}" for name, value in found.items()]


def run_spike(
    case: SpikeCase, *, json_path: Path | None, prometheus_json: Path | None, plot: Path | None, console: Console | None
) -> Report:
    """Start, load, read, stop. Raises ConfigError, ServerDied, EngineFailed."""
    if plot is not None:
        check_plot()
    wants_prometheus = plot is not None or prometheus_json is not None
    if wants_prometheus and shutil.which("prometheus") is None:
        raise ConfigError(
            "--plot and --prometheus-json need Prometheus: apt install prometheus on Debian, or leave out"
        )
    report = asyncio.run(_run(case, wants_prometheus, prometheus_json, plot, console))
    report.finish(console, json_path)
    return report


async def _run(
    case: SpikeCase, wants_prometheus: bool, prometheus_json: Path | None, plot: Path | None, console: Console | None
) -> Report:
    say = sayer(console)
    port, prometheus_port = free_ports(2)
    command = manta_command("serve", TARGET, "--port", str(port))
    for setting in case.settings(prometheus_port if wants_prometheus else None):
        command += ["--set", setting]
    url = f"http://127.0.0.1:{port}"
    async with running(command, url) as server, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        say(f"the server answers after {server.startup_s:.0f} s")
        begin_wall_s = time.time()
        watching = asyncio.get_running_loop().create_task(_watch(http, say))
        records = await _send(case, url)
        await _settle(http, case)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        status = (await http.get("/autoscaling")).json()
        if wants_prometheus:
            prometheus = f"http://127.0.0.1:{prometheus_port}"
            read = await asyncio.to_thread(read_course, prometheus, begin_s=begin_wall_s, end_s=time.time())
            if prometheus_json is not None:
                write_json(prometheus_json, read.tree())
            if plot is not None:
                draw(read, plot, title="A spike on simulated replicas, from Prometheus")
    return _report(case, records, status, begin_wall_s)


async def _send(case: SpikeCase, url: str) -> list[RequestRecord]:
    client = HttpClient(url)
    try:
        target: Target = await find_target(client)
        rng, begin_s = random.Random(case.seed + 1), time.monotonic()
        tasks = []
        for at_s in case.arrivals():
            await asyncio.sleep(max(begin_s + at_s - time.monotonic(), 0.0))
            item = Item([rng.randrange(100, 30_000) for _ in range(case.prompt_tokens)], case.output_tokens)
            tasks.append(asyncio.create_task(send_one(client, target, item, begin_s + at_s)))
        return list(await asyncio.gather(*tasks))
    finally:
        await client.close()


async def _watch(http: httpx.AsyncClient, say: Callable[[str], None]) -> None:
    """Say each decision as it comes."""
    num_said = 0
    while True:
        reply = await http.get("/autoscaling")
        decided = reply.json()["decided"] if reply.status_code == 200 else []
        for one in decided[num_said:]:
            say(f"  {one['before']} -> {one['after']} ({one['reason']}): {one['sentence']}")
        num_said = len(decided)
        await asyncio.sleep(PERIOD_S)


async def _settle(http: httpx.AsyncClient, case: SpikeCase) -> None:
    """Until there are as few replicas as before, and none drains. Raises EngineFailed."""
    until_s = time.monotonic() + SETTLE_S + case.quiet_s
    while True:
        [pool] = (await http.get("/autoscaling")).json()["pools"]
        if pool["num_ready"] == pool["desired"] == case.min_replicas and not pool["num_draining"]:
            return
        if time.monotonic() > until_s:
            break
        await asyncio.sleep(PERIOD_S)
    raise EngineFailed(f"there are still {pool['num_ready']} replicas, {pool['desired']} wanted")


def _report(case: SpikeCase, records: Sequence[RequestRecord], status: dict[str, Any], begin_wall_s: float) -> Report:
    slo = Slo(ttft_s=case.ttft_s, tpot_s=case.tpot_s)
    good = [one for one in records if one.ok and slo.is_met(one.ttft_s, one.tpot_s)]
    changes = [one for one in status["decided"] if one["after"] != one["before"]]
    counts = [case.min_replicas, *(one["after"] for one in changes)]
    figures = {
        "num_requests": len(records),
        "num_failed": sum(not one.ok for one in records),
        "slo_attainment": len(good) / len(records),
        "replicas_before": counts[0],
        "replicas_most": max(counts),
        "replicas_after": counts[-1],
        "num_decisions": len(status["decided"]),
        "num_changes": len(changes),
        "cold_start_s": status["cold_start_s"],
    }
    log = [{**one, "time_s": round(one["time_s"] - begin_wall_s, 1)} for one in status["decided"]]
    errors = Counter(one.error for one in records if one.error is not None)
    details = {"decided": log, "errors": dict(errors), "case": json.loads(json.dumps(asdict(case)))}
    model = {"model": TARGET, "device": f"sim:{case.step_ms}ms"}
    workload = {"steady_rate": case.steady_rate, "spike_rate": case.spike_rate, "spike_s": case.spike_s}
    return Report("spike", model, workload, {name: float(value) for name, value in figures.items()}, details)
