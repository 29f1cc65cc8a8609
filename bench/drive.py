"""Drives an engine core in this process through a workload and records what happened. Knows no model and no HTTP."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.errors import EngineFailed
from manta.engine.loop_gc import LoopGc
from manta.engine.request import EngineRequest, FinishReason, SamplingParams
from manta.engine.startup import start_engine
from manta.engine.stats import EngineInfo, StepStats

from .stats import RequestRecord, median, percentile
from .workloads import Item

_run_ids = itertools.count()


@dataclass
class Drive:
    """One pass through a workload."""

    records: list[RequestRecord] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)
    step_gaps_s: list[float] = field(default_factory=list)
    """From the end of each step to the end of the next one that followed without a pause."""
    duration_s: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def decode_step_s(self) -> float | None:
        """Mean time of the steps in which every request was decoding; None when there was no such step."""
        first_s = max(record.arrivals_s[0] for record in self.records)
        last_s = min(record.arrivals_s[-1] for record in self.records)
        times = [time_s for time_s in self.records[0].arrivals_s if first_s <= time_s <= last_s]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def describe_engine(config: EngineConfig, info: EngineInfo) -> dict[str, object]:
    """The model and the engine's sizes, for a report."""
    return {
        "name": info.model_name,
        "device": info.device,
        "dtype": info.dtype,
        "load_format": config.model.load_format,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
        "weights": config.quantization.weights,
        "kv_cache": config.quantization.kv_cache,
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens or "default",
        "memory_ledger_bytes": info.memory_ledger_bytes,
    }


def start(config: EngineConfig) -> tuple[EngineCore, dict[str, float]]:
    """An engine, and the seconds of its start-up's phases with their sum as figures."""
    begin_s = time.monotonic()
    core = start_engine(config)
    phases = {f"startup_{name.replace(' ', '_').replace('-', '_')}_s": s for name, s in core.info.startup_s.items()}
    return core, {**phases, "startup_total_s": time.monotonic() - begin_s}


def prepare(core: EngineCore) -> float:
    """Let the engine do what it does in moments without work, to the end. Returns the seconds that it took."""
    begin_s = time.monotonic()
    while core.prepare_more():
        pass
    return time.monotonic() - begin_s


def drive(core: EngineCore, items: Sequence[Item]) -> Drive:
    """Run all items, each submitted when it is due (at once where `arrival_s` is 0), and wait for the last.

    Greedy, end-of-sequence ignored. Raises EngineFailed unless every request gave exactly its tokens.
    """
    assert not core.has_work
    result = Drive()
    before = core.snapshot()
    core.on_step = result.steps.append
    try:
        with LoopGc() as collector:  # as in the step loop of a replica
            begin_s = time.monotonic()
            _run(core, sorted(items, key=lambda item: item.arrival_s), result, begin_s, collector)
            result.duration_s = time.monotonic() - begin_s
    finally:
        core.on_step = None
    after = core.snapshot()
    result.num_preemptions = after.num_preemptions - before.num_preemptions
    result.num_cached_tokens = after.num_cached_tokens - before.num_cached_tokens
    return result


def _run(core: EngineCore, items: Sequence[Item], result: Drive, begin_s: float, collector: LoopGc) -> None:
    records, run_id = result.records, next(_run_ids)
    ended_at_s: float | None = None
    by_id: dict[str, RequestRecord] = {}
    num_started = num_done = 0
    while num_done < len(items):
        while len(records) < len(items):
            item = items[len(records)]
            due_s = begin_s + item.arrival_s
            if time.monotonic() < due_s or core.scheduler.num_waiting >= core.info.max_num_waiting > 0:
                break
            record = RequestRecord(due_s, len(item.prompt_token_ids), item.max_tokens)
            request_id = f"bench-{run_id}-{len(records)}"
            params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True, seed=0)
            request = EngineRequest(request_id=request_id, prompt_token_ids=item.prompt_token_ids, params=params)
            if (refusal := core.add(request)) is not None:
                raise EngineFailed(f"The engine refused a request of the workload: {refusal.message}")
            by_id[request_id] = record
            records.append(record)
        if not core.has_work:
            ended_at_s = None
            time.sleep(max(0.0, begin_s + items[len(records)].arrival_s - time.monotonic()))
            continue
        deltas = core.step()
        collector.step_done()
        now_s = time.monotonic()
        if ended_at_s is not None:
            result.step_gaps_s.append(now_s - ended_at_s)
        ended_at_s = now_s
        # Equal priorities start in order of arrival; a preempted request that waits again has started before.
        while num_started < len(records) - core.scheduler.num_waiting:
            records[num_started].started_s = now_s
            num_started += 1
        for delta in deltas:
            record = by_id[delta.request_id]
            if delta.token_ids:
                record.arrivals_s.append(now_s)
                record.num_output_tokens += len(delta.token_ids)
                record.token_ids += delta.token_ids
            if delta.finish_reason is not None:
                _finish(record, delta.finish_reason, delta.error, now_s)
                num_done += 1
    while core.has_work:
        core.step()


def _finish(record: RequestRecord, reason: FinishReason, error: str | None, now_s: float) -> None:
    record.finished_s, record.finish_reason = now_s, reason.value
    if reason is not FinishReason.LENGTH or record.num_output_tokens != record.num_expected_tokens:
        raise EngineFailed(
            f"A request ended with {reason.value} after {record.num_output_tokens} of {record.num_expected_tokens} "
            f"tokens. {error or ''}"
        )


def device_name(device: str) -> str:
    """The full name of an engine's device: `NVIDIA H200` for cuda:0; any other device is called what it is."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name(device) if torch is not None and device.startswith("cuda") else device


def device_figures(runs: Sequence[Sequence[StepStats]], prefix: str) -> dict[str, float]:
    """Time of a step on the device, and host time that it left exposed: the device's idle time before the step.

    Each run's first step is left out, since it waited for the run. Nothing where the device measures no time.
    """
    steps = [step for run in runs for step in run[1:] if step.device_s > 0]
    if not steps:
        return {}
    idle_ms = [step.device_idle_s * 1e3 for step in steps]
    return {
        f"{prefix}device_step_ms": 1e3 * sum(step.device_s for step in steps) / len(steps),
        f"{prefix}exposed_host_ms": sum(idle_ms) / len(steps),
        f"{prefix}exposed_host_p50_ms": median(idle_ms),
        f"{prefix}exposed_host_p99_ms": percentile(idle_ms, 99),
    }


def idle_percent(steps: Sequence[StepStats], *, first: float = 0.1, last: float = 0.9) -> float | None:
    """Share of the device's time between two points of a run (as shares of it) in which it had nothing to do.

    None where the device measures no time.
    """
    steps = [step for step in steps[1:] if step.device_s > 0]
    ends_s = list(itertools.accumulate(step.device_idle_s + step.device_s for step in steps))
    inside = [s for s, end_s in zip(steps, ends_s, strict=True) if first * ends_s[-1] < end_s <= last * ends_s[-1]]
    total_s = sum(step.device_idle_s + step.device_s for step in inside)
    return 100 * sum(step.device_idle_s for step in inside) / total_s if inside else None


HOST_BOUND_WAIT_S = 50e-6
"""A step for whose result the host waited less than this found the device idle."""


def host_figures(steps: Sequence[StepStats], prefix: str) -> dict[str, float]:
    """Host time of a step, and how much of it the device could not hide."""
    if not steps:
        return {}
    host_s = [step.schedule_s + step.launch_s + step.update_s for step in steps]
    exposed = sum(step.wait_s < HOST_BOUND_WAIT_S for step in steps)
    return {
        f"{prefix}host_per_step_median_us": median(host_s) * 1e6,
        f"{prefix}wait_per_step_median_us": median([step.wait_s for step in steps]) * 1e6,
        f"{prefix}host_bound_steps_percent": 100 * exposed / len(steps),
    }
