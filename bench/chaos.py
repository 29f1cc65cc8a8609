"""`manta chaos`: load, one fault after the other, and whether any client noticed. Joins load, faults and system.

Failed requests, altered outputs, leaked blocks, actors and placement groups must all be zero in the report, and every
kind of fault must have been seen to happen.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manta.deploy.config import DeployConfig
from manta.deploy.serve import num_ranks_of
from manta.engine.config import with_overrides

from .chaos_faults import FaultRecord, inject
from .chaos_load import Load, make_bodies
from .chaos_system import ChaosFailed, ChaosSystem, Held
from .node_lab import NodeLab

NUM_BODIES = 24
SETTLE_S = 1.0
"""Undisturbed load between two faults."""
IDLE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ChaosPlan:
    """What a run does."""

    minutes: float
    seed: int
    faults: tuple[str, ...]
    num_nodes: int = 0
    """Nodes for engines, each with room for one replica; 0: no nodes, just processes."""
    num_streams: int = 16
    max_tokens: int = 240


@dataclass
class ChaosReport:
    """What came of it."""

    seed: int
    seconds: float = 0.0
    requests: int = 0
    disconnects: int = 0
    tokens: int = 0
    moved_requests: int = 0
    longest_gap_s: float = 0.0
    """The longest time that a client waited between two events of a stream."""
    faults: dict[str, int] = field(default_factory=dict)
    """How many of each kind really happened."""
    fault_log: list[FaultRecord] = field(default_factory=list)
    failed_requests: int = 0
    altered_outputs: int = 0
    leaked_blocks: int = 0
    leaked_actors: int = 0
    leaked_placement_groups: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nobody noticed anything and nothing was left."""
        numbers = (self.failed_requests, self.altered_outputs)
        leaks = (self.leaked_blocks, self.leaked_actors, self.leaked_placement_groups)
        return not any(numbers) and not any(leaks) and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "clean": self.is_clean, "by_kind": self.by_kind()}

    def by_kind(self) -> dict[str, dict[str, float | None]]:
        """Median and worst seconds of each kind of fault."""
        found: dict[str, dict[str, float | None]] = {}
        for kind in self.faults:
            records = [record for record in self.fault_log if record.kind == kind]
            row: dict[str, float | None] = {}
            for name in ("out_of_routing_s", "serving_again_s"):
                times = [seconds for record in records if (seconds := getattr(record, name)) is not None]
                row[name] = statistics.median(times) if times else None
                row[f"worst_{name}"] = max(times, default=None)
            found[kind] = row
        return found


def run(config: DeployConfig, plan: ChaosPlan, *, say: Callable[[str], None], logs_dir: Path) -> ChaosReport:
    """One run from start to end; blocks. Raises what a start raises; whatever happens later is in the report."""
    lab = None
    if plan.num_nodes:
        config = with_overrides(config, {"serving.node_labels": {"role": "engine"}})
        lab = NodeLab(plan.num_nodes, cpus_per_node=num_ranks_of(config.engine))
    system = ChaosSystem(config, lab)
    report = ChaosReport(plan.seed)
    try:
        say(f"starting {system.num_replicas} replicas")
        system.start()
        asyncio.run(_disturb(system, plan, report, say))
        _count_leaks(system, report)
        if not report.is_clean and (kept := system.keep_logs(logs_dir)) is not None:
            say(f"logs: {kept}")
    finally:
        num_processes = system.close()
    if num_processes:
        report.problems.append(f"{num_processes} processes were left at the end")
    return report


def write(report: ChaosReport, path: Path) -> None:
    """The report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_json(), indent=1) + "\n")


def fault_order(faults: Sequence[str], rng: random.Random) -> list[str]:
    """One round: every kind once, in random order."""
    return rng.sample(list(faults), len(faults))


async def _disturb(system: ChaosSystem, plan: ChaosPlan, report: ChaosReport, say: Callable[[str], None]) -> None:
    rng = random.Random(plan.seed)
    name = system.model_name()
    bodies = make_bodies(name, count=NUM_BODIES, seed=plan.seed, max_tokens=plan.max_tokens)
    load = Load(system.url, bodies, num_streams=plan.num_streams, seed=plan.seed)
    report.problems += [f"undisturbed: {problem}" for problem in await load.learn()]
    if report.problems:
        return
    say(f"{len(bodies)} different answers are known; {plan.num_streams} streams for {plan.minutes:g} minutes")
    start_s = time.monotonic()
    load.start()
    try:
        await _inject_all(system, plan, report, rng, start_s, say)
    except ChaosFailed as error:
        report.problems.append(str(error))
    await load.stop()
    counts = load.counts
    report.seconds = round(time.monotonic() - start_s, 1)
    report.requests, report.disconnects, report.tokens = counts.requests, counts.disconnects, counts.tokens
    report.failed_requests, report.altered_outputs = counts.failed, counts.altered
    report.longest_gap_s = round(counts.longest_gap_s, 3)
    report.moved_requests = sum(record.moved_requests for record in report.fault_log)
    report.problems += counts.problems


async def _inject_all(
    system: ChaosSystem,
    plan: ChaosPlan,
    report: ChaosReport,
    rng: random.Random,
    start_s: float,
    say: Callable[[str], None],
) -> None:
    until_s = start_s + 60 * plan.minutes
    while time.monotonic() < until_s or len(report.fault_log) < len(plan.faults):
        for kind in fault_order(plan.faults, rng):
            await asyncio.sleep(SETTLE_S)
            record = await asyncio.to_thread(inject, system, kind, rng, since_s=start_s)
            report.fault_log.append(record)
            say(
                f"{record.at_s:7.1f} s  {kind}: {record.what}; out of routing after {record.out_of_routing_s} s, all "
                f"serving after {record.serving_again_s} s, {record.moved_requests} requests moved"
            )
            _judge(record, report)
            if time.monotonic() >= until_s and len(report.fault_log) >= len(plan.faults):
                return


def _judge(record: FaultRecord, report: ChaosReport) -> None:
    if record.happened:
        report.faults[record.kind] = report.faults.get(record.kind, 0) + 1
    else:
        report.problems.append(f"{record.kind} at {record.at_s} s did not happen: {record.what}")
    if record.out_of_routing_s is None or record.serving_again_s is None:
        report.problems.append(f"{record.kind} at {record.at_s} s: the system did not recover")
    if not record.least_ready:
        report.problems.append(f"{record.kind} at {record.at_s} s: no replica was ready for a while")


def _count_leaks(system: ChaosSystem, report: ChaosReport) -> None:
    """When the load has ended, whatever is still held after a while is lost."""
    held: Held = system.held()
    until_s = time.monotonic() + IDLE_TIMEOUT_S
    while not held.is_nothing and time.monotonic() < until_s:
        time.sleep(0.5)
        held = system.held()
    report.leaked_blocks, report.leaked_actors = held.blocks, held.actors
    report.leaked_placement_groups = held.placement_groups


def summary(report: ChaosReport) -> list[str]:
    """The report for people."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in report.faults.items()) or "none"
    lines = [
        f"{report.requests} requests ({report.disconnects} more were left by their clients), {report.tokens} tokens in "
        f"{report.seconds:g} s; faults: {kinds}; {report.moved_requests} requests moved, longest pause of a stream "
        f"{report.longest_gap_s:g} s",
        f"failed requests {report.failed_requests}, altered outputs {report.altered_outputs}, leaked blocks "
        f"{report.leaked_blocks}, leaked actors {report.leaked_actors}, leaked placement groups "
        f"{report.leaked_placement_groups}",
    ]
    return [*lines, *(f"problem: {problem}" for problem in report.problems)]
