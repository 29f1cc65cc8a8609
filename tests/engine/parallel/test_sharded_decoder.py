"""Models split over ranks give one rank's greedy tokens and log-probabilities, whatever their counts of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.config import ModelConfig
from manta.engine.model_source import load_shape, resolve_model
from tests.engine.parallel.shards import generate, prompt_logprobs, random_shape

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"][8:12]
"""Two raw prompts and two chats."""
PROMPTS = [[5, 6, 7] * 9, [1, 2] * 40]
BIASES = {"attention_bias": True, "output_bias": True}
GRID: list[dict[str, Any]] = [
    {"q": 8, "kv": 8, "tp": 2},
    {"q": 8, "kv": 2, "tp": 4},
    {"q": 8, "kv": 1, "tp": 4},
    {"q": 8, "kv": 2, "tp": 2, **BIASES},
    {"q": 8, "kv": 2, "tp": 4, "qk_norm": True, "architecture": "Qwen3ForCausalLM"},
    {"q": 8, "kv": 2, "tp": 3, "mlp_bias": True, "intermediate_size": 100, **BIASES},
    {"q": 8, "kv": 4, "pp": 2, "num_layers": 5},
    {"q": 8, "kv": 4, "pp": 2, "tie_word_embeddings": True},
    {"q": 8, "kv": 4, "pp": 3},
    {"q": 8, "kv": 4, "tp": 2, "vocab_size": 1003},
    {"q": 8, "kv": 4, "tp": 2, "pp": 2, "vocab_size": 1003, "tie_word_embeddings": True, **BIASES},
    {"q": 6, "kv": 2, "tp": 4},
    {"q": 9, "kv": 3, "tp": 2},
    {"q": 9, "kv": 3, "tp": 6, "tie_word_embeddings": True},
]


@pytest.mark.parametrize("case", GRID, ids=lambda case: " ".join(f"{name}={value}" for name, value in case.items()))
def test_a_gang_gives_the_tokens_of_one_rank(case: dict[str, Any]):
    sizes = dict(case)
    tp_size, pp_size = sizes.pop("tp", 1), sizes.pop("pp", 1)
    shape = random_shape(**sizes)
    alone = generate(shape, PROMPTS, 16)
    gang = generate(shape, PROMPTS, 16, tp_size=tp_size, pp_size=pp_size)
    assert gang.token_ids == alone.token_ids
    torch.testing.assert_close(gang.logprobs, alone.logprobs, rtol=0, atol=1e-4)
    assert alone.logprobs.std() > 0.2  # random, but not flat


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (3, 2)])
def test_log_probabilities_of_prompts_are_those_of_one_rank(
    tp_size: int, pp_size: int, monkeypatch: pytest.MonkeyPatch
):
    shape = random_shape(q=8, kv=2, vocab_size=1003)
    monkeypatch.setattr("manta.engine.logprobs._CHUNK_ELEMENTS", 10 * 1003)  # all ranks come to the same chunks
    alone = prompt_logprobs(shape, PROMPTS[0])
    found = prompt_logprobs(shape, PROMPTS[0], tp_size=tp_size, pp_size=pp_size)
    assert alone.shape == (len(PROMPTS[0]) - 1,)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)


@pytest.mark.model
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (3, 1), (1, 3)])
def test_the_demo_model_gives_the_golden_tokens_over_ranks(tp_size: int, pp_size: int):
    """Nine query heads and three KV heads: two ranks have six and three of them."""
    source = resolve_model(ModelConfig(model="smollm2-135m"))
    prompts = [golden["prompt_ids"] for golden in GOLDEN]
    found = generate(
        load_shape(source), prompts, 12, tp_size=tp_size, pp_size=pp_size, source=source, cpu_cache_gib=0.3
    )
    for golden, tokens, logprobs in zip(GOLDEN, found.token_ids, found.logprobs, strict=True):
        expected = golden["continuation_ids"][:12]
        assert tokens[: len(expected)] == expected
        best = [logit - golden["first_step_logsumexp"] for _, logit in golden["first_step_top5"]]
        assert logprobs[0, 1:].tolist() == pytest.approx(best, abs=2e-3)
