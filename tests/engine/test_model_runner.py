"""Runners driven by plans written by hand: golden tokens, chunks, mixed steps, feedback, errors, sizes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.errors import ConfigError
from manta.engine.model_runner import BuiltRunner, check_deterministic, choose_device
from manta.engine.model_source import ModelSource, load_shape
from manta.engine.plan import NewSequence, Row, StepPlan
from manta.engine.request import SamplingParams
from tests.engine.runners import GREEDY, Driver, build, expected_greedy, save_tiny

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"]
PROMPTS = [[5, 17, 99, 3, 44], list(range(20, 61)), [7], [150, 151] * 9]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny(folder)


@pytest.fixture
def built(tiny: tuple[Path, Any]) -> Iterator[BuiltRunner]:
    built = build(tiny[0])
    yield built
    built.runner.close()


@pytest.mark.model
def test_the_demo_model_gives_the_golden_tokens():
    """The first sixteen; all of them are for the API's tests (test_llm.py)."""
    built = build("smollm2-135m", cpu_cache_gib=0.3)
    driver = Driver(built)
    tokens = driver.generate(
        [golden["prompt_ids"] for golden in GOLDEN], 16, SamplingParams(temperature=0.0, logprobs=5)
    )
    first = next(result for _, result in driver.results if result.token_ids)
    for index, golden in enumerate(GOLDEN):
        expected = golden["continuation_ids"][:16]
        assert tokens[index][: len(expected)] == expected
        ids, logits = zip(*golden["first_step_top5"], strict=True)
        assert first.logprobs[index].top_token_ids == list(ids)
        log_total = golden["first_step_logsumexp"]
        found = [logprob + log_total for logprob in first.logprobs[index].top_logprobs]
        assert found == pytest.approx(logits, abs=2e-3)
    built.runner.close()


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("chunk", [None, 1, 7, 16])
def test_tokens_are_those_of_transformers_whatever_blocks_and_chunks(
    tiny: tuple[Path, Any], block_size: int, chunk: int | None
):
    built = build(tiny[0], block_size=block_size)
    found = Driver(built).generate(PROMPTS, 12, chunk=chunk)
    assert found == [expected_greedy(tiny[1], prompt, 12) for prompt in PROMPTS]
    built.runner.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_run(tiny: tuple[Path, Any], dtype: torch.dtype):
    built = build(tiny[0], dtype=str(dtype).removeprefix("torch."))
    driver = Driver(built)
    params = SamplingParams(temperature=0.0, logprobs=0)
    tokens = driver.generate([PROMPTS[1]], 1, params)[0]
    with torch.inference_mode():
        expected = tiny[1](torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
    assert driver.results[0][1].logprobs[0].logprob == pytest.approx(float(expected[tokens[0]]), abs=0.15)
    built.runner.close()


def test_a_sequence_comes_back_in_another_slot_with_its_tokens_known(built: BuiltRunner, tiny: tuple[Path, Any]):
    expected = expected_greedy(tiny[1], PROMPTS[0], 10)
    driver = Driver(built)
    driver.launch([Row(0, 0, 5, [], True, False)], [driver.sequence(0, PROMPTS[0])])
    driver.launch([Row(0, 5, 1, [], True, True)])
    driver.finish()
    known = PROMPTS[0] + driver.tokens[0]
    back = driver.sequence(3, known, num_prompt_tokens=5)
    driver.launch([Row(3, 0, 7, [], True, False)], [back], [0])
    for position in range(7, 14):
        driver.launch([Row(3, position, 1, [], True, True)])
    driver.finish()
    assert known[5:] + driver.tokens[3] == expected


def test_blocks_may_come_one_by_one_and_be_shared(built: BuiltRunner, tiny: tuple[Path, Any]):
    prompt = PROMPTS[1][:32]  # two blocks of 16
    driver = Driver(built)
    first = NewSequence(0, prompt, 32, [4, 9], GREEDY, [])
    shares = NewSequence(1, [*prompt, 77], 33, [4, 9, 11], GREEDY, [])
    driver.tokens |= {0: [], 1: []}
    # The second reads blocks that the first writes in the same step.
    driver.launch([Row(0, 0, 32, [], True, False), Row(1, 32, 1, [], True, False)], [first, shares])
    driver.launch([Row(0, 32, 1, [2], True, True), Row(1, 33, 1, [], True, True)])
    for position in range(33, 52):
        block = [20] if position == 48 else []
        driver.launch([Row(0, position, 1, block, True, True)])
    driver.finish()
    assert driver.tokens[0] == expected_greedy(tiny[1], prompt, 21)
    assert driver.tokens[1] == expected_greedy(tiny[1], [*prompt, 77], 2)


def test_prompt_logprobs_are_those_of_transformers(built: BuiltRunner, tiny: tuple[Path, Any]):
    prompt = PROMPTS[1]
    with torch.inference_mode():
        expected = tiny[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
    for chunk in (None, 9):
        driver = Driver(built)
        driver.generate([prompt, PROMPTS[0]], 3, SamplingParams(temperature=0.0, prompt_logprobs=2), chunk=chunk)
        entries = [e for plan, result in driver.results for i, row in enumerate(plan.rows) if row.slot == 0
                   for e in result.prompt_logprobs.get(i, [])]  # fmt: skip
        assert [entry.token_id for entry in entries] == prompt[1:]
        for position, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
            assert entry.top_token_ids == expected[position].topk(2).indices.tolist()
        decodes = [result for plan, result in driver.results if plan.rows and plan.rows[0].is_decode]
        assert decodes
        assert not any(result.prompt_logprobs for result in decodes if len(result.token_ids) == 2)


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_slot(built: BuiltRunner):
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=11, frequency_penalty=0.5)
    alone = Driver(built).generate([PROMPTS[1]], 15, params)[0]
    assert Driver(built).generate([PROMPTS[1]], 15, params, chunk=6)[0] == alone
    assert Driver(built).generate([PROMPTS[0], PROMPTS[2], PROMPTS[1]], 15, params)[2] == alone
    assert Driver(built).generate([PROMPTS[1]], 15, SamplingParams(temperature=1.3, seed=12))[0] != alone


def test_steps_without_rows_or_samples_give_nothing(built: BuiltRunner):
    driver = Driver(built)
    driver.launch([])
    driver.launch([Row(0, 0, 3, [], False, False)], [driver.sequence(0, PROMPTS[0])])
    driver.launch([], freed=[0])
    driver.finish()
    assert all(result.token_ids == [] and not result.logprobs for _, result in driver.results)


def test_launch_returns_before_the_step_ran_and_errors_come_out_of_the_handle(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
):
    may_run, seen = threading.Event(), []
    forward = built.runner._model.forward

    def held(*arguments: Any, **options: Any) -> torch.Tensor:
        assert may_run.wait(20)
        seen.append(threading.current_thread().name)
        if len(seen) == 2:
            raise MemoryError("no memory left")
        return forward(*arguments, **options)

    monkeypatch.setattr(built.runner._model, "forward", held)
    driver = Driver(built)
    new = driver.sequence(0, PROMPTS[0])
    first = built.runner.launch(StepPlan(0, [], [new], [Row(0, 0, 5, [], True, False)]))
    second = built.runner.launch(StepPlan(1, [], [], [Row(0, 5, 1, [], True, True)]))
    assert not seen
    may_run.set()
    assert len(first.result().token_ids) == 1
    with pytest.raises(MemoryError, match="no memory left"):
        second.result()
    assert all(name.startswith("manta-step") for name in seen)


def test_the_worker_uses_as_many_threads_as_its_maker(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    built = build(tiny[0])
    forward, seen = built.runner._model.forward, []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return forward(*arguments, **options)

    monkeypatch.setattr(built.runner._model, "forward", counted)
    Driver(built).generate([PROMPTS[2]], 1)
    torch.set_num_threads(before)
    built.runner.close()
    assert seen == [3]


def test_sizes_and_ledger_add_up_and_a_context_that_does_not_fit_is_clipped(tiny: tuple[Path, Any]):
    built = build(tiny[0], num_blocks=5, block_size=16)
    assert (built.num_blocks, built.max_model_len, built.block_size) == (5, 80, 16)
    assert built.notes == (
        "5 blocks, as cache.num_blocks says",
        "max_model_len is clipped from 256 to the 80 tokens that the blocks hold",
    )
    heads, dim, layers = 2, 8, 3
    assert built.memory_ledger_bytes["kv_cache"] == 5 * 16 * 2 * layers * heads * dim * 4
    assert built.memory_ledger_bytes["weights"] == built.runner._model.num_weight_bytes
    assert built.memory_ledger_bytes["workspace"] == (256 + 16) * dim * 4
    assert (built.dtype, str(built.device), built.max_num_batched_tokens) == ("float32", "cpu", 512)
    built.runner.close()
    roomy = build(tiny[0], max_model_len=100)
    assert roomy.max_model_len == 100
    assert len(roomy.notes) == 1
    roomy.runner.close()


def test_a_cache_that_memory_cannot_hold_is_refused(tiny: tuple[Path, Any]):
    with pytest.raises(ConfigError, match=r"a cache of 1000000000000 blocks \(.* GiB\) does not fit") as caught:
        build(tiny[0], num_blocks=10**12)
    assert caught.value.field == "cache.num_blocks"


def test_a_sequence_may_fill_the_whole_context(tiny: tuple[Path, Any]):
    built = build(tiny[0], num_blocks=3, block_size=16)
    assert built.max_model_len == 48
    prompt = PROMPTS[1]
    driver = Driver(built)
    new = NewSequence(0, prompt, 41, [2, 0, 1], GREEDY, [])
    driver.tokens[0] = []
    driver.launch([Row(0, 0, 41, [], True, False)], [new])
    for position in range(41, 48):
        driver.launch([Row(0, position, 1, [], True, True)])
    driver.finish()
    assert driver.tokens[0] == expected_greedy(tiny[1], prompt, 8)
    built.runner.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    assert choose_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:3"):
        with pytest.raises(ConfigError, match=f"device = '{name}': no CUDA device is usable here") as caught:
            choose_device(name)
        assert caught.value.field == "device"


def test_sizes_that_the_deterministic_mode_cannot_take_are_named(tiny: tuple[Path, Any]):
    shape = load_shape(ModelSource("tiny", "safetensors", tiny[0], None))
    with pytest.raises(ConfigError, match="multiples of 16, not vocab_size = 211"):
        check_deterministic(shape, torch.device("cpu"))
