"""`manta bench schedule`: what scheduling policies would make of a workload on a GPU that is not needed for it.

One replica of the fleet simulator: the real scheduler on a clock of its own, with the step-time model's times. The host
costs nothing here, so that policies alone are compared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import Fleet, Route
from manta.autoscaling.simulator.replica import Frame, ReplicaSpec
from manta.autoscaling.simulator.workload import SimRequest
from manta.engine.config import EngineConfig
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.step_time import StepTimeModel, hardware_named

from .report import Report
from .stats import median
from .workloads import mix_lengths

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Policy:
    """What the scheduler is told."""

    max_num_seqs: int
    max_num_batched_tokens: int
    tpot_target_ms: float | None = None

    @property
    def name(self) -> str:
        target = "" if self.tpot_target_ms is None else f"_target_{self.tpot_target_ms:g}_ms"
        return f"seqs_{self.max_num_seqs}_tokens_{self.max_num_batched_tokens}{target}"


POLICIES = (
    *(Policy(seqs, tokens) for seqs, tokens in itertools.product((256, 512, 1024), (2048, 8192, 16384))),
    *(Policy(seqs, 8192, target_ms) for seqs, target_ms in itertools.product((256, 1024), (25.0, 50.0))),
)


@dataclass(frozen=True)
class Outcome:
    """One workload under one policy."""

    duration_s: float
    num_steps: int
    num_preemptions: int
    longest_decode_step_s: float
    """Of steps with decodes: how long a stream waited at most."""
    ttft_p50_s: float
    tpot_p50_s: float


class OneReplica:
    """Routes to the only one."""

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        return Route("replica")

    def learn(self, frame: Frame, now_s: float) -> None:
        """Nothing depends on it."""


def simulate(
    model: StepTimeModel, policy: Policy, prompt_lens: Sequence[int], output_lens: Sequence[int], *, num_blocks: int
) -> Outcome:
    """All requests at once, each with its own prompt, end-of-sequence ignored."""
    fleet = Fleet(EventQueue())
    fleet.routers.append(OneReplica())
    spec = ReplicaSpec(
        model.predict,
        num_blocks,
        BLOCK_SIZE,
        max_num_seqs=policy.max_num_seqs,
        max_num_batched_tokens=policy.max_num_batched_tokens,
        max_num_waiting=len(prompt_lens),
        tpot_target_s=None if policy.tpot_target_ms is None else policy.tpot_target_ms / 1e3,
    )
    replica = fleet.add_replica("replica", spec)
    pairs = zip(prompt_lens, output_lens, strict=True)
    outcomes = fleet.run([SimRequest(str(index), 0.0, *pair) for index, pair in enumerate(pairs)])
    refused = [outcome.refused for outcome in outcomes if outcome.refused is not None]
    assert not refused, refused[0]
    ttfts_s = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    tpots_s = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    return Outcome(
        duration_s=max(outcome.finished_s or 0.0 for outcome in outcomes),
        num_steps=replica.log.num_steps,
        num_preemptions=replica.scheduler.num_preemptions,
        longest_decode_step_s=replica.log.longest_gap_s,
        ttft_p50_s=median(ttfts_s),
        tpot_p50_s=median(tpots_s),
    )


def run(
    config: EngineConfig,
    *,
    gpu: str = "h200",
    policies: Sequence[Policy] = POLICIES,
    num_requests: int = 1000,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """d2 under each policy. Raises ConfigError for an unknown GPU."""
    source = resolve_model(config.model)
    shape, hardware = load_shape(source), hardware_named(gpu)
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    folder = config.scheduler.step_profiles
    model = StepTimeModel.known(shape, hardware, dtype=dtype, profile_folders=[] if folder is None else [Path(folder)])
    room = hardware.memory_bytes * config.cache.memory_fraction - model.weight_bytes
    num_blocks = int(room // (model.kv_bytes_per_token * BLOCK_SIZE))
    prompt_lens, output_lens = mix_lengths(num_requests)
    begin_s = time.monotonic()
    outcomes = [simulate(model, policy, prompt_lens, output_lens, num_blocks=num_blocks) for policy in policies]
    named = {policy.name: outcome for policy, outcome in zip(policies, outcomes, strict=True)}
    report = Report(
        "schedule",
        model={"name": source.name, "gpu": gpu, "dtype": dtype, "step_times_are_measured": model.is_measured},
        workload={"requests": num_requests, "num_blocks": num_blocks},
        figures={f"{name}_d2_s": outcome.duration_s for name, outcome in named.items()},
        details={
            **{name: asdict(outcome) for name, outcome in named.items()},
            "simulation_took_s": time.monotonic() - begin_s,
        },
    )
    report.finish(None, json_path)
    if console is not None:
        console.print(outcome_table(policies, outcomes, is_measured=model.is_measured))
    return report


def outcome_table(policies: Sequence[Policy], outcomes: Sequence[Outcome], *, is_measured: bool) -> Table:
    basis = "a measured profile" if is_measured else "the peaks alone"
    table = Table(title=f"d2, predicted from {basis}", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("seqs", "tokens", "target ms", "total s", "steps", "longest ms", "TTFT p50 s", "TPOT p50 ms"):
        table.add_column(column, justify="right")
    for policy, one in zip(policies, outcomes, strict=True):
        table.add_row(
            str(policy.max_num_seqs),
            str(policy.max_num_batched_tokens),
            "" if policy.tpot_target_ms is None else f"{policy.tpot_target_ms:g}",
            f"{one.duration_s:.2f}",
            str(one.num_steps),
            f"{one.longest_decode_step_s * 1e3:.1f}",
            f"{one.ttft_p50_s:.2f}",
            f"{one.tpot_p50_s * 1e3:.1f}",
        )
    return table
