"""A plan's estimate against the simulator: the same placement, real scheduler and router. Knows no search."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manta.autoscaling.planner.demand import Demand
from manta.autoscaling.planner.fleet import problem_of, simulate
from manta.engine.errors import ConfigError

from .traces import find_trace, read_trace

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 0.15
JUDGED = ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s")


def read_plan(file: Path) -> dict[str, Any]:
    """What `manta plan --json` wrote. Raises ConfigError."""
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan {file}: cannot be read ({error}): write it with `manta plan --json`") from None
    if not isinstance(plan, dict) or "best" not in plan:
        raise ConfigError(f"--plan {file}: is no plan: write one with `manta plan --json`")
    if plan["best"] is None:
        raise ConfigError(f"--plan {file}: the plan found no placement that holds its objective: nothing to simulate")
    return plan


def judge(plan: dict[str, Any], trace: Path | None, *, num_requests: int, seed: int) -> dict[str, Any]:
    """Simulated and planned figures, and by what part they differ."""
    problem, rng = problem_of(plan), random.Random(seed)
    if trace is None:
        demand = Demand.drawn(problem.workload, num_requests, rng)
    else:
        rows = [
            (row.arrival_s, row.prompt_len, row.output_len) for row in read_trace(find_trace(str(trace)), num_requests)
        ]
        demand = Demand.recorded(rows, problem.workload.rate)
    simulated, planned = simulate(plan, demand, rng), {name: plan["best"][name] for name in JUDGED}
    errors = {name: simulated[name] / planned[name] - 1.0 for name in JUDGED}
    return {
        "planned": planned | {"utilization": plan["best"].get("utilization")},
        "simulated": {name: float(f"{value:.6g}") for name, value in simulated.items()},
        "error": {name: round(error, 4) for name, error in errors.items()},
        "within_15_percent": max(map(abs, errors.values())) <= TOLERANCE,
    }


def judged_table(found: dict[str, Any]) -> Table:
    """One line a figure."""
    from rich.table import Table

    within = "within" if found["within_15_percent"] else "NOT within"
    shown = Table(title=f"the plan is {within} 15 % of the simulation", title_justify="left", show_edge=False)
    shown.add_column("figure")
    for column in ("planned ms", "simulated ms", "error"):
        shown.add_column(column, justify="right")
    for name in JUDGED:
        planned, simulated = found["planned"][name] * 1e3, found["simulated"][name] * 1e3
        shown.add_row(name.removesuffix("_s"), f"{planned:.1f}", f"{simulated:.1f}", f"{found['error'][name]:+.1%}")
    return shown
