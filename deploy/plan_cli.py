"""`manta plan`: from a file with a problem to placements. Arguments in, JSON and tables out; plans nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_options import Json, engine_config

if TYPE_CHECKING:
    from rich.console import Console

    from manta.autoscaling.planner.problem import Problem
    from manta.autoscaling.planner.search import Plan

MAX_ROWS = 6
"""Of alternatives, and of what cannot be, in the terminal; the JSON has all."""
OTHER_STEP_TIMES = {"peaks": "fitted", "fitted": "peaks"}


def plan_command(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="YAML file with a section `plan`.")],
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second, in place of the file's.")] = None,
    step_times: Annotated[
        str | None, typer.Option("--step-times", help="peaks or fitted, in place of the file's search.step_times.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=100, help="So many are drawn for the estimate.")] = 6000,
) -> int:
    """Which GPUs serve a load within an objective: placements, their times and costs, and why others do not."""
    from rich.console import Console

    console = Console(soft_wrap=True)
    problem = _problem(config, rate=rate, step_times=step_times)
    plan, tree = make_plan(problem, num_requests=requests, say=lambda text: console.print(f"  {text}", highlight=False))
    other = OTHER_STEP_TIMES[problem.search.step_times]
    console.print(f"the same with step times from {_explained(other)}:", highlight=False)
    _, beside = make_plan(
        with_step_times(problem, other),
        num_requests=requests,
        say=lambda text: console.print(f"  {text}", highlight=False),
    )
    tree[f"with_{other}_step_times"] = {
        name: beside[name] for name in ("feasible", "answer", "largest_feasible_rate", "best")
    }
    if json is not None:
        from manta.bench.report import environment, write_json

        write_json(json, {"bench": "plan", "config": config.name, **tree, "environment": environment()})
    _show(console, plan, tree, other)
    return 0


def make_plan(problem: Problem, *, num_requests: int, say: Callable[[str], None]) -> tuple[Plan, dict[str, Any]]:
    """The plan and its tree. Raises ConfigError and CheckpointError."""
    import random

    from manta.autoscaling.planner.demand import Demand
    from manta.autoscaling.planner.report import plan_tree
    from manta.autoscaling.planner.search import Planner
    from manta.engine.config import ModelConfig
    from manta.engine.model_source import load_shape, resolve_model

    shape = load_shape(resolve_model(ModelConfig(model=problem.model, load_format="dummy")))
    workload = problem.workload
    if workload.trace is None:
        demand = Demand.drawn(workload, num_requests, random.Random(workload.seed))
    else:
        from manta.bench.traces import find_trace, read_trace

        rows = read_trace(find_trace(workload.trace), num_requests)
        demand = Demand.recorded([(row.arrival_s, row.prompt_len, row.output_len) for row in rows], workload.rate)
    plan = Planner(problem, shape, demand, say=say).plan()
    return plan, plan_tree(plan)


def with_step_times(problem: Problem, step_times: str) -> Problem:
    """The same problem with other step times. Raises ConfigError for an unknown kind."""
    import msgspec

    from manta.engine.errors import ConfigError

    if step_times not in OTHER_STEP_TIMES:
        raise ConfigError(
            f"--step-times {step_times!r}: must be of {', '.join(OTHER_STEP_TIMES)}", field="--step-times"
        )
    search = msgspec.structs.replace(problem.search, step_times=step_times)
    return msgspec.structs.replace(problem, search=search)


def _problem(file: Path, *, rate: float | None, step_times: str | None) -> Problem:
    import msgspec

    from manta.autoscaling.planner.problem import check, problem_from
    from manta.engine.errors import ConfigError

    from .config import CONFIGS_DIR, read_yaml

    bundled = CONFIGS_DIR / f"{file}.yaml"
    if not file.is_file():
        if not bundled.is_file():
            raise ConfigError(f"--config {file}: there is no such file", field="--config")
        file = bundled
    problem = problem_from(read_yaml(file), source=str(file))
    if rate is not None:
        workload = msgspec.structs.replace(problem.workload, rate=rate)
        problem = msgspec.structs.replace(problem, workload=workload)
        check(problem)
    return problem if step_times is None else with_step_times(problem, step_times)


def _explained(step_times: str) -> str:
    if step_times == "peaks":
        return "the hardware's reachable peaks alone"
    return "the shares of the peaks that Manta reached on an H200"


def _show(console: Console, plan: Plan, tree: dict[str, Any], other: str) -> None:
    from rich.table import Table

    console.print(f"\n{tree['answer']}", style="bold", highlight=False)
    if tree["best"] is not None:
        best = tree["best"]
        limited = best["limited_by"]
        console.print(
            f"at {best['rate']:.4g} requests/s: ${best['dollars_per_million_output_tokens']:.3g} per million output "
            f"tokens; limited by {limited['resource']} (most of its limit is used by {limited['tightest']}: "
            f"{limited['used'][limited['tightest']]:.0%})",
            highlight=False,
        )
        shown = Table(title="placements: p50, p95 and p99", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("GPUs", "TTFT ms", "TPOT ms", "busy", "placement"):
            shown.add_column(column, justify="left" if column == "placement" else "right")
        for one in [best, *tree["alternatives"]][: MAX_ROWS + 1]:
            ttfts = " ".join(f"{one[f'ttft_p{percent}_s'] * 1e3:.0f}" for percent in (50, 95, 99))
            tpots = " ".join(f"{one[f'tpot_p{percent}_s'] * 1e3:.1f}" for percent in (50, 95, 99))
            shown.add_row(str(one["num_gpus"]), ttfts, tpots, f"{one['utilization']:.2f}", one["placement"])
        console.print(shown)
        memory = ", ".join(f"{name.removesuffix('_gb')} {size:.1f}" for name, size in best["memory_of_a_gpu"].items())
        console.print(f"memory of a GPU, GB: {memory}", highlight=False)
    for one in plan.rejected[:MAX_ROWS]:
        console.print(f"not: {one.name}: {one.reason}", highlight=False)
    if len(plan.rejected) > MAX_ROWS:
        console.print(
            f"     and {len(plan.rejected) - MAX_ROWS} more, all with their reasons in the JSON", highlight=False
        )
    console.print(
        f"with step times from {_explained(other)}: {tree[f'with_{other}_step_times']['answer']}", highlight=False
    )


def plan_live_command(
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second.")] = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests", min=50)] = None,
    json: Json = None,
) -> None:
    """A small plan beside the simulator and a live server on simulated GPUs, with the same requests."""
    from dataclasses import replace

    from rich.console import Console

    from manta.bench.plan_live import SmallCase, run

    case = SmallCase()
    case = replace(case, rate=rate or case.rate, num_requests=num_requests or case.num_requests)
    run(case=case, json_path=json, console=Console(soft_wrap=True))


def step_errors_command(
    files: Annotated[
        list[Path], typer.Argument(help="Profiles of `manta profile`, or reports of `manta bench engine`.")
    ],
    model: Annotated[str | None, typer.Option("--model", help="Whose steps a report's figures are.")] = None,
    json: Json = None,
) -> None:
    """How far the step-time model is off: with a profile, with fitted shares of the peaks, and by the peaks alone."""
    from rich.console import Console

    from manta.bench.step_errors import run
    from manta.engine.model_source import load_shape, resolve_model

    shape = None if model is None else load_shape(resolve_model(engine_config(model, None).model))
    run(files, shape=shape, json_path=json, console=Console(soft_wrap=True))
