"""`manta bench schedule`: what scheduling policies would make of a workload on a GPU that is not needed for it.

The real scheduler and step loop run over the simulated device on a clock of its own, with the step-time model's times:
the host costs nothing here, so that policies alone are compared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.prefix_cache import BlockHasher, PrefixCache
from manta.engine.request import EngineRequest, SamplingParams
from manta.engine.scheduler import Scheduler, SchedulerLimits
from manta.engine.sim import SimRunner
from manta.engine.stats import EngineInfo
from manta.engine.step_budget import StepBudget
from manta.engine.step_time import StepTimeModel, hardware_named

from .report import Report
from .stats import RequestRecord, summarize
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


class VirtualClock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def simulate(
    model: StepTimeModel, policy: Policy, prompt_lens: Sequence[int], output_lens: Sequence[int], *, num_blocks: int
) -> Outcome:
    """All requests at once, each with its own prompt, end-of-sequence ignored."""
    clock, vocab_size = VirtualClock(), 1000
    limits = SchedulerLimits(
        max_num_seqs=policy.max_num_seqs,
        max_num_batched_tokens=policy.max_num_batched_tokens,
        max_num_waiting=len(prompt_lens),
        max_model_len=num_blocks * BLOCK_SIZE,
        vocab_size=vocab_size,
        enable_prefix_caching=False,
    )
    budget = None
    if policy.tpot_target_ms is not None:
        target_s = policy.tpot_target_ms / 1e3
        budget = StepBudget(model.predict, target_s=target_s, max_tokens=policy.max_num_batched_tokens)
    scheduler = Scheduler(limits, PrefixCache(num_blocks), BlockHasher(BLOCK_SIZE, domain="simulation"), budget)
    runner = SimRunner(model.predict, vocab_size=vocab_size, clock=clock, sleep=clock.sleep)
    info = EngineInfo(
        model_name="simulation",
        max_model_len=limits.max_model_len,
        vocab_size=vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_waiting=limits.max_num_waiting,
        device="sim",
        dtype="bfloat16",
    )
    core = EngineCore(scheduler, runner, info)
    records: dict[str, RequestRecord] = {}
    for index, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
        request = EngineRequest(request_id=str(index), prompt_token_ids=[0] * prompt_len, params=params)
        refusal = core.add(request)
        assert refusal is None, refusal
        records[request.request_id] = RequestRecord(0.0, prompt_len, output_len)
    num_steps, longest_s, had_decodes = 0, 0.0, False
    while core.has_work:
        before_s, had_tokens = clock.now_s, had_decodes
        for delta in core.step():
            record = records[delta.request_id]
            record.arrivals_s.append(clock.now_s)
            record.num_output_tokens += len(delta.token_ids)
            had_decodes = True
            if delta.finish_reason is not None:
                record.finished_s = clock.now_s
        num_steps += 1
        if had_tokens:
            longest_s = max(longest_s, clock.now_s - before_s)
    result = summarize(list(records.values()))
    return Outcome(
        duration_s=clock.now_s,
        num_steps=num_steps - 1,  # the last call only collects
        num_preemptions=scheduler.num_preemptions,
        longest_decode_step_s=longest_s,
        ttft_p50_s=result.ttft.median,
        tpot_p50_s=result.tpot.median,
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
