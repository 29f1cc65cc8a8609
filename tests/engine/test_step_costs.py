"""A step's seconds in five numbers: exact for the roofline, and learned from steps where there is none."""

from __future__ import annotations

import random

import pytest

from manta.engine.step_costs import LEAST_OVERHEAD_S, LEAST_STEPS, ObservedCosts, StepCosts
from manta.engine.step_time import HARDWARE, StepShape, StepTimeModel
from tests.shapes import LLAMA_8B

COSTS = StepCosts(overhead_s=1.0, weights_s=4.0, token_s=0.5, pair_s=0.01, context_token_s=0.001)
CPU = StepCosts(overhead_s=0.004, weights_s=0.0, token_s=0.0015, pair_s=2e-7, context_token_s=1e-6)


def seconds(costs: StepCosts, step: StepShape) -> float:
    num_tokens = step.num_prefill_tokens + step.num_decode_seqs
    return costs.step_s(num_tokens, step.num_prefill_pairs, step.num_decode_context_tokens)


def test_a_step_is_bound_by_weights_or_by_tokens_and_attention_comes_on_top():
    assert COSTS.step_s(2) == 5.0
    assert COSTS.step_s(8) == 5.0
    assert COSTS.step_s(10) == 6.0
    assert COSTS.step_s(10, 100, 1000) == 8.0
    assert COSTS.step_s(0, 100, 1000) == 0.0


def test_a_prompt_is_computed_in_chunks_and_attends_to_what_is_cached():
    # Chunks of 10, 10 and 2 tokens; each token attends to the 5 cached ones and to those before it.
    assert COSTS.prefill_s(22, 5, tokens_a_step=10) == pytest.approx(6.0 + 6.0 + 5.0 + (22 * 5 + 253) * 0.01)
    assert COSTS.prefill_s(20, 0, tokens_a_step=10) == pytest.approx(12.0 + 2.1)
    assert COSTS.prefill_s(0, 5, tokens_a_step=10) == 0.0


@pytest.mark.parametrize("gpu", ["h200", "h100", "a100"])
@pytest.mark.parametrize(
    "step",
    [
        StepShape(num_decode_seqs=1, num_decode_context_tokens=100),
        StepShape(num_decode_seqs=64, num_decode_context_tokens=200_000),
        StepShape(8192, num_prefill_pairs=8192 * 4096),
        StepShape(700, num_prefill_pairs=700 * 9000),
        StepShape(2000, num_decode_seqs=60, num_decode_context_tokens=30_000, num_prefill_pairs=10**6),
        StepShape(1),
    ],
)
def test_the_roofline_is_met_exactly(gpu: str, step: StepShape):
    model = StepTimeModel(LLAMA_8B, HARDWARE[gpu])
    assert seconds(StepCosts.of(model.predict), step) == pytest.approx(model.predict(step), rel=1e-6)


def test_steps_that_always_take_the_same_cost_overhead_only():
    costs = StepCosts.of(lambda step: 0.02)
    assert costs == StepCosts(overhead_s=0.02, weights_s=0.0, token_s=0.0, pair_s=0.0, context_token_s=0.0)


def steps(rng: random.Random, count: int) -> list[StepShape]:
    """One in five with a chunk of a prompt, beside a few decodes; the others decode."""
    found = []
    for _ in range(count):
        if rng.random() < 0.2:
            num_tokens, start, decodes = rng.randint(1, 512), rng.choice([0, 512, 1024]), rng.randint(0, 8)
            pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
            found.append(StepShape(num_tokens, decodes, decodes * 300, pairs))
        else:
            decodes = rng.randint(1, 32)
            found.append(StepShape(0, decodes, decodes * rng.randint(50, 800)))
    return found


def test_costs_are_learned_from_steps():
    rng, observed = random.Random(1), ObservedCosts()
    for step in steps(rng, 300):
        observed.observe(step, seconds(CPU, step) * rng.uniform(0.9, 1.1))
    costs = observed.costs()
    assert costs is not None
    for step in steps(rng, 50):
        assert seconds(costs, step) == pytest.approx(seconds(CPU, step), rel=0.05)


def test_pauses_of_the_machine_hardly_change_what_was_learned():
    rng, observed = random.Random(2), ObservedCosts()
    for index, step in enumerate(steps(rng, 400)):
        observed.observe(step, seconds(CPU, step) * (30.0 if index % 40 == 39 else 1.0))
        if index % 32 == 31:
            observed.costs()
    costs = observed.costs()
    assert costs is not None
    for step in steps(rng, 50):
        assert seconds(costs, step) == pytest.approx(seconds(CPU, step), rel=0.25)


def test_a_device_that_becomes_slower_is_noticed():
    rng, observed = random.Random(3), ObservedCosts()
    for index, step in enumerate(steps(rng, 3000)):
        observed.observe(step, seconds(CPU, step) * (1.0 if index < 1000 else 2.0))
        if index % 32 == 31:
            observed.costs()
    costs = observed.costs()
    assert costs is not None
    for step in steps(rng, 20):
        assert seconds(costs, step) == pytest.approx(2 * seconds(CPU, step), rel=0.1)


def test_nothing_is_said_after_few_steps_and_empty_ones_are_ignored():
    observed = ObservedCosts()
    for _ in range(LEAST_STEPS - 1):
        observed.observe(StepShape(10), 1.0)
        observed.observe(StepShape(), 1.0)
    assert observed.costs() is None
    observed.observe(StepShape(10), 1.0)
    assert observed.costs() is not None


def test_no_cost_is_below_zero_whatever_was_observed():
    rng, observed = random.Random(4), ObservedCosts()
    for _ in range(100):
        observed.observe(StepShape(rng.randint(1, 500), rng.randint(0, 9), rng.randint(0, 999)), rng.uniform(0.1, 1))
    costs = observed.costs()
    assert costs is not None
    assert min(costs.overhead_s, costs.token_s, costs.pair_s, costs.context_token_s) >= 0.0


def test_a_step_is_never_free_though_all_of_its_time_seems_to_be_its_context():
    """As on a machine that somebody else takes more and more of while a sequence decodes."""
    observed = ObservedCosts()
    for num_context_tokens in range(20, 70):
        step = StepShape(num_decode_seqs=1, num_decode_context_tokens=num_context_tokens)
        observed.observe(step, 0.002 * (num_context_tokens - 10))
    costs = observed.costs()
    assert costs is not None
    assert costs.token_s == 0.0
    assert costs.step_s(1) == LEAST_OVERHEAD_S


def test_what_short_prompts_took_by_chance_is_no_price_for_long_ones():
    """Two slow prompts of thirty tokens among decodes: were it their pairs, 4,000 tokens would take hours."""
    observed = ObservedCosts()
    for num_tokens, took_s in ((10, 0.02), (12, 0.02), (30, 0.4), (20, 0.03), (28, 0.35)):
        observed.observe(StepShape(num_tokens, num_prefill_pairs=num_tokens * (num_tokens + 1) // 2), took_s)
        for _ in range(10):
            observed.observe(StepShape(num_decode_seqs=1, num_decode_context_tokens=num_tokens), 0.02)
    costs = observed.costs()
    assert costs is not None
    assert costs.pair_s == 0.0
    assert costs.step_s(4000, 4000 * 4001 // 2) < 60.0
    long = StepShape(1000, num_prefill_pairs=1000 * 1001 // 2)
    observed.observe(long, 10 * seconds(costs, long))
    costs = observed.costs()
    assert costs is not None
    assert costs.pair_s > 0.0
