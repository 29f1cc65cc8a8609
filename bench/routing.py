"""`manta bench routing`: what routing policies make of a load, on a simulated fleet of real schedulers and caches.

Every policy sees the same requests at the same times. Those with parameters are tried with each of some, on a part of
the load, and run with the best by the 95th percentile of the time to first token; Manta's own has its defaults only.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manta.autoscaling.simulator.fleet import Fleet, Router
from manta.autoscaling.simulator.replica import ReplicaSpec
from manta.autoscaling.simulator.router import PolicyRouter
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError

from .fleet_run import Hardware, RunFigures, Saturating, run_fleet
from .report import Report, sayer, write_json
from .routing_loads import Load, find_load
from .routing_policies import MEASURES, BoundedLoadHash, LeastLoaded, Oracle, PowerOfTwo, RoundRobin

POLICIES = ("manta", "round_robin", "least_loaded", "power_of_two", "bounded_load_hash", "oracle")
HASH_BLOCKS = (1, 4, 16)
HASH_FACTORS = (1.1, 1.25, 1.5)
ORACLE_CARES = (0.0, 1.0)
SWEEP_REQUESTS, CAPACITY_REQUESTS, SMALL_REPLICAS = 1500, 4000, 8
"""At most so many, of the load's beginning, while parameters are tried and while capacity is measured."""
OVERLOAD = 1.5
"""Of the rate that simple routing completes: what is offered while the fleet's capacity is measured."""


@dataclass(frozen=True)
class Variant:
    """A policy with its parameters."""

    policy: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in self.parameters)
        return f"{self.policy} ({given})" if given else self.policy


@dataclass(frozen=True)
class Setting:
    """Where policies are compared."""

    load: Load
    hardware: Hardware
    num_replicas: int
    num_edges: int = 1

    def smaller(self, num_requests: int) -> Setting:
        """The first so many requests, on a few replicas."""
        first = replace(self.load, requests=self.load.requests[:num_requests])
        return replace(self, load=first, num_replicas=min(self.num_replicas, SMALL_REPLICAS))

    @property
    def spec(self) -> ReplicaSpec:
        return self.hardware.spec(self.load.block_size)


def variants(policy: str) -> Iterator[Variant]:
    """The parameters that a policy is tried with. Raises ConfigError for an unknown one."""
    match policy:
        case "manta" | "round_robin":
            yield Variant(policy)
        case "least_loaded" | "power_of_two":
            yield from (Variant(policy, (("measure", measure),)) for measure in MEASURES)
        case "bounded_load_hash":
            for num_blocks, factor in itertools.product(HASH_BLOCKS, HASH_FACTORS):
                yield Variant(policy, (("num_blocks", num_blocks), ("factor", factor)))
        case "oracle":
            yield from (Variant(policy, (("care", care),)) for care in ORACLE_CARES)
        case _:
            raise ConfigError(f"--policies {policy!r}: must be of {', '.join(POLICIES)}", field="--policies")


def make_router(variant: Variant, setting: Setting, fleet: Fleet, *, edge: int = 0) -> Router:
    ids, given, spec, hardware = list(fleet.replicas), dict(variant.parameters), setting.spec, setting.hardware
    match variant.policy:
        case "manta":
            views = [hardware.view(replica_id, spec) for replica_id in ids]
            return PolicyRouter(views, seed=edge, place=edge, num_edges=setting.num_edges)
        case "round_robin":
            return RoundRobin(ids)
        case "least_loaded":
            return LeastLoaded(ids, **given, seed=edge)
        case "power_of_two":
            return PowerOfTwo(ids, **given, seed=edge)
        case "bounded_load_hash":
            return BoundedLoadHash(ids, **given)
        case _:
            tokens_a_step = spec.max_num_batched_tokens
            oracle = Oracle(
                fleet.replicas, hardware.costs, tokens_a_step=tokens_a_step, block_size=spec.block_size, **given
            )
            fleet.on_step = oracle.saw
            return oracle


def run_variant(setting: Setting, variant: Variant, rate: float) -> RunFigures:
    """One policy with one set of parameters at one rate, requests a second."""
    num_edges = 1 if variant.policy == "oracle" else setting.num_edges
    figures, _ = run_fleet(
        setting.load.at_rate(rate),
        [setting.spec] * setting.num_replicas,
        lambda fleet: [make_router(variant, setting, fleet, edge=edge) for edge in range(num_edges)],
    )
    return figures


def capacity_per_s(setting: Setting, variant: Variant | None = None, *, offered: float | None = None) -> float:
    """Requests a second that the fleet completes when more come than it can take, while the third to the eighth tenth
    of them end: when it is full, and before it runs empty. Without a policy: each replica always has a few that wait,
    and nobody looks at prefixes."""
    if variant is None:
        requests, make = setting.load.at_once(), lambda fleet: [Saturating(fleet)]
    else:
        assert offered is not None
        requests, make = setting.load.at_rate(offered), lambda fleet: [make_router(variant, setting, fleet)]
    _, outcomes = run_fleet(requests, [setting.spec] * setting.num_replicas, make)
    ends = sorted(outcome.finished_s for outcome in outcomes if outcome.finished_s is not None)
    low, high = len(ends) * 2 // 10, len(ends) * 8 // 10
    return (high - low) / (ends[high] - ends[low])


@dataclass(frozen=True)
class Capacity:
    """Requests a second of one fleet."""

    simple: float
    """Routed without a look at prefixes."""
    per_s: float
    """The most that was reached."""

    @classmethod
    def measure(cls, setting: Setting) -> Capacity:
        """With at most 8 replicas, and in proportion for more."""
        measured = setting.smaller(CAPACITY_REQUESTS)
        simple = capacity_per_s(measured)
        most = max(simple, capacity_per_s(measured, Variant("manta"), offered=OVERLOAD * simple))
        scale = setting.num_replicas / measured.num_replicas
        return cls(simple * scale, most * scale)

    @classmethod
    def of(cls, known: Mapping[str, Any], num_replicas: int) -> Capacity:
        """As another run found it."""
        workload = known["workload"]
        scale = num_replicas / workload["replicas"]
        return cls(workload["capacity_without_prefixes_per_s"] * scale, workload["capacity_per_s"] * scale)


def run(
    config: EngineConfig,
    *,
    trace: str,
    num_replicas: int = 8,
    gpu: str = "h200",
    loads: Sequence[float] = (0.7, 0.95),
    policies: Sequence[str] = POLICIES,
    num_requests: int | None = None,
    kv_room_tokens: int | None = None,
    num_edges: int = 1,
    num_processes: int = 1,
    like: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Compare policies at shares of the fleet's capacity. Returns what is written. Raises ConfigError.

    `like` is a result of this load: capacity (in proportion) and parameters are taken from there instead of tried.
    """
    say, begin_s = sayer(console), time.monotonic()
    tried = {policy: list(variants(policy)) for policy in policies}
    hardware = Hardware.of(config, gpu, kv_room_tokens=kv_room_tokens)
    load = find_load(trace, limit=num_requests, longest=min(131_072, hardware.kv_room_tokens))
    setting = Setting(load, hardware, num_replicas, num_edges)
    say(f"{load.name}: {len(load.requests)} requests, {load.num_left_out} too long; {num_replicas} replicas")
    known = None if like is None else _read(like, load)
    capacity = Capacity.measure(setting) if known is None else Capacity.of(known, num_replicas)
    say(f"capacity: {capacity.per_s:.2f} requests/s ({capacity.simple:.2f} without a look at prefixes)")
    highest = max(loads)
    with ProcessPoolExecutor(num_processes) as pool:
        if known is None:
            swept = _sweep(pool, setting, tried, highest * capacity.per_s)
        else:
            by_name = {variant.name: variant for some in tried.values() for variant in some}
            swept = {by_name[name]: found for name, found in known["tried_ttft_p95_s"].items() if name in by_name}
        for variant, ttft_p95_s in swept.items():
            say(f"  tried {variant.name}: TTFT p95 {ttft_p95_s:.3f} s")
        best = [min(some, key=lambda one: swept.get(one, math.inf)) for some in tried.values()]
        jobs = [(share, variant) for share in loads for variant in best]
        rates = [share * capacity.per_s for share, _ in jobs]
        found = pool.map(run_variant, [setting] * len(jobs), [variant for _, variant in jobs], rates)
        by_share: dict[float, dict[Variant, RunFigures]] = {share: {} for share in loads}
        for (share, variant), figures in zip(jobs, found, strict=True):
            by_share[share][variant] = figures
            say(f"  {share:.0%} {variant.name}: TTFT p95 {figures.ttft_p95_s:.3f} s in {figures.cpu_s:.0f} s of CPU")
    report = Report(
        "routing",
        model=hardware.describe(),
        workload={
            "trace": load.name,
            "requests": len(load.requests),
            "left_out": load.num_left_out,
            "mean_prompt_tokens": round(load.mean_prompt_tokens, 1),
            "mean_output_tokens": round(load.mean_output_tokens, 1),
            "highest_hit_rate": round(load.highest_hit_rate, 4),
            "replicas": num_replicas,
            "edges": num_edges,
            "block_size": load.block_size,
            "capacity_per_s": round(capacity.per_s, 3),
            "capacity_without_prefixes_per_s": round(capacity.simple, 3),
        },
        figures=_headline(by_share[highest]),
        details={"simulation_took_s": round(time.monotonic() - begin_s, 1)},
    )
    tree = report.tree() | {
        "policies": _tree(by_share[highest]),
        "loads": {f"{share:g}": _tree(some) for share, some in by_share.items()},
        "tried_ttft_p95_s": {variant.name: round(ttft_p95_s, 4) for variant, ttft_p95_s in swept.items()},
    }
    if json_path is not None:
        write_json(json_path, tree)
    if console is not None:
        for share, some in by_share.items():
            console.print(table(some, title=f"{load.name}, {num_replicas} replicas, {share:.0%} of capacity"))
        report.finish(console, None)
    return tree


def _read(path: Path, load: Load) -> dict[str, Any]:
    """An earlier result. Raises ConfigError when it is none of this load."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        trace = known["workload"]["trace"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--like {path}: is no result of this command ({error!r})", field="--like") from None
    if trace != load.name:
        raise ConfigError(f"--like {path}: is a result for {trace!r}, not {load.name!r}", field="--like")
    return known


def _sweep(
    pool: Executor, setting: Setting, tried: Mapping[str, Sequence[Variant]], rate: float
) -> dict[Variant, float]:
    """TTFT at p95 of each set of parameters of those policies that have several, on the load's beginning."""
    measured = setting.smaller(SWEEP_REQUESTS)
    several = [variant for some in tried.values() if len(some) > 1 for variant in some]
    rates = [rate * measured.num_replicas / setting.num_replicas] * len(several)
    found = pool.map(run_variant, [measured] * len(several), several, rates)
    return {variant: figures.ttft_p95_s for variant, figures in zip(several, found, strict=True)}


def _tree(best: dict[Variant, RunFigures]) -> dict[str, Any]:
    return {
        variant.policy: {
            **{name: _rounded(value) for name, value in asdict(figures).items()},
            "parameters": dict(variant.parameters),
        }
        for variant, figures in best.items()
    }


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _headline(best: dict[Variant, RunFigures]) -> dict[str, float]:
    """What the policy is judged by."""
    found = {variant.policy: figures for variant, figures in best.items()}
    manta, figures = found.get("manta"), {}
    if manta is None:
        return figures
    figures["manta_max_over_mean_load"] = manta.max_over_mean_load
    if "oracle" in found and found["oracle"].prefix_hit_rate > 0:
        figures["hit_rate_over_oracle"] = manta.prefix_hit_rate / found["oracle"].prefix_hit_rate
    for name in set(found) - {"manta"}:
        figures[f"ttft_p95_over_{name}"] = manta.ttft_p95_s / found[name].ttft_p95_s
    return dict(sorted(figures.items()))


def table(best: dict[Variant, RunFigures], *, title: str) -> Table:
    """`load` is the largest over the mean; `us` a decision's microseconds at the median."""
    shown = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("policy")
    for column in ("TTFT p50 s", "p95 s", "TPOT ms", "hits", "load", "us"):
        shown.add_column(column, justify="right")
    for variant, figures in best.items():
        shown.add_row(
            variant.policy,
            f"{figures.ttft_p50_s:.3f}",
            f"{figures.ttft_p95_s:.3f}",
            f"{figures.tpot_p50_s * 1e3:.1f}",
            f"{figures.prefix_hit_rate:.3f}",
            f"{figures.max_over_mean_load:.2f}",
            f"{figures.decision_us_p50:.0f}",
        )
    return shown
