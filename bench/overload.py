"""`manta bench overload`: a served model that is asked for more than it can do: what it completes, what it refuses.

Knows the command line and the HTTP API only. Starts `manta serve` with simulated replicas behind several edges, whose
steps take a fixed time, so that capacity is known; then sends requests in open loop at rates around it and far beyond.
Good is what was answered whole with its first token within the deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from manta.deploy.checks import free_ports

from .http_client import HttpClient
from .load import Load, Target, closed_loop, find_target, open_loop
from .report import Report
from .server_process import manta_command, running
from .stats import RequestRecord, Summary
from .workloads import Item, uniform

VOCAB_SIZE = 32_000
REFUSED = "http_429"


@dataclass(frozen=True)
class Sizes:
    """Of the served model and of the load."""

    step_ms: int = 100
    num_replicas: int = 4
    num_edges: int = 2
    max_num_seqs: int = 8
    """Requests that run at once in a replica."""
    prompt_len: int = 64
    output_len: int = 32
    deadline_s: float = 1.5
    """For the first token."""
    loads: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 3.0)
    """Shares of the capacity."""
    duration_s: float = 20.0
    settle_s: float = 3.0
    """Of each load, what is not counted at its beginning."""

    @property
    def capacity_per_s(self) -> float:
        """Requests a second that all slots together complete: a step for the prompt, one for each further token, and
        one until the slot is given to the next request."""
        steps = self.output_len + 1
        return self.num_replicas * self.max_num_seqs / (steps * self.step_ms / 1e3)


@dataclass(frozen=True)
class Outcome:
    """One load, as its clients saw it."""

    offered_per_s: float
    good_per_s: float
    num_late: int
    """Answered, but the first token came after the deadline."""
    num_refused: int
    num_failed: int
    refusals_s: Summary
    """From when a request was due until its refusal was there."""
    ttft_s: Summary
    """Of those that were answered."""

    @classmethod
    def of(cls, records: Sequence[RequestRecord], *, deadline_s: float, duration_s: float) -> Outcome:
        """`duration_s` is the time over which the records were due."""
        answered = [record for record in records if record.ok]
        ttfts_s = [record.ttft_s for record in answered if record.ttft_s is not None]
        refused = [record for record in records if record.error == REFUSED]
        num_good = sum(ttft_s <= deadline_s for ttft_s in ttfts_s)
        return cls(
            offered_per_s=len(records) / duration_s,
            good_per_s=num_good / duration_s,
            num_late=len(ttfts_s) - num_good,
            num_refused=len(refused),
            num_failed=len(records) - len(answered) - len(refused),
            refusals_s=Summary.of([record.e2e_s for record in refused if record.e2e_s is not None]),
            ttft_s=Summary.of(ttfts_s),
        )


def run(*, sizes: Sizes = Sizes(), json_path: Path | None = None, console: Console | None = None) -> Report:
    """Serve, load, and report. Raises ServerDied when the server does not start."""
    report = Report(
        "overload",
        model={"target": "sim-h200", "device": f"sim:{sizes.step_ms}ms"},
        workload={**vars(sizes), "loads": list(sizes.loads), "capacity_per_s": sizes.capacity_per_s},
    )
    asyncio.run(_measure(sizes, report, console))
    report.finish(console, json_path)
    return report


def settings(sizes: Sizes) -> dict[str, object]:
    """Of the server."""
    return {
        "device": f"sim:{sizes.step_ms}ms",
        "max_num_seqs": sizes.max_num_seqs,
        "serving.num_replicas": sizes.num_replicas,
        "serving.num_edges": sizes.num_edges,
        "serving.deadline_s": sizes.deadline_s,
    }


async def _measure(sizes: Sizes, report: Report, console: Console | None) -> None:
    (port,) = free_ports(1)
    overrides = [part for name, value in settings(sizes).items() for part in ("--set", f"{name}={value}")]
    command = manta_command("serve", "sim-h200", "--port", str(port), *overrides)
    outcomes: dict[float, Outcome] = {}
    async with running(command, f"http://127.0.0.1:{port}") as server:
        client = HttpClient(server.url)
        target = replace(await find_target(client), has_event_a_token=True)
        await closed_loop(client, target, _items(sizes, 64, seed=0), concurrency=16)
        for seed, share in enumerate(sizes.loads, 1):
            load = await _load(client, target, sizes, share, seed=seed)
            outcomes[share] = _outcome(load, sizes)
            _add(report, f"load_{share:g}", outcomes[share], load)
            if console is not None:
                console.print(f"load {share:g}: {outcomes[share]}", highlight=False)
            await asyncio.sleep(2.0)
        await client.close()
    peak = max(outcome.good_per_s for outcome in outcomes.values())
    highest = outcomes[max(outcomes)]
    report.figures["goodput_peak_per_s"] = peak
    report.figures["goodput_at_highest_load_to_peak"] = highest.good_per_s / peak
    report.figures |= highest.refusals_s.figures("refusal")


async def _load(client: HttpClient, target: Target, sizes: Sizes, share: float, *, seed: int) -> Load:
    """Poisson arrivals at a share of the capacity."""
    rate, chance, at_s = share * sizes.capacity_per_s, random.Random(seed), 0.0
    arrivals_s: list[float] = []
    while (at_s := at_s + chance.expovariate(rate)) < sizes.duration_s:
        arrivals_s.append(at_s)
    items = _items(sizes, len(arrivals_s), seed=seed)
    due = [replace(item, arrival_s=arrival_s) for item, arrival_s in zip(items, arrivals_s, strict=True)]
    return await open_loop(client, target, due)


def _items(sizes: Sizes, count: int, *, seed: int) -> list[Item]:
    return uniform(count, sizes.prompt_len, sizes.output_len, vocab_size=VOCAB_SIZE, seed=1000 + seed)


def _outcome(load: Load, sizes: Sizes) -> Outcome:
    begin_s = min(record.due_s for record in load.records)
    settled = [record for record in load.records if record.due_s >= begin_s + sizes.settle_s]
    return Outcome.of(settled, deadline_s=sizes.deadline_s, duration_s=sizes.duration_s - sizes.settle_s)


def _add(report: Report, name: str, outcome: Outcome, load: Load) -> None:
    figures = report.figures
    figures[f"{name}_offered_per_s"] = outcome.offered_per_s
    figures[f"{name}_good_per_s"] = outcome.good_per_s
    figures |= outcome.ttft_s.figures(f"{name}_ttft") | outcome.refusals_s.figures(f"{name}_refusal")
    report.details[name] = {
        "num_late": outcome.num_late,
        "num_refused": outcome.num_refused,
        "num_failed": outcome.num_failed,
        "client_cpu_s": load.client_cpu_s,
    }
