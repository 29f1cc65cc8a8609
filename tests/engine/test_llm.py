"""The Python API on the demo model in float32: golden tokens, whatever the batch, the blocks, the chunks or the cache.

The golden file holds what transformers generates from the same weights (tests/data/README.md).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manta import LLM, SamplingParams
from manta.engine.errors import ContextLengthExceeded, InvalidRequest
from manta.engine.request import FinishReason

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
SHORT = SamplingParams(temperature=0, max_tokens=20)
IDS = [golden["prompt_ids"] for golden in GOLDEN]
SHORT_TOKENS = [golden["continuation_ids"][:20] for golden in GOLDEN]
TEN = SamplingParams(temperature=0, max_tokens=10)
SOME, SOME_TOKENS = IDS[7:13], [golden["continuation_ids"][:10] for golden in GOLDEN[7:13]]
"""Three raw prompts and three chats."""


def load(**overrides: Any) -> LLM:
    return LLM("smollm2-135m", **{"dtype": "float32", "device": "cpu", "cpu_cache_gib": 0.5, **overrides})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load() as llm:
        yield llm


def assert_nothing_is_held(llm: LLM) -> None:
    snapshot = llm.engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_used_blocks) == (0, 0, 0)
    assert not llm.engine.has_work
    llm.engine.scheduler.check()


def test_greedy_tokens_of_all_prompts_are_the_golden_ones(llm: LLM):
    outputs = llm.generate(IDS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [golden["continuation_ids"] for golden in GOLDEN]
    ends = {True: FinishReason.STOP, False: FinishReason.LENGTH}
    for output, golden in zip(outputs, GOLDEN, strict=True):
        assert output.outputs[0].finish_reason is ends[golden["continuation_ids"][-1] == 2]


def test_prompts_are_tokenized_as_in_the_golden_file(llm: LLM):
    raw = [golden for golden in GOLDEN if golden["kind"] == "raw"]
    assert [llm.tokenizer.encode(golden["prompt"]) for golden in raw] == [golden["prompt_ids"] for golden in raw]


def test_logprobs_are_the_golden_ones(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    for golden, output in zip(GOLDEN[:6], llm.generate(IDS[:6], params), strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert [entry.logprob for entry in logprobs] == pytest.approx(golden["logprobs"][: len(logprobs)], abs=2e-3)
        ids, logits = zip(*golden["first_step_top5"], strict=True)
        assert logprobs[0].top_token_ids == list(ids)
        expected = [logit - golden["first_step_logsumexp"] for logit in logits]
        assert logprobs[0].top_logprobs == pytest.approx(expected, abs=2e-3)


def test_a_request_alone_gives_the_golden_tokens(llm: LLM):
    for prompt, expected in zip(IDS[1:3], SHORT_TOKENS[1:3], strict=True):
        assert llm.generate(prompt, SHORT)[0].outputs[0].token_ids == expected


def test_a_warm_prefix_cache_changes_nothing_but_the_cached_tokens(llm: LLM):
    long = IDS[0] * 12
    cold = llm.generate(long, SHORT)[0]
    warm = llm.generate(long, SHORT)[0]
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert warm.num_cached_tokens >= 48


@pytest.mark.parametrize(
    "overrides",
    [
        {"block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 32},
        {"block_size": 32, "max_num_batched_tokens": 67, "max_num_seqs": 67},
        {"block_size": 64, "max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"block_size": 64, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_block_size_chunks_and_neighbours_do_not_change_tokens(overrides: dict[str, Any]):
    with load(**overrides) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(SOME, TEN)] == SOME_TOKENS
        assert_nothing_is_held(llm)


PREEMPTION_CASES = (
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=0.7, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, min_tokens=20),
)


def test_preemption_leaves_no_trace_in_tokens_text_or_logprobs(llm: LLM):
    prompts = [[300 + i] * 14 for i in range(8)]
    params = [*PREEMPTION_CASES, *PREEMPTION_CASES]
    roomy = llm.generate(prompts, params)
    with load(num_blocks=14, block_size=16) as tiny:
        found = tiny.generate(prompts, params)
        assert tiny.engine.snapshot().num_preemptions >= 3
        assert_nothing_is_held(tiny)
    for x, y in zip(roomy, found, strict=True):
        assert x.outputs[0].token_ids == y.outputs[0].token_ids
        assert x.outputs[0].text == y.outputs[0].text
        pairs = zip(x.outputs[0].logprobs or [], y.outputs[0].logprobs or [], strict=True)
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-3) for a, b in pairs)
    assert all(len(found[index].outputs[0].logprobs or []) == 24 for index in (3, 7))


def test_a_seed_fixes_the_draws_whatever_the_neighbours(llm: LLM):
    seeded = SamplingParams(temperature=1.2, seed=42, max_tokens=12)
    noise = SamplingParams(temperature=1.2, max_tokens=20)
    alone = llm.generate(IDS[0], seeded)[0].outputs[0].token_ids
    outputs = llm.generate([IDS[0], IDS[1], IDS[0], IDS[2]], [seeded, noise, seeded, noise])
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == alone


def test_answers_of_one_request_differ_and_share_their_prompt(llm: LLM):
    llm.engine.scheduler.cache.pool.evict_all()
    prompt = IDS[0] * 10
    before = llm.engine.snapshot()
    output = llm.generate(prompt, SamplingParams(temperature=1.5, seed=1, n=4, max_tokens=8))[0]
    after = llm.engine.snapshot()
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    shared = (len(prompt) - 1) // 16 * 16
    assert after.num_cached_tokens - before.num_cached_tokens == 3 * shared


def test_prompt_logprobs_are_the_same_cold_warm_and_chunked(llm: LLM):
    base = [(37 * i) % 211 + 20 for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def scores(model: LLM, length: int) -> list[float]:
        entries = model.generate(base[:length], params)[0].prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        return [entry.logprob for entry in entries[1:] if entry is not None]

    lengths = (2, 15, 16, 17, 33, 40)
    first = [scores(llm, n) for n in lengths]
    assert [len(s) for s in first] == [n - 1 for n in lengths]
    assert all(score <= 1e-4 for s in first for score in s)
    assert [scores(llm, n) for n in lengths] == [pytest.approx(s, abs=1e-3) for s in first]
    with load(max_num_batched_tokens=9, max_num_seqs=4) as chunked:
        assert scores(chunked, 40) == pytest.approx(first[-1], abs=1e-3)


def test_a_stop_string_ends_the_text_where_it_begins(llm: LLM):
    whole = llm.generate("Count: one, two, three,", SHORT)[0].outputs[0]
    text = whole.text
    for stop in (text[5:7], text[9:16], text[3:12]):
        output = llm.generate("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=20, stop=(stop,)))[0]
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[: text.index(stop)], "stop", stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert_nothing_is_held(llm)


def test_sampling_parameters_do_what_they_say(llm: LLM):
    prompt = IDS[0]
    greedy = llm.generate(prompt, TEN)[0].outputs[0].token_ids
    one = SamplingParams(temperature=3.0, top_k=1, max_tokens=10)
    assert llm.generate(prompt, one)[0].outputs[0].token_ids == greedy
    biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={7: 100.0})
    assert llm.generate(prompt, biased)[0].outputs[0].token_ids == [7, 7, 7]
    penalized = SamplingParams(temperature=0, max_tokens=3, logit_bias={7: 100.0, 9: 99.0}, frequency_penalty=2.0)
    assert llm.generate(prompt, penalized)[0].outputs[0].token_ids == [7, 9, 7]
    at_least = SamplingParams(temperature=0, max_tokens=8, min_tokens=6, logit_bias={2: 100.0})
    assert len(llm.generate(prompt, at_least)[0].outputs[0].token_ids) == 7
    stopped = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=(greedy[1],))
    answer = llm.generate(prompt, stopped)[0].outputs[0]
    assert (answer.token_ids, answer.stop_reason) == (greedy[:2], greedy[1])


def test_a_chat_goes_through_the_models_template(llm: LLM):
    golden = next(golden for golden in GOLDEN if golden["kind"] == "chat")
    messages = (
        golden["prompt"] if isinstance(golden["prompt"], list) else [{"role": "user", "content": golden["prompt"]}]
    )
    output = llm.chat(messages, SHORT)[0]
    assert output.prompt_token_ids == golden["prompt_ids"]
    assert output.outputs[0].token_ids == golden["continuation_ids"][:20]


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([1] * 9000, SHORT, ContextLengthExceeded),
        ([], SHORT, InvalidRequest),
        ([10**6], SHORT, InvalidRequest),
        ("x", SamplingParams(logit_bias={10**6: 1.0}), InvalidRequest),
    ],
    ids=["too long", "empty", "unknown token", "unknown bias"],
)
def test_a_bad_request_is_refused_and_leaves_nothing_behind(llm: LLM, prompt: Any, params: SamplingParams, error: type):
    with pytest.raises(error):
        llm.generate([IDS[0], prompt], params)
    assert_nothing_is_held(llm)


def test_a_mix_of_finished_cancelled_and_refused_requests_leaks_nothing(llm: LLM):
    from manta.engine.request import EngineRequest

    rng = random.Random(0)
    finished, refused, cancelled = 0, 0, 0
    for index in range(32):
        length = rng.choice([3, 20, 40, 9000])
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 8))
        request = EngineRequest(request_id=f"r{index}", prompt_token_ids=[300 + index] * length, params=params)
        refused += llm.engine.add(request) is not None
        if rng.random() < 0.5:
            cancelled += llm.engine.cancel(f"r{rng.randint(0, index)}")
        finished += sum(delta.finish_reason is not None for delta in llm.engine.step())
    while llm.engine.has_work:
        finished += sum(delta.finish_reason is not None for delta in llm.engine.step())
    assert finished > 0
    assert cancelled > 0
    assert refused > 0
    assert finished + cancelled + refused == 32
    assert_nothing_is_held(llm)
