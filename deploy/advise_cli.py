"""`manta advise`: what the autoscaler would do with a fleet that some Prometheus knows. Arguments in, sentences out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manta.autoscaling.advice import Advice
    from manta.autoscaling.signals import PoolState

    from .config import DeployConfig


def advise_command(
    prometheus: Annotated[str, typer.Option("--prometheus", help="Prometheus, as http://127.0.0.1:9090.")],
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="What `manta serve` takes: its objective, limits and budget count, and its model's step times where "
            "its device has figures (sim:h200).",
        ),
    ] = None,
    ttft: Annotated[float | None, typer.Option("--ttft", help="Seconds to the first token, before config's.")] = None,
    tpot: Annotated[float | None, typer.Option("--tpot", help="Seconds a token after it, before config's.")] = None,
    max_replicas: Annotated[int | None, typer.Option("--max-replicas", min=1, help="Before config's.")] = None,
    matcher: Annotated[
        str, typer.Option("--match", help='Labels of the series, as model_name="llama" or namespace="prod".')
    ] = "",
    range_s: Annotated[float, typer.Option("--range", help="Seconds of the past that are looked at.")] = 1800.0,
    step_s: Annotated[float, typer.Option("--step", help="Seconds from sample to sample.")] = 5.0,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it as JSON.")] = None,
) -> int:
    """What the autoscaler would do, by the metrics in any Prometheus, with Manta's names or vLLM's. Changes nothing."""
    import time

    from rich.console import Console

    from manta.autoscaling.advice import advise

    from .advise import PrometheusReader, window_of
    from .config import load_config

    overrides = {name: value for name, value in (("slo.ttft_s", ttft), ("slo.tpot_s", tpot)) if value is not None}
    deployed = load_config(config, overrides)
    scaling, slo = deployed.autoscaling, deployed.slo.slo()
    dialect, samples = PrometheusReader(prometheus).samples(
        window_of(range_s=range_s, step_s=step_s), slo, matcher=matcher
    )
    pool = _pool(deployed, knows_model=config is not None)
    if max_replicas is not None:
        pool = replace(pool, max_replicas=max_replicas)
    settings = scaling.policy_settings(slo)
    settings = replace(settings, quiet_s=min(settings.quiet_s, range_s / 2))
    advice = advise(samples, settings, pool, gpu_budget=scaling.gpu_budget)
    console = Console(soft_wrap=True)
    say = lambda text: console.print(text, highlight=False, markup=False)  # noqa: E731
    seen = samples[-1].time_s - samples[0].time_s
    say(
        f"{dialect}'s metrics, {seen:.0f} s; "
        + ("by step times of the model" if pool.step_costs else "by load, without step times")
    )
    for one in advice.wished:
        at = time.strftime("%H:%M:%S", time.localtime(one.time_s))
        say(f"  {at} {one.before} -> {one.after} ({one.reason}): {one.sentence}")
    say(f"replicas: {advice.num_replicas} now, {advice.desired} advised: {advice.sentence}")
    if advice.decision.attainment is not None and (slo.ttft_s or slo.tpot_s):
        say(f"within the objective lately: {advice.decision.attainment:.1%}, {slo.target:.1%} should be")
    if json is not None:
        _write(json, dialect, advice)
    return 0


def _pool(config: DeployConfig, *, knows_model: bool) -> PoolState:
    """Limits and sizes of a pool; with step times where the configured device is one that has figures."""
    from manta.autoscaling.signals import PoolState
    from manta.engine.config import max_num_seqs_of
    from manta.engine.step_costs import StepCosts

    scaling, parallel = config.autoscaling, config.engine.parallel
    gpus = scaling.gpus_per_replica or (float(parallel.num_ranks) if parallel.is_settled else 1.0)
    pool = PoolState(
        name="engine",
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        gpus_per_replica=gpus,
        max_num_seqs=max_num_seqs_of(config.engine, "cuda"),
    )
    if not knows_model or not config.engine.device.startswith("sim"):
        return pool
    from manta.engine.model_source import load_shape, resolve_model
    from manta.engine.sim_device import start_simulated

    target_ms = config.engine.scheduler.tpot_target_ms
    device = start_simulated(config.engine, load_shape(resolve_model(config.engine.model)))
    return replace(
        pool,
        max_num_seqs=device.max_num_seqs,
        kv_room_tokens=device.num_blocks * device.block_size,
        tokens_a_step=device.max_num_batched_tokens,
        tpot_target_s=None if target_ms is None else target_ms / 1e3,
        step_costs=None if device.predict is None else StepCosts.of(device.predict),
    )


def _write(file: Path, dialect: str, advice: Advice) -> None:
    import json

    import msgspec

    tree = {
        "metrics": dialect,
        "num_replicas": advice.num_replicas,
        "desired": advice.desired,
        "sentence": advice.sentence,
        "forecast_requests_s": advice.decision.forecast_requests_s,
        "attainment": advice.decision.attainment,
        "wished": msgspec.to_builtins(advice.wished),
    }
    file.write_text(json.dumps(tree, indent=2) + "\n")
