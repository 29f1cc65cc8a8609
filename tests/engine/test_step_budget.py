"""Prompt tokens beside decodes: as many as keep the step under the target, never none."""

from __future__ import annotations

import pytest

from manta.engine.config import EngineConfig, max_num_seqs_of
from manta.engine.errors import ConfigError
from manta.engine.scheduler import Scheduler
from manta.engine.startup import start_engine
from manta.engine.step_budget import MIN_PREFILL_TOKENS, StepBudget
from manta.engine.step_time import StepShape
from tests.engine.engines import make_scheduler, request


def step_s(step: StepShape) -> float:
    """4 ms, 20 us a token, and what the decodes' context takes."""
    num_tokens = step.num_prefill_tokens + step.num_decode_seqs
    return 4e-3 + 20e-6 * num_tokens + 30e-9 * step.num_decode_context_tokens + 1e-9 * step.num_prefill_pairs


def budget(target_ms: float, *, raster: int = 1, max_tokens: int = 8192) -> StepBudget:
    return StepBudget(step_s, target_s=target_ms / 1e3, max_tokens=max_tokens, raster=raster)


def test_the_step_stays_just_under_the_target():
    tokens = budget(20).prefill_tokens(100, 50_000)
    assert tokens == pytest.approx((20e-3 - 4e-3 - 1.5e-3) / 20e-6 - 100, rel=0.03)

    def seconds(num_tokens: int) -> float:
        return step_s(StepShape(num_tokens, 100, 50_000, num_tokens * (num_tokens + 1) // 2))

    assert seconds(tokens) <= 20e-3 < seconds(tokens + 1 + 256)  # contexts are rounded up to 256


def test_more_decodes_and_longer_prompts_leave_less():
    of_20_ms = budget(20)
    assert of_20_ms.prefill_tokens(200, 50_000) < of_20_ms.prefill_tokens(100, 50_000)
    assert of_20_ms.prefill_tokens(100, 90_000) < of_20_ms.prefill_tokens(100, 50_000)
    assert of_20_ms.prefill_tokens(100, 50_000, prefill_start=20_000) < of_20_ms.prefill_tokens(100, 50_000)


def test_some_tokens_are_always_taken_and_a_step_without_decodes_takes_all():
    assert budget(1).prefill_tokens(100, 50_000) == MIN_PREFILL_TOKENS
    assert budget(1).prefill_tokens(0, 0) == 8192
    assert budget(10_000).prefill_tokens(100, 50_000) == 8192 - 100
    assert budget(1, max_tokens=150).prefill_tokens(100, 1000) == 50


def test_answers_are_kept_for_sizes_that_round_up_alike():
    asked: list[StepShape] = []

    def predict(step: StepShape) -> float:
        asked.append(step)
        return step_s(step)

    kept = StepBudget(predict, target_s=20e-3, max_tokens=8192, raster=16)
    first = kept.prefill_tokens(65, 4097)
    num_asked = len(asked)
    assert kept.prefill_tokens(80, 8192) == first
    assert len(asked) == num_asked
    assert {(step.num_decode_seqs, step.num_decode_context_tokens) for step in asked} == {(80, 8192)}


def scheduler_with(step_budget: StepBudget | None) -> Scheduler:
    scheduler = make_scheduler(num_blocks=4096, block_size=16, budget=8192, max_num_seqs=64)
    scheduler._budget = step_budget
    return scheduler


@pytest.mark.parametrize(("target_ms", "prefill_tokens"), [(None, 6000), (12.0, 390), (0.5, MIN_PREFILL_TOKENS)])
def test_a_step_that_decodes_takes_only_so_many_prompt_tokens(target_ms: float | None, prefill_tokens: int):
    scheduler = scheduler_with(None if target_ms is None else budget(target_ms))
    assert scheduler.add(request("a", list(range(900)), max_tokens=50)) is None
    first = scheduler.schedule()
    assert first is not None
    assert first.num_tokens == 900  # nobody decodes yet
    for index in range(3):
        assert scheduler.add(request(f"b{index}", [index] * 2000, max_tokens=5)) is None
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.rows[0].is_decode
    assert sum(row.num_tokens for row in plan.rows[1:]) == pytest.approx(prefill_tokens, rel=0.03)
    following = scheduler.schedule()  # the rest goes on as it began
    assert following is not None
    assert following.num_tokens > 1


@pytest.mark.parametrize(
    ("device_type", "overrides", "expected"),
    [
        ("cuda", {"max_num_seqs": 7}, 7),
        ("cpu", {"max_num_seqs": 300}, 300),
        ("cuda", {}, 1024),
        ("cpu", {}, 256),
        ("cuda", {"max_num_batched_tokens": 700}, 700),
        ("cpu", {"max_num_batched_tokens": 512}, 256),
    ],
)
def test_running_requests_are_as_many_as_configured_or_as_pay(
    device_type: str, overrides: dict[str, int], expected: int
):
    assert max_num_seqs_of(EngineConfig.build("m", **overrides), device_type) == expected


@pytest.mark.model
def test_a_target_needs_a_device_of_known_speed():
    with pytest.raises(ConfigError, match=r"tpot_target_ms = 20: how long steps take on cpu is not known"):
        start_engine(EngineConfig.build("smollm2-135m", device="cpu", tpot_target_ms=20))


@pytest.mark.model
def test_a_simulated_engine_keeps_its_target():
    config = EngineConfig.build("smollm2-135m", device="sim:h200", tpot_target_ms=1.5)
    core = start_engine(config)
    assert core.scheduler._budget is not None
    assert MIN_PREFILL_TOKENS < core.scheduler._budget.prefill_tokens(8, 8000) < 8192 - 8
    core.close()
