"""`manta bench pools`: at equal numbers of GPUs, one pool with chunked prefill against prefill and decode pools.

Simulated, with the real scheduler, caches and routing policy; KV that moves between replicas takes its time on their
links. Each arrangement gets the same requests at the same rates; goodput counts those that keep an SLO.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manta.autoscaling.simulator.fleet import Fleet, Router
from manta.autoscaling.simulator.handoff import KvLink
from manta.autoscaling.simulator.router import PolicyRouter
from manta.autoscaling.simulator.workload import Outcome
from manta.cluster.routing.policy import RoutingSettings
from manta.cluster.routing.roles import Role
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError

from .fleet_run import Hardware, RunFigures, run_fleet
from .report import Report, sayer, write_json
from .routing import Capacity, Setting
from .routing_loads import find_load

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the capacity of one pool: the rates at which arrangements are compared."""
ATTAINED = 0.9
"""The share of requests that must keep an SLO for a rate to count as served."""
LINK_LATENCY_S = 3e-3


@dataclass(frozen=True)
class Slo:
    """Limits in seconds that a good request keeps."""

    ttft_s: float
    tpot_s: float

    @property
    def name(self) -> str:
        return f"ttft {self.ttft_s:g} s, tpot {self.tpot_s * 1e3:g} ms"

    @classmethod
    def parse(cls, text: str) -> list[Slo]:
        """From `0.5:0.02,0.5:0.05`: pairs of seconds. Raises ConfigError."""
        try:
            pairs = [tuple(float(part) for part in pair.split(":")) for pair in text.split(",")]
            return [cls(ttft_s, tpot_s) for ttft_s, tpot_s in pairs]
        except ValueError:
            raise ConfigError(
                f"--slo {text!r}: write pairs of seconds, TTFT:TPOT, as in 0.5:0.02,0.5:0.05", field="--slo"
            ) from None

    def is_met(self, outcome: Outcome) -> bool:
        ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
        in_time = ttft_s is not None and ttft_s <= self.ttft_s
        return in_time and outcome.finished_s is not None and (tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True)
class Arrangement:
    """What the GPUs are used for, one replica on each."""

    num_mixed: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    tpot_target_s: float | None = None
    """Bounds the chunks of prompts beside decodes."""
    always_detours: bool = False
    """Whether every prompt is computed on a prefill replica, instead of where the estimated cost is least."""

    @property
    def name(self) -> str:
        if self.num_mixed:
            bound = "" if self.tpot_target_s is None else f", steps of {self.tpot_target_s * 1e3:g} ms"
            return f"colocated{bound}"
        return f"{self.num_prefill} prefill, {self.num_decode} decode" + (", always" if self.always_detours else "")

    @property
    def roles(self) -> list[Role]:
        return [Role.MIXED] * self.num_mixed + [Role.PREFILL] * self.num_prefill + [Role.DECODE] * self.num_decode


@dataclass(frozen=True)
class Point:
    """One arrangement at one rate, requests a second."""

    arrangement: Arrangement
    rate: float
    figures: RunFigures
    attained: dict[str, float]
    """Share of the requests that kept each SLO."""

    def goodput(self, slo: Slo) -> float:
        """Requests a second that kept it."""
        return self.attained[slo.name] * self.rate


@dataclass(frozen=True)
class Study:
    """What all points have in common."""

    setting: Setting
    link: KvLink
    slos: tuple[Slo, ...]

    def run(self, arrangement: Arrangement, rate: float) -> Point:
        setting = self.setting
        spec = replace(setting.spec, tpot_target_s=arrangement.tpot_target_s)
        roles = arrangement.roles
        settings = RoutingSettings(
            transfer_bytes_s=self.link.bytes_per_s,
            transfer_latency_s=self.link.latency_s,
            transfer_tail=self.link.tail,
            detour_from_tokens=1 if arrangement.always_detours else None,
        )

        def routers(fleet: Fleet) -> list[Router]:
            views = [
                setting.hardware.view(replica_id, spec, role=role)
                for replica_id, role in zip(fleet.replicas, roles, strict=True)
            ]
            return [PolicyRouter(views, settings=settings)]

        figures, outcomes = run_fleet(setting.load.at_rate(rate), [spec] * len(roles), routers, link=self.link)
        attained = {slo.name: sum(map(slo.is_met, outcomes)) / len(outcomes) for slo in self.slos}
        return Point(arrangement, rate, figures, attained)


def arrangements(num_gpus: int, slos: Sequence[Slo]) -> Iterator[Arrangement]:
    """One pool with whole steps and with steps as short as each SLO's TPOT asks for; splits from 1/8 to 4/8 prefill,
    whose decode replicas bound the prompts that skip the detour, if any may, by the shortest of these."""
    targets_s = sorted({slo.tpot_s for slo in slos})
    yield Arrangement(num_mixed=num_gpus)
    for tpot_s in targets_s:
        yield Arrangement(num_mixed=num_gpus, tpot_target_s=tpot_s)
    for num_prefill in sorted({num_gpus * eighths // 8 for eighths in range(1, 5)} - {0}):
        split = Arrangement(num_prefill=num_prefill, num_decode=num_gpus - num_prefill, tpot_target_s=targets_s[0])
        yield split
        yield replace(split, always_detours=True)


def run(
    config: EngineConfig,
    *,
    trace: str,
    num_gpus: int = 8,
    gpu: str = "h200",
    shares: Sequence[float] = SHARES,
    slos: Sequence[Slo],
    link_gb_s: float = 50.0,
    num_requests: int | None = None,
    num_processes: int = 1,
    json_path: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Goodput of every arrangement over rates. Returns what is written. Raises ConfigError."""
    say, begin_s = sayer(console), time.monotonic()
    hardware = Hardware.of(config, gpu)
    load = find_load(trace, limit=num_requests, longest=min(131_072, hardware.kv_room_tokens))
    setting = Setting(load, hardware, num_gpus)
    link = KvLink(float(hardware.step_times.kv_bytes_per_token), link_gb_s * 1e9, LINK_LATENCY_S)
    study = Study(setting, link, tuple(slos))
    capacity = Capacity.measure(setting)
    say(f"{load.name}: {len(load.requests)} requests; one pool of {num_gpus} completes {capacity.per_s:.2f} a second")
    jobs = [(one, share * capacity.per_s) for one in arrangements(num_gpus, slos) for share in shares]
    points: list[Point] = []
    with ProcessPoolExecutor(num_processes) as pool:
        for point in pool.map(study.run, [one for one, _ in jobs], [rate for _, rate in jobs]):
            points.append(point)
            kept = ", ".join(f"{share:.0%}" for share in point.attained.values())
            say(f"  {point.arrangement.name}, {point.rate:.2f}/s: kept {kept}")
    report = Report(
        "pools",
        model=hardware.describe(),
        workload={
            "trace": load.name,
            "requests": len(load.requests),
            "mean_prompt_tokens": round(load.mean_prompt_tokens, 1),
            "mean_output_tokens": round(load.mean_output_tokens, 1),
            "gpus": num_gpus,
            "link_gb_s": link_gb_s,
            "capacity_of_one_pool_per_s": round(capacity.per_s, 3),
        },
        details={"simulation_took_s": round(time.monotonic() - begin_s, 1)},
    )
    tree = report.tree() | {
        "slos": {
            slo.name: {
                "goodput_per_s": {kind: _best(points, slo, kind) for kind in ("colocated", "pools")},
                "served_rate_per_s": {kind: _served(points, slo, kind) for kind in ("colocated", "pools")},
            }
            for slo in slos
        },
        "points": [_tree(point) for point in points],
    }
    if json_path is not None:
        write_json(json_path, tree)
    if console is not None:
        for slo in slos:
            console.print(table(points, slo, title=f"{load.name}, {num_gpus} GPUs: goodput at {slo.name}"))
    return tree


def _kind(arrangement: Arrangement) -> str:
    return "colocated" if arrangement.num_mixed else "pools"


def _best(points: Sequence[Point], slo: Slo, kind: str) -> dict[str, Any]:
    """By rate, the arrangement of this kind with the most requests a second that keep the SLO."""
    best: dict[float, Point] = {}
    for point in points:
        if _kind(point.arrangement) == kind:
            before = best.get(point.rate)
            if before is None or point.goodput(slo) > before.goodput(slo):
                best[point.rate] = point
    return {
        f"{rate:.2f}": {"goodput_per_s": round(point.goodput(slo), 3), "arrangement": point.arrangement.name}
        for rate, point in sorted(best.items())
    }


def _served(points: Sequence[Point], slo: Slo, kind: str) -> dict[str, Any]:
    """The highest rate at which enough requests keep the SLO, linear between the rates that were run."""
    found: dict[str, float] = {}
    for arrangement in dict.fromkeys(point.arrangement for point in points if _kind(point.arrangement) == kind):
        curve = [(point.rate, point.attained[slo.name]) for point in points if point.arrangement == arrangement]
        found[arrangement.name] = _crossing([(0.0, 1.0), *sorted(curve)])
    best = max(found, key=lambda name: found[name])
    return {"rate_per_s": round(found[best], 3), "arrangement": best}


def _crossing(curve: Sequence[tuple[float, float]]) -> float:
    for (rate_0, share_0), (rate_1, share_1) in itertools.pairwise(curve):
        if share_1 < ATTAINED:
            return rate_0 + (rate_1 - rate_0) * (share_0 - ATTAINED) / (share_0 - share_1)
    return curve[-1][0]


def _tree(point: Point) -> dict[str, Any]:
    kept = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "itl_p99_s", "prefix_hit_rate", "num_detours")
    figures = {name: value for name, value in asdict(point.figures).items() if name in kept}
    return {
        "arrangement": point.arrangement.name,
        "rate_per_s": round(point.rate, 3),
        **{name: float(f"{value:.4g}") for name, value in figures.items()},
        "attained": {name: round(share, 4) for name, share in point.attained.items()},
    }


def table(points: Sequence[Point], slo: Slo, *, title: str) -> Table:
    rates = sorted({point.rate for point in points})
    shown = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("arrangement")
    for rate in rates:
        shown.add_column(f"{rate:.1f}/s", justify="right")
    for arrangement in dict.fromkeys(point.arrangement for point in points):
        row = {point.rate: point.goodput(slo) for point in points if point.arrangement == arrangement}
        shown.add_row(arrangement.name, *(f"{row[rate]:.2f}" for rate in rates))
    return shown
