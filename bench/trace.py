"""`manta bench trace`: which kernels a step consists of and where the device waits, by torch's profiler. CUDA only.

A stretch of steps is traced whole: the device is idle when the profiler starts and when it stops, so that exactly the
kernels of these steps are seen. Tracing slows kernels a little; the time of an untraced step stands beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.loop_gc import LoopGc
from manta.engine.request import EngineRequest, SamplingParams

from .drive import describe_engine, drive, prepare, start
from .report import Report
from .timeline import Kernel, Timeline
from .workloads import Item, mix, uniform

Record = Callable[[str, Callable[[], None]], list[Kernel]]
"""Runs something (its name for files first) and returns the kernels that it launched, all of them finished."""

DECODE_STEPS = 8
MIX_STEPS = 40
MIX_POINTS = (0.15, 0.5, 0.8)
"""Shares of the output tokens after which a stretch of d2 is traced."""


@dataclass(frozen=True)
class Trace:
    """A traced stretch, and what its steps take without the profiler."""

    name: str
    timeline: Timeline
    untraced_step_us: float


def run(
    config: EngineConfig,
    *,
    batch_sizes: Sequence[int] = (1, 64, 256),
    prefill_lens: Sequence[int] = (2048, 8192),
    num_requests: int = 1000,
    chrome_dir: Path | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Trace decode steps, prefill steps and stretches of d2 (none with `num_requests` 0). Raises ConfigError.

    Batches and prompts that the engine cannot hold are left out. `chrome_dir`: also write the raw traces there (large).
    """
    record = torch_recorder(chrome_dir)
    core, _ = start(config)
    try:
        prepare(core)
        scenes = Scenes(core, record)
        with LoopGc():  # as in the step loop of a replica
            traces = [scenes.decode(batch) for batch in batch_sizes if batch <= core.info.max_num_seqs]
            traces += [scenes.prefill(length) for length in prefill_lens if length < core.info.max_model_len]
            if num_requests:
                traces += scenes.mix(num_requests)
        report = Report(
            "trace",
            model=describe_engine(config, core.info),
            workload={"decode_steps": DECODE_STEPS, "mix_steps": MIX_STEPS, "mix_requests": num_requests},
            figures={name: value for trace in traces for name, value in _figures(trace).items()},
            details={trace.name: trace.timeline.tree() for trace in traces},
        )
    finally:
        core.close()
    if console is not None:
        for trace in traces:
            console.print(kernel_table(trace))
    report.finish(console, json_path)
    return report


class Scenes:
    """Brings an engine to where a trace is wanted, and takes it."""

    def __init__(self, core: EngineCore, record: Record) -> None:
        self._core = core
        self._record = record
        self._seed = 0
        self._num_requests = 0

    def decode(self, batch: int) -> Trace:
        """Steps in which `batch` sequences decode (prompts of 512 tokens, of 128 for a lone one)."""
        items = self._uniform(batch, 128 if batch == 1 else 512, 16 * DECODE_STEPS)
        self._add(items)
        begun: set[str] = set()
        while len(begun) < batch:
            begun.update(delta.request_id for delta in self._core.step())
        self._run(DECODE_STEPS)
        trace = self._trace(f"decode_batch_{batch}", DECODE_STEPS)
        self._drain()
        return trace

    def prefill(self, length: int) -> Trace:
        """A prompt's steps as one: the time to its first token on the device."""
        drive(self._core, self._uniform(1, length, 1))
        untraced = drive(self._core, self._uniform(1, length, 1))
        items = self._uniform(1, length, 1)
        name = f"prefill_{length}"

        def work() -> None:
            self._add(items)
            self._drain()

        kernels = self._record(name, work)
        return Trace(name, Timeline.of(kernels, num_steps=1), untraced.duration_s * 1e6)

    def mix(self, num_requests: int) -> list[Trace]:
        """Stretches of d2."""
        items = mix(num_requests, vocab_size=self._core.info.vocab_size, seed=self._next_seed())
        num_tokens, num_seen, traces = sum(item.max_tokens for item in items), 0, []
        self._add(items)
        for point in MIX_POINTS:
            while num_seen < point * num_tokens:
                num_seen += sum(len(delta.token_ids) for delta in self._core.step())
            before = self._core.snapshot().num_generated_tokens
            traces.append(self._trace(f"d2_at_{point:.0%}".replace("%", "_percent"), MIX_STEPS))
            num_seen += self._core.snapshot().num_generated_tokens - before
        self._drain()
        return traces

    def _trace(self, name: str, num_steps: int) -> Trace:
        begin_s = time.monotonic()
        self._run(num_steps)
        untraced_us = (time.monotonic() - begin_s) / num_steps * 1e6
        kernels = self._record(name, lambda: self._run(num_steps))
        return Trace(name, Timeline.of(kernels, num_steps=num_steps), untraced_us)

    def _run(self, num_steps: int) -> None:
        """Each call of `step` launches one, as long as there is work."""
        for _ in range(num_steps):
            self._core.step()
            if not self._core.scheduler.num_running:
                raise EngineFailed("The workload ended before its trace was taken: it needs more requests.")

    def _add(self, items: Sequence[Item]) -> None:
        for item in items:
            self._num_requests += 1
            params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True, seed=0)
            name = f"trace-{self._num_requests}"
            refusal = self._core.add(
                EngineRequest(request_id=name, prompt_token_ids=item.prompt_token_ids, params=params)
            )
            if refusal is not None:
                raise EngineFailed(f"The engine refused a request of the workload: {refusal.message}")

    def _drain(self) -> None:
        while self._core.has_work:
            self._core.step()

    def _uniform(self, count: int, prompt_len: int, output_len: int) -> list[Item]:
        vocab_size = self._core.info.vocab_size
        return uniform(count, prompt_len, output_len, vocab_size=vocab_size, seed=self._next_seed())

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def torch_recorder(chrome_dir: Path | None = None) -> Record:
    """A recorder for this machine's GPU. Raises ConfigError without one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        raise ConfigError("manta bench trace needs a CUDA GPU: there is none here", field="device")

    def record(name: str, work: Callable[[], None]) -> list[Kernel]:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        if chrome_dir is not None:
            chrome_dir.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(chrome_dir / f"{name}.json"))
        found = [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        if not found:
            raise EngineFailed("The profiler saw no kernel: it needs a driver that lets this user trace (CUPTI).")
        return found

    def one_kernel() -> None:
        torch.zeros(1, device="cuda").add_(1)

    record("first_use", one_kernel)  # it is slow
    return record


def kernel_table(trace: Trace, *, most_kernels: int = 20) -> Table:
    timeline = trace.timeline
    wall_us = timeline.wall_us / timeline.num_steps
    title = (
        f"{trace.name}: {wall_us:,.0f} us a step traced, {trace.untraced_step_us:,.0f} untraced; idle "
        f"{timeline.idle_percent:.2f} %, in gaps of at least 5 us "
        f"{100 * sum(timeline.long_gaps_us) / timeline.wall_us:.2f} %"
    )
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("kernel", max_width=44, no_wrap=True)
    for column in ("a step", "us a step", "%"):
        table.add_column(column, justify="right")
    for section in (timeline.kinds, timeline.kernels[:most_kernels]):
        for share in section:
            table.add_row(
                share.name, f"{share.count_per_step:.4g}", f"{share.us_per_step:,.1f}", f"{share.percent:.1f}"
            )
        table.add_section()
    return table


def _figures(trace: Trace) -> dict[str, float]:
    prefix = f"{trace.name}_"
    return {f"{prefix}untraced_us_per_step": trace.untraced_step_us, **trace.timeline.figures(prefix)}
