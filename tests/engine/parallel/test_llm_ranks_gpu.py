"""The demo model over ranks that share one GPU, as LLM starts them: the golden tokens, in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manta import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.model]

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"][:8]


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_ranks_that_share_a_gpu_give_the_golden_tokens(tp_size: int, pp_size: int):
    with LLM(
        "smollm2-135m",
        device="cuda:0",
        dtype="float32",
        num_blocks=64,
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
    ) as llm:
        outputs = llm.generate(
            [golden["prompt_ids"] for golden in GOLDEN], SamplingParams(temperature=0, max_tokens=20)
        )
        seeded = SamplingParams(temperature=0.8, seed=3, max_tokens=8, repetition_penalty=1.2, logprobs=1)
        again = [llm.generate(GOLDEN[0]["prompt_ids"], seeded)[0].outputs[0].token_ids for _ in range(2)]
    assert [output.outputs[0].token_ids for output in outputs] == [g["continuation_ids"][:20] for g in GOLDEN]
    assert again[0] == again[1]
