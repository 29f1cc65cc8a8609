"""The padded path of small steps with prefills, which CUDA graphs capture, run on CPU: as without padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manta.engine import prefill_graphs
from manta.engine.layers.attention import LastRows
from manta.engine.model_runner import BuiltRunner
from manta.engine.plan import Row
from manta.engine.prefill_graphs import PaddedStep, padded_tokens
from manta.engine.request import SamplingParams
from tests.engine.runners import GREEDY, Driver, build, padded, save_tiny

PROMPTS = [[5, 17, 99, 3, 44], list(range(20, 61)), [7], [150, 151] * 9, [31, 32, 33]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture
def plain(tiny: Path) -> Iterator[BuiltRunner]:
    built = build(tiny)
    yield built
    built.runner.close()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and padded tokens of the padded steps that ran."""
    seen: list[tuple[int, int]] = []
    run = PaddedStep.run

    def noted(step: PaddedStep, last: LastRows | None) -> Any:
        seen.append((step.num_tokens, len(step.token_ids)))
        return run(step, last)

    monkeypatch.setattr(PaddedStep, "run", noted)
    return seen


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_prompts_and_their_chunks_give_the_tokens_of_the_path_without_padding(
    plain: BuiltRunner,
    sizes: list[tuple[int, int]],
    chunk: int | None,
    deterministic: bool,
    prompt_logprobs: int | None,
):
    params = SamplingParams(temperature=0.0, prompt_logprobs=prompt_logprobs, logprobs=2)
    wanted, found = (
        Driver(built) for built in (plain, padded(plain, deterministic=deterministic, max_padded_tokens=128))
    )
    assert found.generate(PROMPTS, 9, params, chunk=chunk) == wanted.generate(PROMPTS, 9, params, chunk=chunk)
    assert sizes
    for (_, one), (_, other) in zip(wanted.results, found.results, strict=True):
        assert one.logprobs.keys() == other.logprobs.keys()
        assert one.prompt_logprobs.keys() == other.prompt_logprobs.keys()
        for row, entries in one.prompt_logprobs.items():
            expected = [entry.logprob for entry in entries]
            assert [entry.logprob for entry in other.prompt_logprobs[row]] == pytest.approx(expected, abs=1e-4)


def test_decodes_share_a_padded_step_with_prompts_that_come_late(plain: BuiltRunner, sizes: list[tuple[int, int]]):
    alone = [Driver(plain).generate([prompt], 6)[0] for prompt in PROMPTS]
    driver = Driver(padded(plain, max_padded_tokens=64))
    new = [driver.sequence(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    done = [0] * len(PROMPTS)
    for late, prompt in enumerate(PROMPTS):
        decodes = [Row(slot, done[slot], 1, [], True, True) for slot in range(late)]
        driver.launch([*decodes, Row(late, 0, len(prompt), [], True, False)], [new[late]])
        done = [position + (slot < late) for slot, position in enumerate(done)]
        done[late] = len(prompt)
    driver.finish()
    assert sizes == [(5, 16), (42, 64), (3, 16), (21, 32), (7, 16)]
    for slot, tokens in enumerate(alone):
        assert driver.tokens[slot] == tokens[: len(driver.tokens[slot])]


def test_steps_that_are_too_large_or_have_too_many_prompts_run_without_padding(
    plain: BuiltRunner, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefill_graphs, "MAX_PREFILLS", 2)
    driver = Driver(padded(plain, max_padded_tokens=32))
    expected = Driver(plain).generate(PROMPTS, 4)
    assert driver.generate(PROMPTS, 4) == expected  # five prompts at once
    assert not sizes
    assert driver.generate(PROMPTS[1:2], 4) == expected[1:2]  # 41 tokens
    assert not sizes
    assert driver.generate(PROMPTS[:2], 4, chunk=20) == Driver(plain).generate(PROMPTS[:2], 4)
    assert sizes == [(25, 32), (21, 32), (2, 16)]


def test_slots_are_used_again_after_padded_steps(plain: BuiltRunner):
    driver = Driver(padded(plain, max_padded_tokens=64))
    for prompts in (PROMPTS[:3], PROMPTS[2:]):
        assert driver.generate(prompts, 5, GREEDY) == Driver(plain).generate(prompts, 5, GREEDY)


@pytest.mark.parametrize("most", [1, 16, 100, 512, 2048, 8192])
def test_sizes_rise_to_the_largest_step_and_waste_little_where_tokens_cost(most: int):
    sizes = padded_tokens(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, prefill_graphs.MAX_TOKENS)
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - smaller <= max(64, larger // 8)
