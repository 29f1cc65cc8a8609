"""A simulation's parts from its configuration: requests, pools, policy; and what is written of it. Knows no command."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from manta.autoscaling.policy import Policy
from manta.autoscaling.simulator.arrivals import (
    Diurnal,
    Lengths,
    Rates,
    Spike,
    Steady,
    Table,
    arrivals,
    lognormal,
    made_requests,
    superposed,
)
from manta.autoscaling.simulator.compare import Comparison, Scenario
from manta.autoscaling.simulator.elastic import ColdStart, ElasticRun, ElasticSettings, Failure, PoolKind
from manta.autoscaling.simulator.figures import ScalingFigures
from manta.autoscaling.simulator.handoff import KvLink
from manta.autoscaling.simulator.hindsight import Found, Held, known_ahead, late_arrivals, present, standing
from manta.autoscaling.simulator.quick import QuickKind
from manta.autoscaling.simulator.replica import ReplicaSpec
from manta.autoscaling.simulator.workload import SimRequest, shared_hash
from manta.cluster.routing.roles import Role
from manta.deploy.simulation_config import LengthsConfig, ReplicaConfig, SimulationFile, WorkloadConfig
from manta.engine.config import ModelConfig
from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.step_profile import find_profile
from manta.engine.step_time import StepTimeModel, hardware_named

from .traces import TraceRow, find_trace, open_text, read_trace

USUAL_DURATION_S = 1800.0
NEAR_ORACLE = 1.25
"""GPU hours over the oracle's that are asked for."""
MOST_SAMPLES = 300
"""Of a run's course that are written."""
SAMPLED = ("time_s", "num_arrived", "num_good", "num_ended", "target", "num_ready", "num_starting", "num_running")


def scenario_of(config: SimulationFile, *, rate_scale: float) -> Scenario:
    """What is simulated, at one of the workload's scales. Raises ConfigError."""
    simulate, slo = config.simulate, config.slo.slo()
    settings = ElasticSettings(
        slo=slo,
        period_s=config.autoscaling.period_s,
        delay_s=simulate.delay_s,
        gpu_budget=config.autoscaling.gpu_budget,
        max_held=simulate.max_held,
        max_hold_s=simulate.max_hold_s,
        drain_grace_s=simulate.drain_grace_s,
        failures=tuple(Failure(one.at_s, one.num_replicas, one.pool) for one in simulate.failures),
        seed=simulate.seed,
    )
    shape = load_shape(resolve_model(ModelConfig(model=simulate.model, load_format="dummy")))
    requests = requests_of(simulate.workload, simulate.replica.block_size, rate_scale=rate_scale, seed=simulate.seed)
    pools, link = pools_of(config, shape, has_cache=any(request.block_hashes for request in requests))
    longest = min(pool.kind.spec.longest for pool in pools)
    fitting = [one for one in requests if one.num_prompt_tokens + one.num_output_tokens <= longest]
    if not fitting:
        raise ConfigError(f"no request of the workload fits into the {longest} tokens that a replica has room for")
    return Scenario(fitting, pools, settings, Policy(config.autoscaling.policy_settings(slo)), link)


def pools_of(config: SimulationFile, shape: ModelShape, *, has_cache: bool) -> tuple[tuple[PoolKind, ...], KvLink]:
    """One pool of mixed replicas, or prefill and decode; and the link between those."""
    simulate, limits = config.simulate, config.autoscaling
    cold_start = ColdStart(simulate.cold_start, simulate.cold_start_spread)

    def pool(name: str, role: Role, replica: ReplicaConfig) -> PoolKind:
        return PoolKind(
            name=name,
            kind=QuickKind(replica_spec(replica, shape)),
            role=role,
            gpus_per_replica=limits.gpus_per_replica or replica.num_gpus,
            min_replicas=limits.min_replicas,
            max_replicas=limits.max_replicas,
            cold_start=cold_start,
            has_cache=has_cache and role is not Role.DECODE,
        )

    if simulate.prefill_replica is None:
        return (pool("engine", Role.MIXED, simulate.replica),), KvLink()
    kv_bytes = step_times(simulate.replica, shape).kv_bytes_per_token
    pools = pool("prefill", Role.PREFILL, simulate.prefill_replica), pool("decode", Role.DECODE, simulate.replica)
    return pools, KvLink(bytes_per_token=kv_bytes)


def replica_spec(replica: ReplicaConfig, shape: ModelShape) -> ReplicaSpec:
    """Sizes and step times. Raises ConfigError when the model leaves no room for KV."""
    model, hardware = step_times(replica, shape), hardware_named(replica.gpu)
    memory = hardware.memory_bytes * replica.memory_fraction * replica.num_gpus
    room = int((memory - model.resident_bytes) // model.kv_bytes_per_token)
    if room < replica.block_size:
        raise ConfigError(
            f"the weights, {model.resident_bytes / 1e9:.0f} GB, leave no room for KV in {memory / 1e9:.0f} GB of "
            f"{replica.num_gpus} x {replica.gpu}: raise tensor_parallel_size or lower weight_bits",
            field="simulate.replica",
        )
    return ReplicaSpec(
        model.predict_full,
        room // replica.block_size,
        replica.block_size,
        max_num_seqs=replica.max_num_seqs,
        max_num_batched_tokens=replica.max_num_batched_tokens,
        tpot_target_s=None if replica.tpot_target_ms is None else replica.tpot_target_ms / 1e3,
    )


def step_times(replica: ReplicaConfig, shape: ModelShape) -> StepTimeModel:
    """By the roofline, or by a profile where one of the model on a single GPU fits."""
    is_plain = replica.num_gpus == 1 and replica.weight_bits is None and replica.kv_dtype is None
    profile = find_profile(shape, dtype=replica.dtype, gpu=replica.gpu) if is_plain else None
    return StepTimeModel(
        shape,
        hardware_named(replica.gpu),
        dtype=replica.dtype,
        profile=profile,
        tp=replica.tensor_parallel_size,
        pp=replica.pipeline_parallel_size,
        weight_bits=replica.weight_bits,
        activation_bits=replica.activation_bits,
        kv_dtype=replica.kv_dtype,
    )


def requests_of(workload: WorkloadConfig, block_size: int, *, rate_scale: float, seed: int) -> list[SimRequest]:
    """In order of arrival, from 0 s on. Raises ConfigError."""
    rng = random.Random(seed)
    rows = [] if workload.trace is None else read_trace(find_trace(workload.trace))
    if workload.arrivals == "trace":
        end_s = math.inf if workload.duration_s is None else workload.begin_s + workload.duration_s
        kept = [row for row in rows if workload.begin_s <= row.arrival_s < end_s and row.prompt_len and row.output_len]
        if not kept:
            raise ConfigError(f"{workload.trace} has no request between {workload.begin_s:g} and {end_s:g} s")
        requests = [_request(str(index), row, workload.begin_s, block_size) for index, row in enumerate(kept)]
        return superposed(requests, rate_scale, shift_s=workload.shift_s, rng=rng)
    duration_s = workload.duration_s or USUAL_DURATION_S
    times_s = arrivals(_rates(workload, rate_scale, duration_s, rng), duration_s=duration_s, rng=rng)
    return made_requests(times_s, _lengths(workload, rows), rng=rng)


def _request(request_id: str, row: TraceRow, begin_s: float, block_size: int) -> SimRequest:
    hashes = tuple(shared_hash(number) for number in row.block_ids[: row.prompt_len // block_size])
    return SimRequest(request_id, row.arrival_s - begin_s, row.prompt_len, row.output_len, hashes)


def _rates(workload: WorkloadConfig, rate_scale: float, duration_s: float, rng: random.Random) -> Rates:
    assert workload.rate is not None
    rate = workload.rate * rate_scale
    match workload.arrivals:
        case "spike":
            return Spike(rate, workload.spike_factor, workload.spike_begins_s, workload.spike_lasts_s)
        case "diurnal":
            high = 2 * rate / (1 + workload.least_share)
            return Diurnal(high * workload.least_share, high, workload.day_s)
        case "bursty":
            return Table.bursty(
                rate,
                duration_s=duration_s,
                burst_factor=workload.burst_factor,
                burst_s=workload.burst_s,
                calm_s=workload.calm_s,
                rng=rng,
            )
        case "rates":
            assert workload.rates is not None
            return read_rates(find_trace(workload.rates)).scaled(mean=rate, faster=workload.faster)
        case _:
            return Steady(rate)


def read_rates(path: Path) -> Table:
    """A table of `t_s,rate`. Raises ConfigError naming the line."""
    times_s: list[float] = []
    rates: list[float] = []
    with open_text(path) as file:
        for number, fields in enumerate(csv.DictReader(file), 2):
            try:
                times_s.append(float(fields["t_s"]))
                rates.append(float(fields["rate"]))
            except (KeyError, ValueError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: needs t_s and rate ({error!r})") from None
    if not rates or max(rates) <= 0:
        raise ConfigError(f"{path} holds no rates above 0")
    return Table(tuple(times_s), tuple(rates))


def _lengths(workload: WorkloadConfig, rows: list[TraceRow]) -> Callable[[random.Random], Lengths]:
    """Each length by its distribution; those that have none are a trace's, drawn row by row."""
    usable = [row for row in rows if row.prompt_len and row.output_len]

    def draw(config: LengthsConfig | None) -> Callable[[random.Random], int] | None:
        return None if config is None else lognormal(config.median, config.sigma, low=config.low, high=config.high)

    prompt, output = draw(workload.prompt), draw(workload.output)

    def drawn(rng: random.Random) -> Lengths:
        row = usable[int(rng.random() * len(usable))] if usable else None
        return Lengths(
            prompt(rng) if prompt is not None else _of(row).prompt_len,
            output(rng) if output is not None else _of(row).output_len,
        )

    return drawn


def _of(row: TraceRow | None) -> TraceRow:
    assert row is not None, "a workload without trace has both distributions"
    return row


def workload_tree(scenario: Scenario, rate_scale: float) -> dict[str, Any]:
    """For a report."""
    requests = scenario.requests
    span_s = max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
    return {
        "rate_scale": rate_scale,
        "num_requests": len(requests),
        "span_s": round(span_s, 1),
        "mean_rate": round(len(requests) / span_s, 3),
        "mean_prompt_tokens": round(sum(one.num_prompt_tokens for one in requests) / len(requests), 1),
        "mean_output_tokens": round(sum(one.num_output_tokens for one in requests) / len(requests), 1),
    }


def figures_tree(figures: ScalingFigures) -> dict[str, float | None]:
    """Rounded to five digits; null for what is no number."""
    return {name: _rounded(value) for name, value in asdict(figures).items()}


def comparison_tree(found: Comparison) -> dict[str, Any]:
    """Policies at their best, what each was tried with, and where Manta stands."""
    policies = {
        name: figures_tree(tried.figures) | {"parameters": dict(tried.parameters)} for name, tried in found.best.items()
    }
    swept = [
        {
            "policy": tried.policy,
            **tried.parameters,
            "slo_attainment": _rounded(tried.figures.slo_attainment),
            "gpu_hours": _rounded(tried.figures.gpu_hours),
        }
        for tried in found.tried
    ]
    return {"policies": policies, "num_initial": found.num_initial, "headline": headline(found), "tried": swept}


def headline(found: Comparison) -> dict[str, float | None]:
    """Manta's GPU hours over those of others, and its attainment less theirs."""
    manta = found.best["manta"].figures
    lines: dict[str, float | None] = {}
    for name, tried in found.best.items():
        if name != "manta":
            lines[f"gpu_hours_over_{name}"] = _rounded(manta.gpu_hours / tried.figures.gpu_hours)
            lines[f"attainment_less_{name}"] = _rounded(manta.slo_attainment - tried.figures.slo_attainment)
    return lines


def hindsight_tree(scenario: Scenario, found: Comparison) -> dict[str, Any]:
    """What must be known to attain what stock Serve does, or to do with hours near the oracle's. Raises ConfigError for
    more than one pool."""
    if len(scenario.pools) > 1:
        raise ConfigError("--hindsight is for one pool: sizes of two are not reckoned")
    least = min(found.best["serve_stock"].figures.slo_attainment, scenario.settings.slo.target)
    most = NEAR_ORACLE * found.best["oracle"].figures.gpu_hours

    def tree(held: Sequence[Held]) -> dict[str, Any]:
        chosen = asdict(Found.of(held, least_attainment=least, most_gpu_hours=most))
        return {name: one and {key: _rounded(value) for key, value in one.items()} for name, one in chosen.items()}

    late = late_arrivals(scenario)
    windows = [{"window_s": round(window_s, 1), **tree(held)} for window_s, held in known_ahead(scenario, late).items()]
    stands = tree(standing(scenario, late, least_attainment=least))
    seen = present(scenario, ease=found.best["oracle"].parameters["ease"], num_initial=found.num_initial)
    return {
        "least_attainment": _rounded(least),
        "most_gpu_hours": _rounded(most),
        "windows": windows,
        "standing": stands,
        "present": [{"keep_s": keep_s, **tree(held)} for keep_s, held in seen.items()],
    }


def course_tree(run: ElasticRun) -> dict[str, Any]:
    """A run's decisions and its course, thinned."""
    every = max(len(run.samples) // MOST_SAMPLES, 1)
    kept = run.samples[::every]
    return {
        "decided": [msgspec.to_builtins(one) for one in run.decided],
        "startups": run.startups[:5],
        "samples": {name: [getattr(sample, name) for sample in kept] for name in SAMPLED},
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
