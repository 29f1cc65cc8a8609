"""Scheduling policies on a clock of their own: times computed by hand, and what a target does to the longest step."""

from __future__ import annotations

import pytest

from manta.bench.policies import POLICIES, Policy, run, simulate
from manta.bench.workloads import mix_lengths
from manta.deploy.config import load_engine_config
from manta.engine.errors import ConfigError
from manta.engine.step_time import StepShape, StepTimeModel, hardware_named
from tests.engine.test_step_time import LLAMA_8B


@pytest.fixture
def model() -> StepTimeModel:
    return StepTimeModel(LLAMA_8B, hardware_named("h200"))


def test_a_lone_request_takes_its_prefill_and_its_decodes(model: StepTimeModel) -> None:
    outcome = simulate(model, Policy(8, 8192), [100], [4], num_blocks=100)
    prefill_s = model.predict(StepShape(num_prefill_tokens=100, num_prefill_pairs=5050))
    decodes_s = [model.predict(StepShape(0, 1, context)) for context in (101, 102, 103)]
    assert outcome.duration_s == pytest.approx(prefill_s + sum(decodes_s))
    assert outcome.num_steps == 4
    assert outcome.ttft_p50_s == pytest.approx(prefill_s)
    assert outcome.tpot_p50_s == pytest.approx(sum(decodes_s) / 3)
    assert outcome.longest_decode_step_s == pytest.approx(max(decodes_s))


def test_a_target_bounds_the_longest_step_in_more_steps(model: StepTimeModel) -> None:
    prompt_lens, output_lens = mix_lengths(100)
    free = simulate(model, Policy(64, 8192), prompt_lens, output_lens, num_blocks=13_000)
    bound = simulate(model, Policy(64, 8192, 15.0), prompt_lens, output_lens, num_blocks=13_000)
    assert bound.longest_decode_step_s <= 15e-3 < free.longest_decode_step_s
    assert bound.num_steps > free.num_steps


def test_the_command_reports_every_policy() -> None:
    config = load_engine_config("sim-h200")
    report = run(config, policies=POLICIES[:2], num_requests=20)
    assert list(report.figures) == ["seqs_256_tokens_2048_d2_s", "seqs_256_tokens_8192_d2_s"]
    assert all(value > 0 for value in report.figures.values())
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)
    with pytest.raises(ConfigError, match="no figures for 'abacus'"):
        run(config, gpu="abacus")
