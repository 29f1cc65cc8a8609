"""`manta bench routing-live`: routing by prefixes over HTTP beside the same load on the simulator, and what it costs.

Knows the command line, the HTTP API and the simulator. Starts `manta serve` with simulated replicas behind several
edges, sends requests that share prefixes, and compares the share of prompt tokens that were cached with what the
discrete-event simulator says for the same requests at the same times.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from rich.console import Console

from manta.autoscaling.simulator.fleet import Fleet
from manta.autoscaling.simulator.replica import ReplicaSpec
from manta.autoscaling.simulator.router import PolicyRouter
from manta.autoscaling.simulator.workload import SimRequest
from manta.cluster.routing.replica_view import ReplicaView
from manta.deploy.checks import free_ports
from manta.engine.errors import EngineFailed
from manta.engine.prefix_cache import BlockHasher
from manta.engine.step_costs import StepCosts
from manta.engine.step_time import StepShape

from .fleet_run import run_fleet
from .http_client import HttpClient
from .load import Target, closed_loop, find_target
from .report import Report
from .server_process import manta_command, running
from .stats import Summary
from .workloads import Item, token_ids, uniform

VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class Served:
    """The simulated replicas, as `manta serve` and the simulator have them."""

    step_ms: int = 20
    num_replicas: int = 4
    num_edges: int = 2
    max_num_seqs: int = 32
    tokens_a_step: int = 256
    block_size: int = 16
    num_blocks: int = 1024
    """Of one replica: room for about 15 prefixes."""

    def settings(self) -> dict[str, object]:
        """For `--set`."""
        return {
            "device": f"sim:{self.step_ms}ms",
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.tokens_a_step,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "serving.num_replicas": self.num_replicas,
            "serving.num_edges": self.num_edges,
        }

    def predict(self, step: StepShape) -> float:
        """Every step takes the same time."""
        return self.step_ms / 1e3 if step.num_prefill_tokens + step.num_decode_seqs else 0.0


@dataclass(frozen=True)
class PrefixLoad:
    """Requests that begin with one of some prefixes, the k-th 1 / k ** exponent as often as the first."""

    num_requests: int = 400
    num_prefixes: int = 40
    exponent: float = 1.0
    prefix_len: int = 1024
    suffix_len: int = 48
    output_len: int = 8
    rate_per_s: float = 12.0
    seed: int = 0

    def items(self) -> list[Item]:
        """With Poisson arrivals."""
        chance, at_s = random.Random(self.seed), 0.0
        cumulated = list(accumulate(1 / rank**self.exponent for rank in range(1, self.num_prefixes + 1)))
        prefixes = [token_ids(self.prefix_len, VOCAB_SIZE, 1_000_000 + k) for k in range(self.num_prefixes)]
        items = []
        for index in range(self.num_requests):
            at_s += chance.expovariate(self.rate_per_s)
            draw = chance.random() * cumulated[-1]
            prefix = next(k for k, bound in enumerate(cumulated) if draw <= bound)
            suffix = token_ids(self.suffix_len, VOCAB_SIZE, 2_000_000 + self.seed * 100_000 + index)
            items.append(Item(prefixes[prefix] + suffix, self.output_len, at_s))
        return items


def simulated_hit_rate(items: Sequence[Item], served: Served) -> float:
    """Share of prompt tokens that the simulator's fleet finds cached."""
    hasher = BlockHasher(served.block_size, domain="bench")
    requests = []
    for index, item in enumerate(items):
        hashes: list[bytes] = []
        hasher.extend(hashes, item.prompt_token_ids, salt=None)
        requests.append(
            SimRequest(f"{index}", item.arrival_s, len(item.prompt_token_ids), item.max_tokens, tuple(hashes))
        )
    spec = ReplicaSpec(
        served.predict,
        served.num_blocks,
        served.block_size,
        max_num_seqs=served.max_num_seqs,
        max_num_batched_tokens=served.tokens_a_step,
    )
    figures, _ = run_fleet(requests, [spec] * served.num_replicas, lambda fleet: _routers(fleet, served))
    return figures.prefix_hit_rate


async def live_hit_rate(client: HttpClient, target: Target, items: Sequence[Item]) -> float:
    """The same as the served engines report it, request by request. Raises EngineFailed when one is not answered."""
    begin_s = time.monotonic() + 0.05
    counts: list[tuple[int, int]] = []

    async def send(item: Item) -> None:
        await asyncio.sleep(begin_s + item.arrival_s - time.monotonic())
        body = {"model": target.model, "prompt": item.prompt_token_ids, "max_tokens": item.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        reply = await client.request("POST", "/v1/completions", json.dumps(body).encode())
        if reply.status != 200:
            raise EngineFailed(f"A request of the measurement got {reply.status}: {reply.body[:200]!r}")
        usage = json.loads(reply.body)["usage"]
        counts.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(send(item))
    return sum(cached for cached, _ in counts) / sum(prompt for _, prompt in counts)


def run(
    *,
    served: Served = Served(),
    load: PrefixLoad = PrefixLoad(),
    num_single: int = 60,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure and report. `num_single` requests, one after the other, show the time to first token: through all
    replicas and edges with routing by prefix, and through one of each without. Raises ServerDied."""
    report = Report(
        "routing_live",
        model={"target": "sim-h200", "device": f"sim:{served.step_ms}ms"},
        workload={**vars(load), **vars(served), "num_single": num_single},
    )
    items = load.items()
    report.figures["simulated_prefix_hit_rate"] = simulated_hit_rate(items, served)
    asyncio.run(_measure(served, items, num_single, report))
    figures = report.figures
    figures["hit_rate_difference_points"] = 100 * (figures["prefix_hit_rate"] - figures["simulated_prefix_hit_rate"])
    figures["routing_adds_ttft_median_ms"] = figures["ttft_median_ms"] - figures["plain_ttft_median_ms"]
    report.finish(console, json_path)
    return report


async def _measure(served: Served, items: Sequence[Item], num_single: int, report: Report) -> None:
    plain = {"serving.num_replicas": 1, "serving.num_edges": 1, "serving.routing.prefix": False}
    single = uniform(num_single, 1024, 2, vocab_size=VOCAB_SIZE, seed=7)
    for name, settings in (("", served.settings()), ("plain_", {**served.settings(), **plain})):
        (port,) = free_ports(1)
        overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = manta_command("serve", "sim-h200", "--port", str(port), *overrides)
        async with running(command, f"http://127.0.0.1:{port}") as server:
            client = HttpClient(server.url)
            target = replace(await find_target(client), has_event_a_token=True)
            await closed_loop(client, target, uniform(32, 64, 8, vocab_size=VOCAB_SIZE, seed=8), concurrency=8)
            await asyncio.sleep(2.0)
            records = (await closed_loop(client, target, single, concurrency=1)).records
            ttfts_s = [record.ttft_s for record in records if record.ttft_s is not None]
            report.figures |= Summary.of(ttfts_s).figures(f"{name}ttft")
            if not name:
                report.figures["prefix_hit_rate"] = await live_hit_rate(client, target, items)
                report.figures["decision_mean_us"] = 1e6 * await _mean(client, "manta_routing_decision_seconds")
                report.figures["actual_to_estimated_mean"] = await _mean(client, "manta_routing_actual_to_estimated")
            await client.close()


async def _mean(client: HttpClient, name: str) -> float:
    """Of a histogram of the edge that answers."""
    text = (await client.request("GET", "/metrics")).body.decode()
    sums = [re.search(rf"^{name}_{part}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for part in ("sum", "count")]
    total, count = (float(found[1]) if found else 0.0 for found in sums)
    return total / count if count else 0.0


def _routers(fleet: Fleet, served: Served) -> list[PolicyRouter]:
    costs = StepCosts.of(served.predict)

    def views() -> list[ReplicaView]:
        return [
            ReplicaView(
                replica_id,
                block_size=served.block_size,
                num_blocks=served.num_blocks,
                max_num_seqs=served.max_num_seqs,
                tokens_a_step=served.tokens_a_step,
                costs=costs,
            )
            for replica_id in fleet.replicas
        ]

    return [
        PolicyRouter(views(), seed=edge, place=edge, num_edges=served.num_edges) for edge in range(served.num_edges)
    ]
