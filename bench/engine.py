"""`manta bench engine`: one engine in this process, without HTTP: decode, prefill and mixed workloads. Knows no Ray.

Every setting is warmed up and repeated with other prompts; figures are medians of the repetitions. A core is driven to
its last result, so that no time is taken while work is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.errors import ConfigError

from .drive import Drive, describe_engine, drive, host_figures, start
from .report import CurvePoint, Report, check_plot, memory_figures, plot_curve
from .stats import median, summarize
from .workloads import Item, from_lengths, mix_lengths, shared_prefix, uniform

WORKLOADS = ("decode", "prefill", "d1", "d2", "prefix")


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
    json_path: Path | None = None,
    plot_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Measure an engine that is started for this and closed afterwards.

    `num_requests` bounds the number of requests of d1, d2 and prefix. Sizes that are None follow from the device. What
    does not fit the engine (context, cache, sequences) is left out and listed in `details.skipped`. Raises ConfigError
    or CheckpointError.
    """
    unknown = sorted(set(workloads) - set(WORKLOADS))
    if unknown or not workloads:
        raise ConfigError(f"unknown workload {', '.join(unknown)!r}; known: {', '.join(WORKLOADS)}", field="workloads")
    if plot_path is not None:
        check_plot()
    core, figures = start(config)
    try:
        sizes = _sizes(core, batch_sizes, prefill_lens, num_requests, repeats)
        bench = EngineBench(core, sizes, console)
        for name in workloads:
            figures |= getattr(bench, name)()
        figures |= memory_figures()
        report = Report(
            "engine",
            model=describe_engine(config, core.info),
            workload={"workloads": list(workloads), **asdict(sizes)},
            figures=figures,
            details={"skipped": bench.skipped},
        )
    finally:
        core.close()
    report.finish(console, json_path)
    if plot_path is not None:
        plot_curve(plot_path, bench.curve, title=f"{core.info.model_name}, {core.info.dtype}, {core.info.device}")
    return report


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

    def __init__(self, core: EngineCore, sizes: Sizes, console: Console | None) -> None:
        self.skipped: list[str] = []
        self.curve: list[CurvePoint] = []
        self._core = core
        self._sizes = sizes
        self._console = console
        self._vocab_size = core.info.vocab_size
        self._seed = 0

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
            decodes = [step for one in drives for step in one.steps if not step.num_prefill_tokens]
            figures |= host_figures(decodes, f"{name}_")
            ttft_p95_ms = summarize([record for one in drives for record in one.records]).ttft.p95 * 1e3
            self.curve.append(CurvePoint(str(batch), batch / tpot_s, ttft_p95_ms, tpot_s * 1e3))
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
        return figures

    def d1(self) -> dict[str, float]:
        """Many equal requests at once."""
        sizes = self._sizes
        if not self._fits("d1", 1, sizes.d1_prompt_len + sizes.d1_output_len):
            return {}
        return self._batch("d1", lambda: self._uniform(sizes.d1_requests, sizes.d1_prompt_len, sizes.d1_output_len))

    def d2(self) -> dict[str, float]:
        """Many requests with chat-like lengths at once."""

        def items() -> list[Item]:
            divisor, seed = self._sizes.d2_length_divisor, self._next_seed()
            lengths = [[max(4, length // divisor) for length in one] for one in mix_lengths(self._sizes.d2_requests)]
            return from_lengths(*lengths, vocab_size=self._vocab_size, seed=seed)

        longest = max(len(item.prompt_token_ids) + item.max_tokens for item in items())
        return self._batch("d2", items) if self._fits("d2", 1, longest) else {}

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
        return {
            "prefix_cold_s": median(cold_s),
            "prefix_warm_s": median(warm_s),
            "prefix_unshared_s": median(unshared_s),
        }

    def _batch(self, name: str, make_items: Callable[[], list[Item]]) -> dict[str, float]:
        drives = self._repeat(name, make_items)
        middle = sorted(drives, key=lambda one: one.duration_s)[(len(drives) - 1) // 2]
        figures = summarize(middle.records).figures(f"{name}_")
        figures[f"{name}_steps"] = float(len(middle.steps))
        figures[f"{name}_preemptions"] = float(middle.num_preemptions)
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

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed
