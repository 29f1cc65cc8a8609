"""The padded path of decode steps, which CUDA graphs capture, run on CPU: the same tokens as without padding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manta.engine import decode_step, runner
from manta.engine.batch import BatchBuilder
from manta.engine.decode_step import Draw, padded_sizes
from manta.engine.model_runner import BuiltRunner
from manta.engine.plan import NewSequence, Row, StepPlan
from manta.engine.request import SamplingParams
from manta.engine.upload import FixedUpload
from tests.engine.runners import GREEDY, Driver, build, padded, save_tiny

PROMPTS = [[5, 17, 99, 3, 44], list(range(20, 61)), [7], [150, 151] * 9, [31, 32, 33]]
DRAWN = SamplingParams(temperature=1.2, seed=5)
FILTERED = SamplingParams(temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=6)
PENALIZED = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2, seed=7)
BIASED = SamplingParams(temperature=0.0, logit_bias={9: 4.0, 11: -3.0}, min_tokens=4)
LOGPROBS = SamplingParams(temperature=0.0, logprobs=3)


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
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Draw]:
    """The kinds of the padded steps that ran."""
    seen: list[Draw] = []
    run = decode_step.DecodeStep.run

    def noted(step: Any) -> Any:
        seen.append(step._kind.draw)
        return run(step)

    monkeypatch.setattr(decode_step.DecodeStep, "run", noted)
    return seen


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (GREEDY, Draw.GREEDY),
        (DRAWN, Draw.PLAIN),
        (FILTERED, Draw.FILTERED),
        (PENALIZED, Draw.LOGITS),
        (BIASED, Draw.LOGITS),
        (LOGPROBS, Draw.LOGITS),
    ],
)
def test_tokens_are_those_of_the_path_without_padding(
    plain: BuiltRunner, draws: list[Draw], params: SamplingParams, expected: Draw
):
    wanted = Driver(plain)
    tokens = wanted.generate(PROMPTS, 20, params)
    assert not draws
    found = Driver(padded(plain))
    assert found.generate(PROMPTS, 20, params) == tokens
    assert len(draws) >= 19
    assert set(draws) == {expected}
    assert [result.logprobs for _, result in found.results] == [result.logprobs for _, result in wanted.results]


def test_different_requests_share_a_step_and_chunks_of_prompts_stand_between_decodes(
    plain: BuiltRunner, draws: list[Draw]
):
    mixed = [GREEDY, DRAWN, FILTERED, GREEDY, DRAWN]
    alone = [Driver(plain).generate([prompt], 8, p)[0] for prompt, p in zip(PROMPTS, mixed, strict=True)]
    driver = Driver(padded(plain))
    new = [driver.sequence(slot, prompt, mixed[slot]) for slot, prompt in enumerate(PROMPTS)]
    done = [0] * len(PROMPTS)
    for late in range(len(PROMPTS)):  # they enter one by one, and all decode together three times in between
        prompt = len(PROMPTS[late])
        decodes = [Row(slot, done[slot], 1, [], True, True) for slot in range(late)]
        driver.launch([*decodes, Row(late, 0, prompt, [], True, False)], [new[late]])
        done = [position + (slot < late) for slot, position in enumerate(done)]
        done[late] = prompt
        for _ in range(3):
            driver.launch([Row(slot, done[slot], 1, [], True, True) for slot in range(late + 1)])
            done = [position + (slot <= late) for slot, position in enumerate(done)]
    driver.finish()
    for slot, tokens in enumerate(alone):
        assert driver.tokens[slot][:8] == tokens[: len(driver.tokens[slot])]
    assert set(draws) == {Draw.GREEDY, Draw.PLAIN, Draw.FILTERED}


def test_tokens_that_the_host_knows_and_new_blocks_reach_the_step(plain: BuiltRunner):
    prompt = PROMPTS[1][:15]
    expected = Driver(plain).generate([prompt], 12)[0]
    driver = Driver(padded(plain))
    driver.tokens[3] = []
    known = [*prompt, *expected[:4]]  # a request that was preempted after four tokens, with a chunk that ends before
    driver.launch([Row(3, 0, len(known) - 1, [], False, False)], [NewSequence(3, known, 15, [6, 2], GREEDY, [])])
    driver.launch([Row(3, len(known) - 1, 1, [], True, True)])
    for position in range(len(known), 15 + 11):
        driver.launch([Row(3, position, 1, [9] if position == 32 else [], True, True)])
    driver.finish()
    assert driver.tokens[3] == expected[4:12]


def test_deterministic_runners_send_decodes_through_the_prefill_kernel(
    plain: BuiltRunner, monkeypatch: pytest.MonkeyPatch
):
    from manta.engine.layers import attention

    expected = Driver(plain).generate(PROMPTS, 6)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the decode kernel ran")

    monkeypatch.setattr(attention, "attention_decode", never)
    assert Driver(padded(plain, deterministic=True)).generate(PROMPTS, 6) == expected


def test_rows_with_a_common_prefix_attend_to_it_once_where_that_pays(
    plain: BuiltRunner, monkeypatch: pytest.MonkeyPatch
):
    prefix = [3 + i % 90 for i in range(48)]  # three blocks of 16
    prompts = [[*prefix, 100 + i] for i in range(4)] + [[8, 9, 10]]
    expected = Driver(plain).generate(prompts, 6)
    asked: list[tuple[int, int, int]] = []

    def pays(num_members: int, num_prefix_tokens: int, num_rows: int) -> bool:
        asked.append((num_members, num_prefix_tokens, num_rows))
        return True

    kinds = []
    run = decode_step.DecodeStep.run
    monkeypatch.setattr(runner, "pays", pays)
    monkeypatch.setattr(decode_step.DecodeStep, "run", lambda step: kinds.append(step._kind) or run(step))
    driver = Driver(padded(plain))
    driver.tokens |= {slot: [] for slot in range(5)}
    new = [NewSequence(s, p, len(p), [20, 21, 22, 30 + s], GREEDY, []) for s, p in enumerate(prompts[:4])]
    new.append(NewSequence(4, prompts[4], 3, [40], GREEDY, []))
    driver.launch([Row(s, 0, len(p), [], True, False) for s, p in enumerate(prompts)], new)
    for step in range(5):
        driver.launch([Row(s, len(p) + step, 1, [], True, True) for s, p in enumerate(prompts)])
    driver.finish()
    assert [driver.tokens[slot] for slot in range(5)] == expected
    assert asked == [(4, 48, 5)]  # once for these rows
    assert all(kind.shares_prefix for kind in kinds)
    assert len(kinds) == 5


def test_the_group_that_shares_most_rows_is_found():
    builder = BatchBuilder(max_num_seqs=8, max_model_len=200, block_size=16)
    tables = [[1, 2, 3], [1, 2, 4, 5], [7, 8], [1, 2, 6], [7, 9]]
    new = [NewSequence(s, [1] * 16 * len(b), 16 * len(b), b, GREEDY, []) for s, b in enumerate(tables)]
    builder.lay_out(StepPlan(0, [], new, [Row(s, 0, 16 * len(b), [], True, False) for s, b in enumerate(tables)]), {})
    shared = builder.shared_blocks(np.array([2, 0, 1, 3, 4]))
    assert shared is not None
    assert (shared.members.tolist(), shared.slot, shared.num_blocks) == ([False, True, True, True, False], 0, 2)
    assert builder.shared_blocks(np.array([2, 0])) is None


@pytest.mark.parametrize("max_num_seqs", [1, 5, 32, 256, 1000])
def test_padded_sizes_rise_to_the_largest_batch_and_waste_little(max_num_seqs: int):
    sizes = padded_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for rows in range(1, max_num_seqs + 1):
        size = min(size for size in sizes if size >= rows)
        assert size - rows < max(4, rows // 2, 8)
    assert len(sizes) <= 60


def test_arrays_of_a_fixed_layout_arrive_in_the_same_place_each_time():
    upload = FixedUpload({"ids": (np.int32, 3), "seeds": (np.int64, 2)}, torch.device("cpu"))
    places = {name: tensor.data_ptr() for name, tensor in upload.tensors.items()}
    for step in range(5):
        arrays = upload.next_arrays()
        arrays["ids"][:], arrays["seeds"][:] = step, 2**40 + step
        upload.send(upload.stage)
        assert upload.tensors["ids"].tolist() == [step] * 3
        assert upload.tensors["seeds"].tolist() == [2**40 + step] * 2
    assert places == {name: tensor.data_ptr() for name, tensor in upload.tensors.items()}
    assert all(place % 16 == 0 for place in places.values())
