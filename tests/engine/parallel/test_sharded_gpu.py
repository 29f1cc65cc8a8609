"""Two and more ranks that share one GPU, over gloo: the CUDA path of shards gives the tokens of one rank on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manta.engine.config import ModelConfig
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.parallel.groups import Groups
from manta.engine.parallel.place import RankPlace
from tests.engine.parallel.ranks import on_ranks
from tests.engine.parallel.shards import build_shard, generate, random_shape

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7] * 9, [1, 2] * 40]
BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
SMALL: dict[str, Any] = {"max_num_batched_tokens": 256, "cuda_graphs": False}
SPLITS: list[dict[str, Any]] = [
    {"q": 8, "kv": 2, "tp": 2},
    {"q": 9, "kv": 3, "tp": 2, **BIASES},
    {"q": 6, "kv": 2, "tp": 4, "vocab_size": 1003},
    {"q": 8, "kv": 4, "tp": 2, "pp": 2, "tie_word_embeddings": True, **BIASES},
]


def on_gpu(shape: Any, prompts: list[list[int]], num_tokens: int, **options: Any) -> Any:
    sizes = {"num_blocks": 64, "block_size": 16, **SMALL}
    return generate(shape, prompts, num_tokens, device=torch.device("cuda", 0), **{**sizes, **options})


@pytest.mark.parametrize("split", SPLITS, ids=lambda case: " ".join(f"{name}={value}" for name, value in case.items()))
def test_ranks_that_share_a_gpu_give_the_tokens_of_one(split: dict[str, Any]):
    sizes = dict(split)
    tp_size, pp_size = sizes.pop("tp", 1), sizes.pop("pp", 1)
    shape = random_shape(**sizes)
    alone = on_gpu(shape, PROMPTS, 16)
    gang = on_gpu(shape, PROMPTS, 16, tp_size=tp_size, pp_size=pp_size)
    assert gang.token_ids == alone.token_ids
    torch.testing.assert_close(gang.logprobs, alone.logprobs, rtol=0, atol=1e-3)


def test_bfloat16_logprobs_are_near_those_of_one_rank():
    shape = random_shape(q=8, kv=2, hidden_size=128, intermediate_size=256)
    alone = on_gpu(shape, PROMPTS, 1, dtype="bfloat16")
    gang = on_gpu(shape, PROMPTS, 1, dtype="bfloat16", tp_size=2)
    torch.testing.assert_close(gang.logprobs, alone.logprobs, rtol=0, atol=0.1)


@pytest.mark.model
@pytest.mark.parametrize("tp_size", [2, 3])
def test_the_demo_model_gives_the_same_tokens_over_ranks_of_one_gpu(tp_size: int):
    source = resolve_model(ModelConfig(model="smollm2-135m"))
    shape = load_shape(source)
    prompts = [[504, 3575, 282, 4649, 314], [1, 9690, 198, 2683], [28] * 70]
    alone = on_gpu(shape, prompts, 24, source=source)
    gang = on_gpu(shape, prompts, 24, source=source, tp_size=tp_size)
    assert gang.token_ids == alone.token_ids
    torch.testing.assert_close(gang.logprobs, alone.logprobs, rtol=0, atol=1e-3)


@pytest.mark.alone
def test_ranks_that_share_a_gpu_share_its_memory():
    shape = random_shape(q=8, kv=2)

    def work(place: RankPlace, groups: Groups) -> tuple[int, int, str]:
        built = build_shard(shape, place, groups, device="cuda", memory_fraction=0.3, **SMALL)
        held_bytes = built.memory_ledger_bytes["kv_cache"]
        assert groups.everyone is not None
        groups.everyone.barrier()
        built.runner.close()
        return built.num_blocks, held_bytes, groups.backend

    (blocks, held, backend), (other_blocks, other_held, _) = on_ranks(work, tp_size=2, device=torch.device("cuda", 0))
    assert backend == "gloo"
    assert blocks == other_blocks
    _, total_bytes = torch.cuda.mem_get_info()
    assert held + other_held < 0.3 * total_bytes
