"""`manta simulate`: a fleet on a virtual clock, from a plan or a configuration. Options in, JSON, plot, table out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from manta.autoscaling.simulator.compare import Comparison, Scenario

    from .simulation_config import SimulationFile


def simulate_command(
    plan: Annotated[
        Path | None, typer.Option("--plan", help="What `manta plan --json` wrote: is its estimate right?")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="YAML file, or the name of a bundled one, as autoscale-azure-conv.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="This trace's requests instead.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="With other policies, each at its best parameters.")
    ] = False,
    hindsight: Annotated[
        bool,
        typer.Option("--hindsight", help="With --compare: what one must know of the load to do as well as others."),
    ] = False,
    scale: Annotated[
        list[float] | None, typer.Option("--scale", help="So many times the workload's rate; may be repeated.")
    ] = None,
    duration: Annotated[float | None, typer.Option("--duration", help="Seconds of the workload that are used.")] = None,
    requests: Annotated[int, typer.Option("--requests", help="With --plan: so many are drawn.")] = 12_000,
    seed: Annotated[int, typer.Option("--seed", help="With --plan: of what is drawn.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything there.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw load, replicas and attainment over time (PNG).")
    ] = None,
) -> int:
    """Simulate a fleet: how a plan's placement does, or how the autoscaler (or another policy) follows a load."""
    from manta.engine.errors import ConfigError

    if (plan is None) == (config is None):
        raise ConfigError("give --plan FILE or --config FILE, one of them")
    if plan is not None:
        if compare or hindsight or scale or duration or plot:
            raise ConfigError(
                "--compare, --hindsight, --scale, --duration and --plot belong to --config: a plan is one fixed fleet"
            )
        return _judge_plan(plan, trace, num_requests=requests, seed=seed, json=json)
    assert config is not None
    if hindsight and not compare:
        raise ConfigError("--hindsight needs --compare: it asks what the others' attainment and hours take")
    from manta.bench.report import check_plot

    from .simulation_config import load_simulation, with_trace

    if plot is not None:
        check_plot()
    changes = with_trace(trace) | ({} if duration is None else {"duration_s": duration})
    file = load_simulation(config, changes)
    return _simulate(file, config, scale, is_comparison=compare, has_hindsight=hindsight, json=json, plot=plot)


def _simulate(
    config: SimulationFile,
    name: str,
    scale: list[float] | None,
    *,
    is_comparison: bool,
    has_hindsight: bool,
    json: Path | None,
    plot: Path | None,
) -> int:
    from rich.console import Console

    from manta.bench.report import environment, write_json
    from manta.bench.simulation import scenario_of, workload_tree

    console = Console(soft_wrap=True)
    scales = scale or list(config.simulate.workload.rate_scales)
    tree: dict[str, Any] = {
        "bench": "simulate",
        "config": Path(name).stem,
        "slo": config.slo.model_dump(),
        "autoscaling": config.autoscaling.model_dump(),
        "replica": config.simulate.replica.model_dump(),
        "cold_start_s": sum(config.simulate.cold_start.values()),
        "environment": environment(),
        "scales": [],
    }
    for one in scales:
        scenario = scenario_of(config, rate_scale=one)
        workload = workload_tree(scenario, one)
        console.print(f"{Path(name).stem} at scale {one:g}: {workload}", highlight=False)
        path = plot if plot is None or len(scales) == 1 else plot.with_stem(f"{plot.stem}-{one:g}x")
        if is_comparison:
            found = _compared(scenario, console.print, path, has_hindsight=has_hindsight)
        else:
            found = _alone(scenario, console.print, path)
        tree["scales"].append({"workload": workload, **found})
        if json is not None:
            write_json(json, tree | _first(tree))
    return 0


def _first(tree: dict[str, Any]) -> dict[str, Any]:
    """The first scale's findings at the top, where there is something to be found by name."""
    first = tree["scales"][0]
    return {name: first[name] for name in ("policies", "figures") if name in first}


def _alone(scenario: Scenario, say: Any, plot: Path | None) -> dict[str, Any]:
    import time

    from manta.autoscaling.simulator.figures import scaling_figures
    from manta.bench.report import figures_table
    from manta.bench.simulation import course_tree, figures_tree
    from manta.bench.simulation_plot import draw_course

    initial = {name: plan.counts(2.0, ahead_s=60.0, keep_s=0.0)[1][0] for name, plan in scenario.plans().items()}
    initial = {pool.name: min(max(initial[pool.name], pool.min_replicas), pool.max_replicas) for pool in scenario.pools}
    begin_s = time.process_time()
    run = scenario.run(scenario.manta, initial)
    cpu_s = time.process_time() - begin_s
    figures = figures_tree(scaling_figures(run, scenario.settings.slo))
    figures["cpu_s"], figures["times_real_time"] = round(cpu_s, 3), round(run.end_s / cpu_s, 1)
    say(figures_table("manta", {name: value for name, value in figures.items() if value is not None}))
    for decided in run.decided:
        say(
            f"{decided.time_s:8.0f} s  {decided.pool} {decided.before} -> {decided.after}: {decided.sentence}",
            highlight=False,
        )
    if plot is not None:
        draw_course(plot, {"manta": run}, title="Replicas that follow the load")
    return {"figures": figures, **course_tree(run)}


def _compared(scenario: Scenario, say: Any, plot: Path | None, *, has_hindsight: bool) -> dict[str, Any]:
    from manta.autoscaling.simulator.compare import compare
    from manta.bench.simulation import comparison_tree, course_tree, hindsight_tree
    from manta.bench.simulation_plot import draw_course

    found = compare(scenario, say=lambda text: say(text, highlight=False))
    say(comparison_table(found, scenario.settings.slo.target))
    if plot is not None:
        draw_course(plot, found.runs, title="The same requests, policies at the best of their parameters")
    tree = {**comparison_tree(found), **course_tree(found.runs["manta"])}
    if has_hindsight:
        tree["hindsight"] = hindsight_tree(scenario, found)
        say(hindsight_table(tree["hindsight"]))
    return tree


def comparison_table(found: Comparison, target: float) -> Table:
    """Policies at their best."""
    from rich.table import Table

    shown = Table(title=f"attainment (objective {target:g}) and GPU hours", title_justify="left", show_edge=False)
    shown.add_column("policy")
    for column in ("attainment", "GPU hours", "TTFT p95 s", "TPOT p95 ms", "steps", "reversals/10 min"):
        shown.add_column(column, justify="right")
    for name, tried in found.best.items():
        given, figures = ", ".join(f"{key} {value:g}" for key, value in tried.parameters.items()), tried.figures
        shown.add_row(
            f"{name} ({given})" if given else name,
            f"{figures.slo_attainment:.4f}",
            f"{figures.gpu_hours:.2f}",
            f"{figures.ttft_p95_s:.3f}",
            f"{figures.tpot_p95_s * 1e3:.1f}",
            f"{figures.num_scaling_steps}",
            f"{figures.reversals_per_10_min:.2f}",
        )
    return shown


def hindsight_table(tree: dict[str, Any]) -> Table:
    """What `hindsight_tree` found."""
    from rich.table import Table

    least, most = tree["least_attainment"], tree["most_gpu_hours"]
    shown = Table(title="with the load known", title_justify="left", show_edge=False)
    for column in ("what is known", f"hours for {least:.4g}", "attainment", f"attainment in {most:.4g} hours", "hours"):
        shown.add_column(column, justify="right")
    known = {f"the best size for {one['window_s']:.0f} s": one for one in tree["windows"]}
    seen = {f"the present, replicas stay {one['keep_s']:.0f} s": one for one in tree["present"]}
    for name, one in (known | {"size and idle time that are best": tree["standing"]} | seen).items():
        cheapest, best = one["cheapest"], one["best"]
        shown.add_row(
            name,
            *(("", "") if cheapest is None else (f"{cheapest['gpu_hours']:.2f}", f"{cheapest['slo_attainment']:.4f}")),
            *(("", "") if best is None else (f"{best['slo_attainment']:.4f}", f"{best['gpu_hours']:.2f}")),
        )
    return shown


def _judge_plan(file: Path, trace: Path | None, *, num_requests: int, seed: int, json: Path | None) -> int:
    from rich.console import Console

    from manta.bench.plan_judge import judge, judged_table, read_plan
    from manta.bench.report import environment, write_json

    found = judge(read_plan(file), trace, num_requests=num_requests, seed=seed)
    Console(soft_wrap=True).print(judged_table(found))
    if json is not None:
        write_json(json, {"bench": "simulate", "plan": file.name, "environment": environment(), **found})
    return 0 if found["within_15_percent"] else 1
