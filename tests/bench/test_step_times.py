"""Recording a step-time profile, on the simulated device with a clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from manta.bench.step_times import Grid, Step, StepBench, error_figures, record, run
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from manta.engine.sim import SimRunner
from manta.engine.step_profile import model_sizes
from manta.engine.step_time import StepShape, StepTimeModel, hardware_named
from tests.engine.test_step_profile import true_s
from tests.engine.test_step_time import LLAMA_8B

GRID = Grid(
    decode_seqs=(1, 8, 32, 4096),
    decode_contexts=(32, 512),
    prefill_tokens=(16, 512, 2048),
    prefill_contexts=(0, 1024),
    held_out=(Step(20, 100), Step(10, 200, 2, 300), Step(5000, 1)),
    repeats=5,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def runner() -> SimRunner:
    clock = Clock()
    return SimRunner(true_s, vocab_size=2000, clock=clock, sleep=clock.sleep)


@pytest.fixture
def bench(runner: SimRunner) -> StepBench:
    return StepBench(
        runner,
        block_size=16,
        num_blocks=4096,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_tokens=2048,
        clock=runner._clock,
    )


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (Step(8, 100), StepShape(0, 8, 8 * (101 + 2 + 2), 0)),  # the middle of 5 steps after two others
        (Step(0, 0, 1, 300, 50), StepShape(300, 0, 0, 300 * 50 + 300 * 301 // 2)),
        (Step(3, 40, 2, 10, 0), StepShape(20, 3, 3 * 45, 2 * 55)),
    ],
    ids=["decode", "prefill", "mixed"],
)
def test_a_step_takes_what_the_device_takes(bench: StepBench, runner: SimRunner, step: Step, shape: StepShape) -> None:
    point = bench.measure(step, 5)
    assert StepShape.of_point(point) == shape
    assert point.seconds == pytest.approx(true_s(shape))
    assert not runner._slots  # ready for the next one


def test_what_does_not_fit_is_left_out(bench: StepBench) -> None:
    assert bench.fits(Step(64, 500))
    assert not bench.fits(Step(65, 500))  # sequences
    assert not bench.fits(Step(64, 1010))  # blocks
    assert not bench.fits(Step(1, 4090))  # context
    assert not bench.fits(Step(1, 10, 1, 2048))  # tokens of a step


def test_the_recorded_profile_predicts_steps_that_it_does_not_hold(bench: StepBench) -> None:
    said: list[str] = []
    profile = record(bench, GRID, gpu="h200", model=model_sizes(LLAMA_8B), dtype="bfloat16", say=said.append)
    assert (len(profile.decode), len(profile.prefill), len(profile.held_out)) == (6, 6, 2)
    assert len(said) == 14
    hardware = hardware_named("h200")
    measured = error_figures(StepTimeModel(LLAMA_8B, hardware, profile=profile), profile, "x_")
    peaks = error_figures(StepTimeModel(LLAMA_8B, hardware), profile, "x_")
    assert measured["x_error_max_percent"] < 5 < peaks["x_error_max_percent"]
    assert measured["x_error_median_percent"] <= measured["x_error_max_percent"]


def test_a_profile_of_a_quantized_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profiles are of plain models"):
        run(EngineConfig.build("nothing", quantization="fp8"), folder=tmp_path)
