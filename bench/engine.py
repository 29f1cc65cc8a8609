"""`manta bench engine`: one engine in this process, without HTTP: decode, prefill and mixed workloads. Knows no Ray.

Every setting is warmed up and repeated with other prompts; figures are medians of the repetitions. A core is driven to
its last result, so that no time is taken while work is in flight. The headline figures (`b1_tpot_ms`, `d2_s`, ...)
stand beside the detailed ones, with their ratios to the yardsticks where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.errors import ConfigError
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.stats import EngineInfo
from manta.engine.step_time import StepShape

from . import engine_against, startup
from .drive import (
    Drive,
    describe_engine,
    device_figures,
    device_name,
    drive,
    host_figures,
    idle_percent,
    prepare,
    start,
)
from .report import CurvePoint, Report, check_plot, memory_figures, plot_curve, sayer, write_json
from .stats import Summary, median, summarize
from .workloads import Item, from_lengths, mix_lengths, shared_prefix, uniform
from .yardsticks import (
    Headline,
    Yardsticks,
    batch_work,
    decode_work,
    headline_table,
    prefill_work,
    shared_prefix_work,
)

WORKLOADS = ("decode", "prefill", "d1", "d2", "prefix")
KV_FIGURES = ("kv_tokens", "kv_requests")
STARTUP = "startup"
"""Processes of their own, measured before this one has an engine, so that they find the device free."""


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are. Lengths in tokens."""

    batch_sizes: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prefill_lens: tuple[int, ...] = (512, 2048, 8192, 32768)
    prompt_len: int = 512
    output_len: int = 128
    single_prompt_len: int = 128
    """Of decode at batch 1."""
    single_output_len: int = 256
    d1_requests: int = 512
    d1_prompt_len: int = 1024
    d1_output_len: int = 128
    d2_requests: int = 1000
    d2_length_divisor: int = 1
    prefix_requests: int = 64
    prefix_len: int = 4096
    suffix_len: int = 64
    prefix_output_len: int = 32
    repeats: int = 3


ON_CPU = Sizes(
    batch_sizes=(1, 4, 8),
    prefill_lens=(128, 512),
    prompt_len=64,
    output_len=32,
    single_prompt_len=64,
    single_output_len=32,
    d1_requests=8,
    d1_prompt_len=128,
    d1_output_len=16,
    d2_requests=8,
    d2_length_divisor=8,
    prefix_requests=4,
    prefix_len=256,
    suffix_len=16,
    prefix_output_len=8,
    repeats=2,
)
"""The same shapes, small enough for a small model on a few cores."""


def run(
    config: EngineConfig,
    *,
    workloads: Sequence[str] = WORKLOADS,
    batch_sizes: Sequence[int] | None = None,
    prefill_lens: Sequence[int] | None = None,
    num_requests: int | None = None,
    repeats: int | None = None,
    against: str | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure an engine that is started for this and closed afterwards.

    `against` (bf16, or a scheme of quantization.weights) measures the model held so too, before: its figures have that
    name in front, and stand beside the ratios to them.

    `num_requests` bounds the number of requests of d1, d2 and prefix. Sizes that are None follow from the device. What
    does not fit the engine (context, cache, sequences) is left out and listed in `details.skipped`. Raises ConfigError
    or CheckpointError.
    """
    unknown = sorted(set(workloads) - {*WORKLOADS, STARTUP})
    if unknown or not workloads:
        known = ", ".join((*WORKLOADS, STARTUP))
        raise ConfigError(f"unknown workload {', '.join(unknown)!r}; known: {known}", field="workloads")
    if plot_path is not None:
        check_plot()
    say = sayer(console)
    ready, details = {}, {}
    if STARTUP in workloads:
        ready, details = startup.measure(config, repeats=repeats or Sizes.repeats, say=say)
    other: dict[str, float] = {}
    if against is not None:
        options = {"workloads": [name for name in workloads if name != STARTUP], "batch_sizes": batch_sizes}
        options |= {"prefill_lens": prefill_lens, "num_requests": num_requests, "repeats": repeats}
        other, details[against] = engine_against.measure(config, against, options=options, say=say)
    core, figures = start(config)

    def report() -> Report:
        found = {**bench.headline_figures(), **ready, **figures, **memory_figures(), **other}
        if against is not None:
            names = [*(row.name for row in bench.headlines), *KV_FIGURES]
            found |= engine_against.ratios(found, against, names)
        return Report(
            "engine",
            model=describe_engine(config, core.info),
            workload={"workloads": list(workloads), **asdict(sizes)},
            figures=found,
            details={"headlines": [asdict(row) for row in bench.headlines], "skipped": bench.skipped, **details},
        )

    def keep(found: Mapping[str, float]) -> None:
        """What is measured is in the file, whatever becomes of the rest of a long run."""
        figures.update(found)
        if json_path is not None:
            write_json(json_path, report().tree())

    try:
        sizes = _sizes(core, batch_sizes, prefill_lens, num_requests, repeats)
        figures["prepare_more_s"] = prepare(core)
        figures |= kv_figures(core.info, sizes)
        bench = EngineBench(core, sizes, _yardsticks(config, core, sizes), say, keep)
        for name in workloads:
            if name != STARTUP:
                keep(getattr(bench, name)())
        for name in startup.HEADLINES:
            if name in ready:
                bench.add_headline(name, ready[name])
        last = report()
    finally:
        core.close()
    last.finish(console, json_path)
    if console is not None:
        console.print(headline_table(bench.headlines))
    if plot_path is not None:
        plot_curve(plot_path, bench.curve, title=f"{core.info.model_name}, {core.info.dtype}, {core.info.device}")
    return last


def _yardsticks(config: EngineConfig, core: EngineCore, sizes: Sizes) -> Yardsticks:
    def fixed(sizes: Sizes) -> Sizes:
        return replace(sizes, batch_sizes=(), prefill_lens=(), repeats=1)

    return Yardsticks.of(
        load_shape(resolve_model(config.model)),
        dtype=core.info.dtype,
        quantization=config.quantization,
        device=device_name(core.info.device),
        are_usual_sizes=fixed(sizes) == fixed(Sizes()),
        tp=config.parallel.tp_size,
        pp=config.parallel.pp_size,
    )


def kv_figures(info: EngineInfo, sizes: Sizes) -> dict[str, float]:
    """Room of the cache: tokens, and whole requests of d1's lengths."""
    blocks = -(-(sizes.d1_prompt_len + sizes.d1_output_len) // info.block_size)
    values = float(info.num_blocks * info.block_size), float(info.num_blocks // blocks)
    return dict(zip(KV_FIGURES, values, strict=True))


def _sizes(
    core: EngineCore,
    batch_sizes: Sequence[int] | None,
    prefill_lens: Sequence[int] | None,
    num_requests: int | None,
    repeats: int | None,
) -> Sizes:
    sizes = ON_CPU if core.info.device.startswith("cpu") else Sizes()
    bound = num_requests or 1_000_000
    sizes = replace(
        sizes,
        batch_sizes=tuple(batch_sizes or sizes.batch_sizes),
        prefill_lens=tuple(prefill_lens or sizes.prefill_lens),
        d1_requests=min(bound, sizes.d1_requests),
        d2_requests=min(bound, sizes.d2_requests),
        prefix_requests=min(bound, sizes.prefix_requests),
        repeats=repeats or sizes.repeats,
    )
    if min(*sizes.batch_sizes, *sizes.prefill_lens, bound, sizes.repeats) < 1:
        raise ConfigError("batch sizes, prompt lengths, requests and repeats must be at least 1")
    return sizes


class EngineBench:
    """The workloads, each a method that returns figures."""

    def __init__(
        self,
        core: EngineCore,
        sizes: Sizes,
        yardsticks: Yardsticks,
        say: Callable[[str], None],
        keep: Callable[[Mapping[str, float]], None],
    ) -> None:
        self.headlines: list[Headline] = []
        self.skipped: list[str] = []
        self.curve: list[CurvePoint] = []
        self._core = core
        self._sizes = sizes
        self._yardsticks = yardsticks
        self._say = say
        self._keep = keep
        self._vocab_size = core.info.vocab_size
        self._seed = 0

    def add_headline(self, name: str, value: float, least_work: Sequence[StepShape] = ()) -> None:
        self.headlines.append(self._yardsticks.headline(name, value, least_work))

    def headline_figures(self) -> dict[str, float]:
        """Values, then their ratios."""
        values = {row.name: row.value for row in self.headlines}
        return values | {name: ratio for row in self.headlines for name, ratio in row.ratios.items()}

    def decode(self) -> dict[str, float]:
        """Time per output token while a whole batch decodes."""
        sizes, figures = self._sizes, {}
        for batch in sizes.batch_sizes:
            prompt_len = sizes.single_prompt_len if batch == 1 else sizes.prompt_len
            output_len = sizes.single_output_len if batch == 1 else sizes.output_len
            name = f"decode_batch_{batch}"
            if not self._fits(name, batch, prompt_len + output_len):
                continue
            drives = self._repeat(name, lambda b=batch, p=prompt_len, o=output_len: self._uniform(b, p, o))
            step_s = [one.decode_step_s for one in drives if one.decode_step_s is not None]
            if not step_s:
                self._skip(name, "no step decoded the whole batch: outputs too short for this token budget")
                continue
            tpot_s = median(step_s)
            figures[f"{name}_tpot_ms"] = tpot_s * 1e3
            figures[f"{name}_output_tokens_per_s"] = batch / tpot_s
            runs = [[step for step in one.steps if not step.num_prefill_tokens] for one in drives]
            figures |= host_figures([step for run in runs for step in run], f"{name}_")
            figures |= device_figures(
                [[step for step in run if step.num_decode_seqs == batch] for run in runs], f"b{batch}_"
            )
            self.add_headline(f"b{batch}_tpot_ms", tpot_s * 1e3, decode_work(batch, prompt_len, output_len))
            ttft_p95_ms = summarize([record for one in drives for record in one.records]).ttft.p95 * 1e3
            self.curve.append(CurvePoint(str(batch), batch / tpot_s, ttft_p95_ms, tpot_s * 1e3))
            self._keep(figures)
        return figures

    def prefill(self) -> dict[str, float]:
        """Time to first token of a lone request."""
        figures = {}
        for length in self._sizes.prefill_lens:
            name = f"prefill_{length}"
            if self._fits(name, 1, length + 1):
                drives = self._repeat(name, lambda n=length: self._uniform(1, n, 1))
                ttft_s = median([one.records[0].ttft_s or 0.0 for one in drives])
                figures[f"{name}_ttft_ms"] = ttft_s * 1e3
                figures[f"{name}_prompt_tokens_per_s"] = length / ttft_s
                self.add_headline(f"ttft_{length}_ms", ttft_s * 1e3, prefill_work(length))
        return figures

    def d1(self) -> dict[str, float]:
        """Many equal requests at once."""
        sizes = self._sizes
        return self._batch("d1", [sizes.d1_prompt_len] * sizes.d1_requests, [sizes.d1_output_len] * sizes.d1_requests)

    def d2(self) -> dict[str, float]:
        """Many requests with chat-like lengths at once."""
        divisor = self._sizes.d2_length_divisor
        lengths = [[max(4, length // divisor) for length in one] for one in mix_lengths(self._sizes.d2_requests)]
        return self._batch("d2", *lengths)

    def prefix(self) -> dict[str, float]:
        """Requests that share a long prefix: not in the cache, in the cache, and the same lengths unshared."""
        sizes = self._sizes
        whole_len = sizes.prefix_len + sizes.suffix_len
        if not self._fits("prefix", 1, whole_len + sizes.prefix_output_len):
            return {}
        cold_s, warm_s, unshared_s = [], [], []
        for repeat in range(sizes.repeats + 1):
            prefix_seed = self._next_seed()
            pair = [drive(self._core, self._shared(prefix_seed)) for _ in range(2)]
            unshared = drive(self._core, self._uniform(sizes.prefix_requests, whole_len, sizes.prefix_output_len))
            if repeat:  # the first is the warm-up
                cold_s.append(pair[0].duration_s)
                warm_s.append(pair[1].duration_s)
                unshared_s.append(unshared.duration_s)
                self._say(f"prefix: cold {cold_s[-1]:.3f} s, warm {warm_s[-1]:.3f} s, unshared {unshared_s[-1]:.3f} s")
        for name, values, is_cached in (("prefix_cold_s", cold_s, False), ("prefix_warm_s", warm_s, True)):
            lens = (sizes.prefix_requests, sizes.prefix_len, sizes.suffix_len, sizes.prefix_output_len)
            self.add_headline(name, median(values), shared_prefix_work(*lens, is_cached=is_cached))
        return {"prefix_unshared_s": median(unshared_s)}

    def _batch(self, name: str, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> dict[str, float]:
        """Requests of these lengths, all at once."""
        longest = max(prompt + output for prompt, output in zip(prompt_lens, output_lens, strict=True))
        if not self._fits(name, 1, longest):
            return {}

        def items() -> list[Item]:
            return from_lengths(prompt_lens, output_lens, vocab_size=self._vocab_size, seed=self._next_seed())

        drives = self._repeat(name, items)
        duration_s = median([one.duration_s for one in drives])
        self.add_headline(f"{name}_s", duration_s, batch_work(prompt_lens, output_lens))
        middle = sorted(drives, key=lambda one: one.duration_s)[(len(drives) - 1) // 2]
        figures = summarize(middle.records).figures(f"{name}_")
        figures[f"{name}_steps"] = float(len(middle.steps))
        figures[f"{name}_preemptions"] = float(middle.num_preemptions)
        step_times = Summary.of(gap_s for one in drives for gap_s in one.step_gaps_s)
        figures |= step_times.figures(f"{name}_step")
        figures |= device_figures([one.steps for one in drives], f"{name}_")
        if (idle := idle_percent(middle.steps)) is not None:
            figures[f"{name}_steady_device_idle_percent"] = idle
        return figures | host_figures(middle.steps, f"{name}_")

    def _repeat(self, name: str, make_items: Callable[[], list[Item]]) -> list[Drive]:
        """A warm-up and then the repetitions, each with new prompts."""
        drive(self._core, make_items())
        drives = []
        for _ in range(self._sizes.repeats):
            drives.append(drive(self._core, make_items()))
            self._say(f"{name}: {drives[-1].duration_s:.3f} s")
        return drives

    def _uniform(self, count: int, prompt_len: int, output_len: int) -> list[Item]:
        return uniform(count, prompt_len, output_len, vocab_size=self._vocab_size, seed=self._next_seed())

    def _shared(self, prefix_seed: int) -> list[Item]:
        sizes = self._sizes
        return shared_prefix(
            sizes.prefix_requests,
            prefix_len=sizes.prefix_len,
            suffix_len=sizes.suffix_len,
            output_len=sizes.prefix_output_len,
            vocab_size=self._vocab_size,
            prefix_seed=prefix_seed,
            suffix_seed=self._next_seed(),
        )

    def _fits(self, name: str, num_seqs: int, length: int) -> bool:
        """Whether `num_seqs` sequences of `length` tokens can run at once; what does not fit is noted."""
        info = self._core.info
        num_blocks = num_seqs * -(-length // info.block_size)
        if length > info.max_model_len:
            return self._skip(name, f"{length} tokens exceed the context of {info.max_model_len}")
        if num_seqs > info.max_num_seqs:
            return self._skip(name, f"{num_seqs} sequences exceed max_num_seqs {info.max_num_seqs}")
        if num_blocks > info.num_blocks:
            return self._skip(name, f"needs {num_blocks} blocks of the cache's {info.num_blocks}")
        return True

    def _skip(self, name: str, why: str) -> bool:
        self.skipped.append(f"{name}: {why}")
        self._say(f"{name} left out: {why}")
        return False

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed
