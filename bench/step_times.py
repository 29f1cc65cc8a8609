"""`manta profile`: measures steps of many sizes on the device and keeps them for the step-time model. Knows no request.

Plans are written out here. A sequence begins as after a prefix hit, with all but its last tokens taken as computed:
their keys and values are whatever the cache holds, which changes no step's time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from manta.engine.config import EngineConfig, QuantizationConfig, max_num_seqs_of
from manta.engine.errors import ConfigError
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.plan import NewSequence, Row, Runner, StepHandle, StepPlan
from manta.engine.request import SamplingParams
from manta.engine.step_profile import StepPoint, StepProfile, model_sizes
from manta.engine.step_time import StepShape, StepTimeModel, hardware_of

from .drive import device_name
from .report import Report, environment, sayer, write_json
from .stats import median

TOKEN_ID = 1000


@dataclass(frozen=True)
class Grid:
    """What is measured: every pair of the first two and of the next two, and single steps to judge predictions by."""

    decode_seqs: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 1024)
    decode_contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    prefill_tokens: tuple[int, ...] = (16, 128, 512, 1024, 2048, 4096, 8192, 16384)
    prefill_contexts: tuple[int, ...] = (0, 2048, 8192, 24576)
    held_out: tuple[Step, ...] = ()
    repeats: int = 8


@dataclass(frozen=True)
class Step:
    """`num_decodes` sequences with `decode_context` tokens each, and `num_prompts` chunks of `prompt_tokens` tokens
    after `prompt_context` others each."""

    num_decodes: int = 0
    decode_context: int = 0
    num_prompts: int = 0
    prompt_tokens: int = 0
    prompt_context: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompts * self.prompt_tokens


HELD_OUT = (
    Step(5, 700),
    Step(48, 300),
    Step(48, 3000),
    Step(200, 900),
    Step(700, 400),
    Step(num_prompts=1, prompt_tokens=300),
    Step(num_prompts=1, prompt_tokens=3000),
    Step(num_prompts=1, prompt_tokens=6000, prompt_context=4096),
    Step(num_prompts=32, prompt_tokens=250),
    Step(100, 600, 1, 1000),
    Step(256, 600, 16, 240),
    Step(256, 600, 16, 490),
    Step(800, 500, 20, 300),
)
USUAL = Grid(held_out=HELD_OUT)
"""On a GPU with room for it; what does not fit the engine is left out."""


def run(
    config: EngineConfig, *, grid: Grid = USUAL, folder: Path, path: Path | None = None, console: Console | None = None
) -> StepProfile:
    """Record a profile and write it to `path`, by default `<folder>/<gpu>/<model>.json`.

    Raises ConfigError, also on a device whose peaks are not known.
    """
    from manta.engine.model_runner import build_model_runner

    if config.quantization != QuantizationConfig():
        raise ConfigError(
            "quantization: profiles are of plain models, and engines of plain models would take this one for theirs",
            field="quantization.weights",
        )
    source = resolve_model(config.model)
    shape = load_shape(source)
    built = build_model_runner(config, source, shape)
    try:
        device = device_name(str(built.device))
        hardware = hardware_of(device)
        if hardware is None:
            raise ConfigError(f"device = {device!r}: the peaks of this device are not known, which a profile corrects")
        while built.runner.prepare_more():  # else small steps with prompts are launched kernel by kernel
            pass
        bench = StepBench(
            built.runner,
            block_size=built.block_size,
            num_blocks=built.num_blocks,
            max_model_len=built.max_model_len,
            max_num_seqs=max_num_seqs_of(config, built.device.type),
            max_num_tokens=built.max_num_batched_tokens,
        )
        profile = record(
            bench, grid, gpu=hardware.name, model=model_sizes(shape), dtype=built.dtype, say=sayer(console)
        )
    finally:
        built.runner.close()
    path = path or folder / hardware.name / f"{source.name}.json"
    write_json(path, msgspec.to_builtins(profile))
    peaks = StepTimeModel(shape, hardware, dtype=built.dtype)
    measured = StepTimeModel(shape, hardware, dtype=built.dtype, profile=profile)
    report = Report(
        "profile",
        model={"name": source.name, "device": device, "dtype": built.dtype},
        workload={"points": len(profile.decode) + len(profile.prefill), "held_out": len(profile.held_out)},
        figures={**error_figures(measured, profile, "profile_"), **error_figures(peaks, profile, "peaks_alone_")},
    )
    report.finish(console, None)
    if console is not None:
        console.print(f"written to {path}", highlight=False)
    return profile


def record(
    bench: StepBench, grid: Grid, *, gpu: str, model: dict[str, int], dtype: str, say: Callable[[str], None]
) -> StepProfile:
    """Measure the grid on a runner."""

    def measured(steps: Iterator[Step] | Sequence[Step]) -> list[StepPoint]:
        points = []
        for step in steps:
            if bench.fits(step):
                points.append(bench.measure(step, grid.repeats))
                say(f"{step}: {points[-1].seconds * 1e3:.3f} ms")
        return points

    pairs = itertools.product
    return StepProfile(
        gpu=gpu,
        model=model,
        dtype=dtype,
        decode=measured(Step(n, c) for n, c in pairs(grid.decode_seqs, grid.decode_contexts)),
        prefill=measured(Step(0, 0, 1, t, c) for t, c in pairs(grid.prefill_tokens, grid.prefill_contexts)),
        held_out=measured(grid.held_out),
        environment=environment(),
    )


def error_figures(model: StepTimeModel, profile: StepProfile, prefix: str) -> dict[str, float]:
    """How far predictions of the held-out steps are off, percent of the measured time."""
    errors = [100 * abs(model.predict(StepShape.of_point(point)) / point.seconds - 1) for point in profile.held_out]
    if not errors:
        return {}
    return {f"{prefix}error_median_percent": median(errors), f"{prefix}error_max_percent": max(errors)}


class StepBench:
    """Times steps on a runner that nobody else uses."""

    def __init__(
        self,
        runner: Runner,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._clock = clock
        self._step_ids = itertools.count()

    def fits(self, step: Step, *, repeats: int = 16) -> bool:
        lengths = self._lengths(step, repeats)
        return (
            max(lengths) <= self._max_model_len
            and len(lengths) <= self._max_num_seqs
            and step.num_tokens <= self._max_num_tokens
            and sum(self._blocks_of(length) for length in lengths) <= self._num_blocks
        )

    def measure(self, step: Step, repeats: int) -> StepPoint:
        """The mean of `repeats` steps, one launched while the one before runs; two more come first."""
        plans = list(self._plans(step, repeats + 2))
        handles: list[StepHandle] = []
        ends_s = []
        for index, plan in enumerate(plans):
            handles.append(self._runner.launch(plan))
            if index:
                handles[index - 1].result()
                ends_s.append(self._clock())
        handles[-1].result()
        ends_s.append(self._clock())
        seconds = (ends_s[-1] - ends_s[1]) / repeats
        self._launch([], freed=list(range(len(self._lengths(step, 0))))).result()
        # Contexts grow by a token a step: the middle one stands for all.
        middle = StepShape.of(plans[2 + (repeats - 1) // 2])
        return StepPoint(
            middle.num_prefill_tokens,
            middle.num_decode_seqs,
            middle.num_decode_context_tokens,
            middle.num_prefill_pairs,
            seconds,
        )

    def _plans(self, step: Step, count: int) -> Iterator[StepPlan]:
        """Decodes begin with their prompt's last token, in a step before; prompts enter again in every step."""
        lengths = self._lengths(step, count + 1)
        blocks = itertools.count()
        block_ids = [[next(blocks) for _ in range(self._blocks_of(length))] for length in lengths]
        params = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)

        def new(slot: int, num_tokens: int) -> NewSequence:
            return NewSequence(slot, [TOKEN_ID] * num_tokens, num_tokens, block_ids[slot], params, [])

        decodes = range(step.num_decodes)
        prompts = range(step.num_decodes, len(lengths))
        if decodes:
            last = step.decode_context - 1
            first = [Row(slot, last, 1, [], True, False) for slot in decodes]
            self._launch(first, new=[new(slot, step.decode_context) for slot in decodes]).result()
        start, end = step.prompt_context, step.prompt_context + step.prompt_tokens
        for index in range(count):
            rows = [Row(slot, step.decode_context + index, 1, [], True, True) for slot in decodes]
            rows += [Row(slot, start, step.prompt_tokens, [], True, False) for slot in prompts]
            freed = list(prompts) if index else []
            yield StepPlan(next(self._step_ids), freed, [new(slot, end) for slot in prompts], rows)

    def _launch(
        self, rows: list[Row], *, new: list[NewSequence] | None = None, freed: list[int] | None = None
    ) -> StepHandle:
        return self._runner.launch(StepPlan(next(self._step_ids), freed or [], new or [], rows))

    def _lengths(self, step: Step, num_steps: int) -> list[int]:
        """Tokens of each sequence at the end of `num_steps` steps."""
        decode, prompt = step.decode_context + num_steps, step.prompt_context + step.prompt_tokens
        return [decode] * step.num_decodes + [prompt] * step.num_prompts

    def _blocks_of(self, length: int) -> int:
        return -(-length // self._block_size)
