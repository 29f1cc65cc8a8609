"""`manta chaos --pools`: load over prefill and decode engines, faults at either side and on the link between them.

Every answer is compared with that of the decode engines alone, before there were faults and hand-overs. After each
fault a request must be handed over again, and at the end neither side may hold a block, a lease or a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manta.cluster.routing.roles import Role
from manta.deploy.config import DeployConfig

from .chaos_load import Load, ask, make_bodies
from .http_client import HttpClient
from .pool_lab import PoolLab, PoolLabFailed, is_gone, kill

NUM_BODIES = 24
SETTLE_S = 1.0
"""Undisturbed load between two faults."""
FAULT_S = 3.0
"""How long a link is broken."""
IDLE_TIMEOUT_S = 60.0
CATCH_S = 10.0
"""How long a moment is waited for at which KV is on its way."""
SLOW_BYTES_S = 200_000
SLOW_LATENCY_S = 0.05
NUM_LEAVERS = 16


@dataclass(frozen=True)
class PoolChaosPlan:
    """What a run does."""

    minutes: float
    seed: int
    faults: tuple[str, ...]
    min_requests: int = 0
    """It goes on until so many were answered, however long that takes."""
    num_streams: int = 8
    max_tokens: int = 60
    longest_prompt: int = 30
    """In repetitions of a phrase of about four tokens."""


@dataclass(frozen=True)
class PoolFault:
    """One fault, and how it went. Times in seconds."""

    kind: str
    at_s: float
    what: str
    happened: bool
    """Seen by other means than Manta's own reaction."""
    leases_at_fault: int
    """Transfers that were under way when it hit, as far as the edge knew."""
    recovered_s: float | None
    """From its end until a new request was handed over and answered; None: never."""


@dataclass
class PoolChaosReport:
    """What came of it."""

    device: str
    seed: int
    num_prefill: int
    num_decode: int
    seconds: float = 0.0
    requests: int = 0
    disconnects: int = 0
    tokens: int = 0
    failed_requests: int = 0
    altered_outputs: int = 0
    longest_gap_s: float = 0.0
    handoffs: dict[str, int] = field(default_factory=dict)
    """By outcome."""
    transfers: int = 0
    """Hand-overs whose KV came and was used."""
    recomputed: int = 0
    """Those whose KV did not come in time: the price of a fault."""
    transferred_bytes: int = 0
    moved_requests: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    """How many of each kind really happened."""
    fault_log: list[PoolFault] = field(default_factory=list)
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    """What each side holds at the end."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every answer was right and nothing was left."""
        leaks = [number for side in self.left.values() for number in side.values()]
        return bool(self.left) and not any((self.failed_requests, self.altered_outputs, *leaks)) and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "clean": self.is_clean}


@dataclass(frozen=True)
class Damage:
    """What was done, and how it is undone."""

    what: str
    has_happened: Callable[[], bool]
    repair: Callable[[], None]


def kill_prefill(lab: PoolLab, rng: random.Random) -> Damage:
    """SIGKILL an engine that computes prompts, while KV is on its way."""
    return _kill(lab, rng, Role.PREFILL)


def kill_decode(lab: PoolLab, rng: random.Random) -> Damage:
    """SIGKILL an engine that decodes, while KV is on its way."""
    return _kill(lab, rng, Role.DECODE)


def cut_link(lab: PoolLab, rng: random.Random) -> Damage:
    """All connections between engines break, and none can be made for a while."""
    before, passed = lab.links.num_connections, lab.links.num_bytes
    lab.links.cut()
    time.sleep(FAULT_S)
    during = lab.links.num_connections
    return Damage(
        f"{before} connections with {passed} bytes behind them were cut for {FAULT_S:g} s",
        lambda: before > 0 and during == 0,
        lab.links.heal,
    )


def silent_link(lab: PoolLab, rng: random.Random) -> Damage:
    """Nothing passes between engines, and nobody is told."""
    lab.links.silence()
    time.sleep(0.2)  # what was on its way
    before = lab.links.num_bytes
    time.sleep(FAULT_S)
    during, connections = lab.links.num_bytes - before, lab.links.num_connections
    return Damage(
        f"{connections} connections were silent for {FAULT_S:g} s",
        lambda: connections > 0 and during == 0,
        lab.links.heal,
    )


def slow_link(lab: PoolLab, rng: random.Random) -> Damage:
    """Transfers take much longer than usual."""
    before, start_s = lab.links.num_bytes, time.monotonic()
    lab.links.slow(bytes_s=SLOW_BYTES_S, latency_s=SLOW_LATENCY_S)
    time.sleep(2 * FAULT_S)
    passed, took_s = lab.links.num_bytes - before, time.monotonic() - start_s
    rate = passed / took_s
    most = SLOW_BYTES_S * 2 * max(1, lab.links.num_connections)
    return Damage(
        f"{passed} bytes in {took_s:.1f} s at {SLOW_BYTES_S / 1e3:g} kB/s a connection and way",
        lambda: 0 < rate <= most,
        lab.links.heal,
    )


def cancel_in_transfer(lab: PoolLab, rng: random.Random) -> Damage:
    """Clients leave while their KV is on its way, on a link that is slow enough for it to be."""
    before = lab.metric("manta_engine_cancelled_total")
    leases = 0
    lab.links.slow(bytes_s=SLOW_BYTES_S, latency_s=SLOW_LATENCY_S)
    try:
        leases = asyncio.run(_leave(lab, rng))
    finally:
        lab.links.heal()

    with contextlib.suppress(PoolLabFailed):  # an engine may be in a step when they leave
        lab.wait(lambda: lab.metric("manta_engine_cancelled_total") > before, "a cancellation", timeout_s=15.0)
    cancelled = int(lab.metric("manta_engine_cancelled_total") - before)
    return Damage(
        f"{NUM_LEAVERS} clients left, {cancelled} cancellations, up to {leases} transfers were under way",
        lambda: leases > 0 and cancelled > 0,
        lambda: None,
    )


FAULTS: dict[str, Callable[[PoolLab, random.Random], Damage]] = {
    "kill_prefill": kill_prefill,
    "kill_decode": kill_decode,
    "cut_link": cut_link,
    "silent_link": silent_link,
    "slow_link": slow_link,
    "cancel_in_transfer": cancel_in_transfer,
}


def run(config: DeployConfig, plan: PoolChaosPlan, *, say: Callable[[str], None]) -> PoolChaosReport:
    """One run from start to end; blocks. Raises what a start raises; whatever happens later is in the report."""
    with tempfile.TemporaryDirectory(prefix="manta-pools-") as folder:
        lab = PoolLab(config, Path(folder))
        try:
            lab.start()
            num_prefill, num_decode = len(lab.of(Role.PREFILL)), len(lab.of(Role.DECODE))
            say(f"{num_prefill} prefill and {num_decode} decode engines run")
            report = PoolChaosReport(config.engine.device, plan.seed, num_prefill, num_decode)
            asyncio.run(_disturb(lab, plan, report, say))
        finally:
            lab.close()
    return report


def write(report: PoolChaosReport, path: Path) -> None:
    """The report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_json(), indent=1) + "\n")


def summary(report: PoolChaosReport) -> list[str]:
    """The report for people."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in report.faults.items()) or "none"
    lines = [
        f"{report.requests} requests ({report.disconnects} more were left by their clients), {report.tokens} tokens in "
        f"{report.seconds:g} s; faults: {kinds}; {report.moved_requests} requests moved",
        f"{report.transfers} transfers ({report.transferred_bytes / 1e6:.1f} MB), {report.recomputed} recomputed",
        f"failed requests {report.failed_requests}, altered outputs {report.altered_outputs}, left {report.left}",
    ]
    return [*lines, *(f"problem: {problem}" for problem in report.problems)]


async def _disturb(lab: PoolLab, plan: PoolChaosPlan, report: PoolChaosReport, say: Callable[[str], None]) -> None:
    rng = random.Random(plan.seed)
    await asyncio.to_thread(lab.set_members, Role.DECODE)
    bodies = make_bodies(
        lab.model_name(),
        count=NUM_BODIES,
        seed=plan.seed,
        max_tokens=plan.max_tokens,
        longest_prompt=plan.longest_prompt,
    )
    load = Load(lab.url, bodies, num_streams=plan.num_streams, seed=plan.seed)
    report.problems += [f"undisturbed: {problem}" for problem in await load.learn()]
    if lab.metric("manta_kv_received_total"):
        report.problems.append("something was handed over while there were decode engines only")
    if report.problems:
        return
    await asyncio.to_thread(lab.set_members, Role.PREFILL, Role.DECODE)
    if await asyncio.to_thread(_hand_over, lab, rng) is None:
        report.problems.append("nothing was handed over before the first fault")
        return
    say(f"{len(bodies)} different answers are known from the decode engines alone")
    start_s = time.monotonic()
    load.start()
    try:
        await _inject_all(lab, plan, report, load, rng, start_s, say)
    except PoolLabFailed as error:
        report.problems.append(str(error))
    await load.stop()
    counts = load.counts
    report.seconds = round(time.monotonic() - start_s, 1)
    report.requests, report.disconnects, report.tokens = counts.requests, counts.disconnects, counts.tokens
    report.failed_requests, report.altered_outputs = counts.failed, counts.altered
    report.longest_gap_s = round(counts.longest_gap_s, 3)
    report.problems += counts.problems
    await asyncio.to_thread(_count, lab, report)


async def _inject_all(
    lab: PoolLab,
    plan: PoolChaosPlan,
    report: PoolChaosReport,
    load: Load,
    rng: random.Random,
    start_s: float,
    say: Callable[[str], None],
) -> None:
    until_s = start_s + 60 * plan.minutes

    def is_over() -> bool:
        enough = load.counts.requests >= plan.min_requests and len(report.fault_log) >= len(plan.faults)
        return enough and time.monotonic() >= until_s

    while not is_over():
        for kind in rng.sample(list(plan.faults), len(plan.faults)):
            await asyncio.sleep(SETTLE_S)
            fault = await asyncio.to_thread(_inject, lab, kind, rng, since_s=start_s)
            report.fault_log.append(fault)
            say(f"{fault.at_s:7.1f} s  {kind}: {fault.what}; handed over again after {fault.recovered_s} s")
            if fault.happened:
                report.faults[kind] = report.faults.get(kind, 0) + 1
            else:
                report.problems.append(f"{kind} at {fault.at_s} s did not happen: {fault.what}")
            if fault.recovered_s is None:
                report.problems.append(f"{kind} at {fault.at_s} s: nothing was handed over afterwards")
            if is_over():
                return


def _inject(lab: PoolLab, kind: str, rng: random.Random, *, since_s: float) -> PoolFault:
    leases = _catch_transfer(lab)
    at_s = time.monotonic() - since_s
    damage = FAULTS[kind](lab, rng)
    happened = damage.has_happened()
    damage.repair()
    recovered_s = _hand_over(lab, rng)
    return PoolFault(
        kind, round(at_s, 2), damage.what, happened, leases, None if recovered_s is None else round(recovered_s, 3)
    )


def _catch_transfer(lab: PoolLab) -> int:
    """Wait for a moment at which KV is on its way; how many transfers there are then, 0 when none was seen."""
    until_s = time.monotonic() + CATCH_S
    while time.monotonic() < until_s:
        leases = sum(one.get("num_kv_leases", 0) for one in lab.replicas())
        if leases:
            return leases
        time.sleep(0.005)
    return 0


def _kill(lab: PoolLab, rng: random.Random, role: Role) -> Damage:
    engine = rng.choice(lab.of(role))
    kill(engine, signal.SIGKILL)
    lab.wait(lambda: is_gone(engine), "the killed engine to be gone", timeout_s=5.0)

    def repair() -> None:
        lab.revive(engine)

    return Damage(
        f"SIGKILL to engine {engine.replica_id} (process {engine.process.pid})",
        lambda: engine.process.returncode == -signal.SIGKILL,
        repair,
    )


def _hand_over(lab: PoolLab, rng: random.Random) -> float | None:
    """Seconds until a request of which nothing is cached was answered and KV was taken somewhere; None: not in time."""
    start_s = time.monotonic()
    until_s = start_s + 20.0
    before = lab.metric("manta_kv_received_total")
    while time.monotonic() < until_s:
        prompt = f"{rng.randrange(10**9)} is the number of a story " + "that goes on and on, " * 10
        body = {"model": lab.model_name(), "prompt": prompt, "max_tokens": 4, "stream": False, "ignore_eos": True}
        if asyncio.run(_ask_once(lab, body)) is None and lab.metric("manta_kv_received_total") > before:
            return time.monotonic() - start_s
    return None


async def _ask_once(lab: PoolLab, body: dict[str, Any]) -> str | None:
    client = HttpClient(lab.url)
    try:
        return (await ask(client, body)).error
    finally:
        await client.close()


async def _leave(lab: PoolLab, rng: random.Random) -> int:
    """Clients that leave at random moments; the most transfers that were under way meanwhile."""
    client, name = HttpClient(lab.url), await asyncio.to_thread(lab.model_name)
    most = 0

    async def one() -> None:
        prompt = f"{rng.randrange(10**9)} reasons to leave: " + "none of them is good, " * 20
        body = {"model": name, "prompt": prompt, "max_tokens": 64, "stream": True, "ignore_eos": True}
        asked = asyncio.ensure_future(ask(client, body))
        await asyncio.sleep(rng.uniform(0.02, 1.5))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    leavers = asyncio.gather(*(one() for _ in range(NUM_LEAVERS)))
    while not leavers.done():
        replicas = await asyncio.to_thread(lab.replicas)
        most = max(most, sum(replica.get("num_kv_leases", 0) for replica in replicas))
        await asyncio.sleep(0.02)
    await leavers
    await client.close()
    return most


def _count(lab: PoolLab, report: PoolChaosReport) -> None:
    """When the load has ended: what is still held after a while is lost."""

    def left() -> dict[str, dict[str, int]]:
        return {role.value: lab.held(role) for role in (Role.PREFILL, Role.DECODE)}

    try:
        lab.wait(lambda: not any(n for side in left().values() for n in side.values()), "", timeout_s=IDLE_TIMEOUT_S)
    except PoolLabFailed:
        report.problems.append("something is held though nothing runs")
    report.left = left()
    report.transfers = int(lab.metric("manta_kv_received_total"))
    report.recomputed = int(lab.metric("manta_kv_recomputed_total"))
    report.transferred_bytes = int(lab.metric("manta_kv_bytes_total"))
    report.moved_requests = int(lab.metric("manta_requests_moved_total"))
    report.handoffs = {
        outcome: int(number) for outcome, number in lab.by_label("manta_handoffs_total", "outcome").items()
    }
