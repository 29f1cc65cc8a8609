"""The demo model over ranks, as LLM starts them: the tokens of one rank, whatever is asked and however it is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manta import LLM, SamplingParams
from manta.engine.llm import CompletionOutput, RequestOutput

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"][:6]
PROMPTS = [golden["prompt_ids"] for golden in GOLDEN]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
GROWING = [[300 + index] * 15 for index in range(4)]
"""A block each at first, three at the end: more than there are."""
LONG = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, max_tokens=30, ignore_eos=True)

ASKED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12),
    SamplingParams(temperature=1.0, top_k=20, seed=4, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0, max_tokens=12, presence_penalty=1.5, logprobs=3),
    SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=1),
    SamplingParams(temperature=0.7, seed=5, max_tokens=12, min_tokens=12, logit_bias={28: 4.0, 30: -100.0}),
    SamplingParams(temperature=0, max_tokens=12, stop=[" the"], n=2),
]
"""One for each prompt."""


def start(tp_size: int, pp_size: int) -> LLM:
    """Few blocks and small steps: prompts come in chunks, and running requests are preempted."""
    return LLM(
        "smollm2-135m",
        device="cpu",
        dtype="float32",
        num_blocks=8,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
    )


@pytest.fixture(scope="module")
def one_rank() -> tuple[list[RequestOutput], list[RequestOutput]]:
    with start(1, 1) as llm:
        return llm.generate(PROMPTS, ASKED), llm.generate(GROWING, LONG)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["TP 2", "PP 2"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with start(*request.param) as llm:
        yield llm


def test_greedy_tokens_are_the_golden_ones_with_chunks_and_a_warm_cache(llm: LLM):
    expected = [golden["continuation_ids"][:10] for golden in GOLDEN]
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    longest = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    (again,) = llm.generate(PROMPTS[longest], GREEDY)
    assert again.outputs[0].token_ids == expected[longest]
    assert again.num_cached_tokens >= 16
    assert llm.engine.snapshot().num_used_blocks == 0


def test_preemption_leaves_no_trace(llm: LLM, one_rank: tuple[list[RequestOutput], list[RequestOutput]]):
    before = llm.engine.snapshot().num_preemptions
    outputs = llm.generate(GROWING, LONG)
    assert llm.engine.snapshot().num_preemptions > before
    for output, expected in zip(outputs, one_rank[1], strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_draws_penalties_biases_stops_and_logprobs_are_those_of_one_rank(
    llm: LLM, one_rank: tuple[list[RequestOutput], list[RequestOutput]]
):
    for output, expected in zip(llm.generate(PROMPTS, ASKED), one_rank[0], strict=True):
        for answer, other in zip(output.outputs, expected.outputs, strict=True):
            assert (answer.token_ids, answer.text) == (other.token_ids, other.text)
            assert answer.finish_reason == other.finish_reason
            assert logprobs_of(answer) == pytest.approx(logprobs_of(other), abs=1e-3)
        prompts = [[entry and entry.logprob for entry in o.prompt_logprobs or []] for o in (output, expected)]
        assert prompts[0][1:] == pytest.approx(prompts[1][1:], abs=1e-3)
        assert len(prompts[0]) == (len(output.prompt_token_ids) if expected.prompt_logprobs else 0)


def logprobs_of(answer: CompletionOutput) -> list[float]:
    return [entry.logprob for entry in answer.logprobs or []]


def test_a_command_line_needs_no_main_guard_and_no_close():
    code = (
        "from manta import LLM, SamplingParams\n"
        "llm = LLM('smollm2-135m', device='cpu', dtype='float32', num_blocks=64, tensor_parallel_size=2)\n"
        f"print(llm.generate({PROMPTS[0]}, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (run.stdout, run.stderr, run.returncode) == (f"{GOLDEN[0]['continuation_ids'][:4]}\n", "", 0)
