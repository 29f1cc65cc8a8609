"""A core learns what its steps cost where nobody could tell it, and says so at the start where somebody can."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from manta.engine.config import EngineConfig
from manta.engine.core import LEARN_INTERVAL, EngineCore
from manta.engine.sim import SimRunner
from manta.engine.startup import start_engine
from manta.engine.step_costs import StepCosts
from manta.engine.step_time import StepShape
from tests.engine.engines import make_core, make_scheduler, request, run

COSTS = StepCosts(overhead_s=0.004, weights_s=0.0, token_s=0.0015, pair_s=0.0, context_token_s=1e-5)


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """On a device whose steps take what COSTS say, by a clock that only moves with them."""
    clock = Clock()
    monkeypatch.setattr("manta.engine.core.time", SimpleNamespace(monotonic=clock))

    def predict(step: StepShape) -> float:
        return COSTS.step_s(
            step.num_prefill_tokens + step.num_decode_seqs, step.num_prefill_pairs, step.num_decode_context_tokens
        )

    runner = SimRunner(predict, vocab_size=1000, clock=clock, sleep=clock.sleep)
    return EngineCore(make_scheduler(num_blocks=400, budget=64), runner, make_core().info)


def test_nothing_is_said_before_enough_steps_were_seen(core: EngineCore):
    run(core, request("a", [1] * 30, max_tokens=LEARN_INTERVAL // 2), check=False)
    assert core.step_costs is None


def test_costs_are_learned_from_the_steps_that_were_run(core: EngineCore):
    for turn in range(12):
        prompts = [[turn * 10 + number + 1] * (5 + 9 * number) for number in range(7)]
        run(core, *(request(f"{turn}.{len(p)}", p, max_tokens=20 + len(p)) for p in prompts), check=False)
    learned = core.step_costs
    assert learned is not None
    for num_tokens, num_context in ((1, 50), (8, 400), (64, 0)):
        expected_s = COSTS.step_s(num_tokens, 0, num_context)
        assert learned.step_s(num_tokens, 0, num_context) == pytest.approx(expected_s, rel=0.1)


@pytest.mark.model
def test_a_device_with_figures_says_its_costs_at_the_start_and_learns_none():
    core = start_engine(EngineConfig.build("smollm2-135m", device="sim:h200", tpot_target_ms=20.0, num_blocks=64))
    info = core.info
    assert info.step_costs is not None
    assert 0 < info.step_costs.token_s < 1e-5
    assert (info.max_num_batched_tokens, info.tpot_target_s) == (8192, 0.02)
    assert core.step_costs is None


@pytest.mark.model
def test_a_device_of_fixed_steps_says_that_they_are_all_the_same():
    info = start_engine(EngineConfig.build("smollm2-135m", device="sim:20ms", num_blocks=64)).info
    assert info.step_costs == StepCosts(overhead_s=0.02, weights_s=0.0, token_s=0.0, pair_s=0.0, context_token_s=0.0)
