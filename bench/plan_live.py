"""`manta bench plan-live`: a plan, the simulator and a live server on simulated GPUs, with the same requests.

Knows the planner, the command line and the HTTP API. Plans a small case, runs the placement on the simulator, then
starts `manta serve` with as many simulated replicas, sends the requests over HTTP when they are due, and compares the
times that the client sees with what was planned.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manta.autoscaling.planner.demand import Demand
from manta.autoscaling.planner.estimate import WARM_UP, quantile
from manta.autoscaling.planner.fleet import simulate
from manta.autoscaling.planner.problem import Cluster, Lengths, Problem, Search, Workload
from manta.autoscaling.planner.report import plan_tree
from manta.autoscaling.planner.search import Planner
from manta.autoscaling.slo import Slo
from manta.deploy.checks import free_ports
from manta.deploy.config import load_engine_config
from manta.engine.config import ModelConfig
from manta.engine.errors import EngineFailed
from manta.engine.model_source import load_shape, resolve_model

from .http_client import HttpClient
from .load import StreamReader, Target, closed_loop, find_target
from .report import Report
from .server_process import manta_command, running
from .stats import RequestRecord
from .workloads import Item, token_ids, uniform

TARGET = "sim-h200"
"""The bundled configuration whose model is served; its device is replaced."""
VOCAB_SIZE = 32_000
FIGURES = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s")
WARM_UP_REQUESTS = 32


PROMPTS = Lengths(median=2000, sigma=0.6, low=16, high=6000)
ANSWERS = Lengths(median=80, sigma=0.6, low=4, high=400)
OBJECTIVE = Slo(ttft_s=0.6, tpot_s=0.045)


@dataclass(frozen=True)
class SmallCase:
    """A problem of a size that two cores can serve."""

    gpu: str = "l40s"
    """Slow enough that the framework's own time is small beside a step's."""
    num_gpus: int = 2
    rate: float = 7.0
    prompt: Lengths = PROMPTS
    output: Lengths = ANSWERS
    slo: Slo = OBJECTIVE
    num_requests: int = 400
    seed: int = 0

    def problem(self, model: str) -> Problem:
        """One pool of unsplit replicas in the checkpoint's own formats, as the simulated device has them."""
        return Problem(
            model=model,
            workload=Workload(rate=self.rate, prompt=self.prompt, output=self.output, seed=self.seed),
            slo=self.slo,
            cluster=Cluster(gpu=self.gpu, gpus_per_node=self.num_gpus),
            search=Search(
                tensor_parallel=(1,), pipeline_parallel=(1,), weights=("bf16",), kv=("bf16",), pools=("mixed",)
            ),
        )


def planned(case: SmallCase) -> tuple[dict[str, Any], Demand]:
    """The plan's tree, and the requests that it is about. Raises ConfigError."""
    model = ModelConfig(model=load_engine_config(TARGET).model.model, load_format="dummy")
    problem = case.problem(model.model)
    demand = Demand.drawn(problem.workload, case.num_requests, random.Random(case.seed))
    return plan_tree(Planner(problem, load_shape(resolve_model(model)), demand).plan()), demand


def run(*, case: SmallCase = SmallCase(), json_path: Path | None = None, console: Console | None = None) -> Report:
    """Plan, simulate, serve, compare. Raises EngineFailed when the case has no answer or a request fails."""
    tree, demand = planned(case)
    if not tree["feasible"]:
        raise EngineFailed(f"the case cannot be served as stated: {tree['answer']}")
    simulated = simulate(tree, demand, random.Random(case.seed))
    records = asyncio.run(_live(tree, demand, case))
    live = live_figures(records)
    best = tree["best"]
    report = Report(
        "plan_live",
        model={"target": TARGET, "device": f"sim:{case.gpu}", "placement": best["placement"]},
        workload={
            "rate_per_s": case.rate,
            "requests": case.num_requests,
            "mean_prompt_tokens": round(demand.num_prompt_tokens, 1),
            "mean_output_tokens": round(demand.num_output_tokens, 1),
            "seed": case.seed,
        },
    )
    report.figures["utilization"] = best["utilization"]
    for name in FIGURES:
        report.figures[f"planned_{name}"] = best[name]
        report.figures[f"simulated_{name}"] = simulated[name]
        report.figures[f"live_{name}"] = live[name]
        report.figures[f"live_over_planned_{name.removesuffix('_s')}"] = live[name] / best[name]
        report.figures[f"live_over_simulated_{name.removesuffix('_s')}"] = live[name] / simulated[name]
    report.figures["failed"] = sum(not record.ok for record in records)
    report.finish(None, json_path)
    if console is not None:
        console.print(_table(best, simulated, live))
    return report


def live_figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Of requests in the order in which they were due, without the first ones."""
    kept = records[int(WARM_UP * len(records)) :]
    ttfts = sorted(record.ttft_s for record in kept if record.ttft_s is not None)
    tpots = sorted(record.tpot_s for record in kept if record.tpot_s is not None)
    times = (("ttft", ttfts), ("tpot", tpots))
    return {f"{name}_p{percent}_s": quantile(values, percent) for name, values in times for percent in (50, 95)}


async def _live(tree: dict[str, Any], demand: Demand, case: SmallCase) -> list[RequestRecord]:
    [pool] = tree["best"]["pools"]
    settings: dict[str, object] = {
        "device": f"sim:{case.gpu}",
        "max_num_seqs": pool["max_num_seqs"],
        "max_num_batched_tokens": pool["max_num_batched_tokens"],
        "block_size": tree["search"]["block_size"],
        "serving.num_replicas": pool["num_replicas"],
    }
    if pool["tpot_target_s"] is not None:
        settings["tpot_target_ms"] = pool["tpot_target_s"] * 1e3
    overrides = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    (port,) = free_ports(1)
    command = manta_command("serve", TARGET, "--port", str(port), *overrides)
    async with running(command, f"http://127.0.0.1:{port}") as server:
        client = HttpClient(server.url)
        target = await find_target(client)
        warm_up = uniform(WARM_UP_REQUESTS, 64, 8, vocab_size=VOCAB_SIZE, seed=case.seed + 1)
        await closed_loop(client, target, warm_up, concurrency=8)
        items = [
            Item(token_ids(one.num_prompt_tokens, VOCAB_SIZE, 3_000_000 + index), one.num_output_tokens, one.arrival_s)
            for index, one in enumerate(demand.requests)
        ]
        records = await _open_loop(client, target, items)
        await client.close()
    failed = [record.error for record in records if not record.ok]
    if failed:
        raise EngineFailed(f"{len(failed)} of {len(records)} requests failed, the first with {failed[0]}")
    return sorted(records, key=lambda record: record.due_s)


async def _open_loop(client: HttpClient, target: Target, items: Sequence[Item]) -> list[RequestRecord]:
    """Send each item when it is due. Asks for token ids: random tokens are often halves of characters, whose text comes
    with a later token, while planner and simulator speak of tokens."""
    begin_s = time.monotonic() + 0.05

    async def send(item: Item) -> RequestRecord:
        due_s = begin_s + item.arrival_s
        await asyncio.sleep(due_s - time.monotonic())
        record = RequestRecord(due_s, len(item.prompt_token_ids), item.max_tokens)
        reader = StreamReader(record)
        body = {"model": target.model, "prompt": item.prompt_token_ids, "max_tokens": item.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        body["stream_options"] = {"include_usage": True}
        reply = await client.request("POST", "/v1/completions", json.dumps(body).encode(), on_body=reader.feed)
        record.finished_s = time.monotonic()
        record.error = f"http_{reply.status}" if reply.status != 200 else reader.problem()
        return record

    return await asyncio.gather(*map(send, items))


def _table(best: dict[str, Any], simulated: dict[str, float], live: dict[str, float]) -> Table:
    title = f"{best['placement']} at {best['rate']:g} requests/s, utilization {best['utilization']:.2f}"
    shown = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in ("figure", "planned ms", "simulated ms", "live ms", "live / planned"):
        shown.add_column(column, justify="left" if column == "figure" else "right")
    for name in FIGURES:
        values = best[name], simulated[name], live[name]
        shown.add_row(
            name.removesuffix("_s"), *(f"{value * 1e3:.1f}" for value in values), f"{live[name] / best[name]:.3f}"
        )
    return shown
