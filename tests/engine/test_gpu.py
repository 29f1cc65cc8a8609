"""The runner on a CUDA GPU: golden tokens in fp32, equality with the CPU, 16-bit logits, memory, no hidden waiting.

`pytest -m gpu`. The demo model is expected where `manta fetch smollm2-135m` puts it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.errors import ConfigError
from manta.engine.model_runner import BuiltRunner
from manta.engine.plan import NewSequence, Row, StepPlan
from manta.engine.prefill_graphs import padded_tokens
from manta.engine.request import SamplingParams
from tests.engine.runners import GREEDY, Driver, build, expected_greedy, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"]
IDS = [golden["prompt_ids"] for golden in GOLDEN]
LLAMA_8B = Path(__file__).parents[2] / "deploy/configs/llama_3_1_8b/config.json"
HAS_ROOM = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > 40 << 30
PROMPTS = [[5, 17, 99, 3, 44], [20 + i for i in range(150)], [7], [150, 151] * 9]
SMALL = {"memory_fraction": 0.3, "max_num_batched_tokens": 2048, "max_num_seqs": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    sizes: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    return folder, save_tiny(folder, **sizes)


@pytest.fixture(autouse=True)
def released_memory() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def cuda(model: str | Path, **overrides: Any) -> BuiltRunner:
    return build(model, **{"device": "cuda", "num_blocks": 200, **SMALL, **overrides})


@pytest.mark.model
@pytest.mark.parametrize("block_size", [16, 64])
def test_fp32_gives_the_golden_tokens(block_size: int):
    built = cuda("smollm2-135m", block_size=block_size, num_blocks=400)
    driver = Driver(built)
    tokens = driver.generate(IDS, 64, SamplingParams(temperature=0.0, logprobs=5))
    first = next(result for _, result in driver.results if result.token_ids)
    for index, golden in enumerate(GOLDEN):
        expected = golden["continuation_ids"]
        assert tokens[index][: len(expected)] == expected
        found = [logprob + golden["first_step_logsumexp"] for logprob in first.logprobs[index].top_logprobs]
        assert found == pytest.approx([logit for _, logit in golden["first_step_top5"]], abs=2e-3)
    built.runner.close()


@pytest.mark.model
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.05)])
def test_16_bit_logits_are_near_those_of_fp32(dtype: str, tolerance: float):
    built = cuda("smollm2-135m", dtype=dtype, num_blocks=400)
    driver = Driver(built)
    driver.generate(IDS, 1, SamplingParams(temperature=0.0, logprobs=20))
    first = next(result for _, result in driver.results if result.token_ids)
    for index, golden in enumerate(GOLDEN):
        entry = first.logprobs[index]
        found = dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
        best_id, best_logit = golden["first_step_top5"][0]
        assert found[best_id] == pytest.approx(best_logit - golden["first_step_logsumexp"], abs=tolerance)
    built.runner.close()


@pytest.mark.parametrize("chunk", [None, 1, 33])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_tokens_are_those_of_transformers_on_the_cpu(tiny: tuple[Path, Any], block_size: int, chunk: int | None):
    built = cuda(tiny[0], block_size=block_size)
    found = Driver(built).generate(PROMPTS, 12, chunk=chunk)
    assert found == [expected_greedy(tiny[1], prompt, 12) for prompt in PROMPTS]
    built.runner.close()


FEATURES = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -100.0}, "min_tokens": 5, "logprobs": 3},
    {"temperature": 1.1, "seed": 5},
    {"temperature": 1.1, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_sampling_is_that_of_the_cpu(tiny: tuple[Path, Any], options: dict[str, Any]):
    params = SamplingParams(**{"seed": 0, **options})
    on_cpu, on_gpu = build(tiny[0]), cuda(tiny[0])
    drivers = [Driver(on_cpu), Driver(on_gpu)]
    expected, found = (driver.generate(PROMPTS, 16, params) for driver in drivers)
    assert found == expected
    for (_, x), (_, y) in zip(drivers[0].results, drivers[1].results, strict=True):
        assert x.logprobs.keys() == y.logprobs.keys()
        for row, entry in x.logprobs.items():
            assert y.logprobs[row].logprob == pytest.approx(entry.logprob, abs=1e-3)
    for built in (on_cpu, on_gpu):
        built.runner.close()


def test_prompt_logprobs_are_those_of_the_cpu(tiny: tuple[Path, Any]):
    params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=2)
    found = []
    for built in (build(tiny[0]), cuda(tiny[0])):
        driver = Driver(built)
        driver.generate(PROMPTS, 2, params, chunk=50)
        found.append(
            [e for _, result in driver.results for entries in result.prompt_logprobs.values() for e in entries]
        )
        built.runner.close()
    assert len(found[0]) == sum(len(prompt) - 1 for prompt in PROMPTS)
    for x, y in zip(*found, strict=True):
        assert x.token_id == y.token_id
        assert y.logprob == pytest.approx(x.logprob, abs=1e-3)


def test_a_step_never_waits_for_the_device(tiny: tuple[Path, Any]):
    """torch reports every call that synchronizes; launching must make none, with all features of sampling on."""
    built = cuda(tiny[0])
    driver = Driver(built)
    params = SamplingParams(
        temperature=1.0, top_p=0.9, seed=1, repetition_penalty=1.2, logprobs=2, logit_bias={4: 1.0}, min_tokens=9
    )
    sequences = [driver.sequence(slot, prompt, params) for slot, prompt in enumerate(PROMPTS)]
    first = [Row(s.slot, 0, len(s.token_ids), [], True, False, 0) for s in sequences]
    then = [Row(s.slot, len(s.token_ids), 1, [], True, True) for s in sequences]
    freed = StepPlan(2, [0, 1, 2, 3], [], [])
    for handle in [
        built.runner.launch(plan) for plan in (StepPlan(0, [], sequences, first), StepPlan(1, [], [], then), freed)
    ]:
        handle.result()  # once, so that every kernel is compiled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [built.runner.launch(plan) for plan in (StepPlan(3, [], sequences, first), StepPlan(4, [], [], then))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(handle.result().token_ids) for handle in handles] == [4, 4]
    built.runner.close()


DRAWS = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "plain": SamplingParams(temperature=1.2, seed=5),
    "filtered": SamplingParams(temperature=1.2, top_p=0.9, top_k=40, seed=6),
    "penalized": SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=7, logprobs=2),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draw", DRAWS)
def test_graphs_change_no_token(tiny: tuple[Path, Any], draw: str, dtype: str):
    prompts = [[(31 * i + 7 * row) % 200 + 3 for i in range(5 + 9 * row)] for row in range(11)]
    found = []
    for cuda_graphs in (False, True):
        built = cuda(tiny[0], dtype=dtype, cuda_graphs=cuda_graphs)
        # One prompt has the kernels of one row, all of them a padded batch; both twice, so that graphs are replayed.
        batches = [prompts, prompts[:1], prompts, prompts[:1]]
        found.append([Driver(built).generate(batch, 20, DRAWS[draw]) for batch in batches])
        built.runner.close()
    assert found[1][:2] == found[1][2:]
    if dtype == "float32":
        assert found[1] == found[0]
    else:  # padding changes which tiles a product takes, so near ties may fall the other way
        flat = [[token for driver in tokens for row in driver for token in row] for tokens in found]
        pairs = list(zip(*flat, strict=True))
        assert sum(x == y for x, y in pairs) > 0.9 * len(pairs)
        assert found[1][1] == found[0][1]  # one row is never padded


def test_graphs_are_captured_in_advance_until_none_is_missing(tiny: tuple[Path, Any]):
    built = cuda(tiny[0], max_num_seqs=8)
    expected = Driver(built).generate(PROMPTS, 12)
    graphs, prefills = built.runner._graphs, built.runner._prefill_graphs
    assert graphs is not None
    assert prefills is not None
    count = len(graphs._steps)
    while built.runner.prepare_more():
        count += 1
    assert len(graphs._steps) == 4 * 3  # 1, 2, 4 and 8 rows; greedy, plain and filtered draws
    assert len(prefills._graphs) == 2 * len(padded_tokens(2048))  # with and without decodes
    assert count == len(graphs._steps) + len(prefills._graphs)
    before = set(graphs._steps)
    assert Driver(built).generate(PROMPTS, 12) == expected
    assert Driver(built).generate(PROMPTS[:3], 4, DRAWS["plain"])
    assert set(graphs._steps) == before
    built.runner.close()


def test_rows_that_share_a_prefix_give_the_tokens_of_rows_that_do_not(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
):
    from manta.engine import runner

    prefix = [3 + i % 190 for i in range(192)]
    prompts = [[*prefix, 100 + i] for i in range(6)]
    expected = [expected_greedy(tiny[1], prompt, 8) for prompt in prompts]
    monkeypatch.setattr(runner, "pays", lambda *sizes: True)
    built = cuda(tiny[0], block_size=64)
    driver = Driver(built)
    driver.tokens |= {slot: [] for slot in range(6)}
    new = [NewSequence(s, p, len(p), [20, 21, 22, 30 + s], GREEDY, []) for s, p in enumerate(prompts)]
    driver.launch([Row(s, 0, len(p), [], True, False) for s, p in enumerate(prompts)], new)
    for step in range(7):
        driver.launch([Row(s, len(p) + step, 1, [], True, True) for s, p in enumerate(prompts)])
    driver.finish()
    assert [driver.tokens[slot] for slot in range(6)] == expected
    assert built.runner._graphs is not None
    assert any(kind.shares_prefix for _, kind in built.runner._graphs._steps)
    built.runner.close()


@pytest.mark.skipif(not HAS_ROOM, reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_in_deterministic_mode_tokens_depend_on_nothing_but_the_prompt(cuda_graphs: bool):
    """Llama-3.1-8B's shape in bf16: alone, among neighbours, in chunks, behind a block that another one computed."""
    built = build(
        LLAMA_8B,
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        deterministic=True,
        cuda_graphs=cuda_graphs,
        num_blocks=600,
        max_model_len=2048,
    )
    text = [token for ids in IDS for token in ids]
    prompts = [text[7 * row : 7 * row + 90 + 3 * row] for row in range(17)]
    alone = [Driver(built).generate([prompt], 40)[0] for prompt in prompts[:4]]
    assert Driver(built).generate(prompts, 40)[:4] == alone
    for chunk in (7, 32, 64):
        assert Driver(built).generate(prompts, 40, chunk=chunk)[:4] == alone
    driver = Driver(built)
    driver.tokens |= {0: [], 1: []}
    for slot, start in ((0, 0), (1, 64)):  # the second finds its first block in the cache
        row = Row(slot, start, len(prompts[0]) - start, [], True, False)
        driver.launch(
            [row], [NewSequence(slot, prompts[0], len(prompts[0]), [500, 510 + slot, 520 + slot], GREEDY, [])]
        )
    for step in range(39):
        driver.launch([Row(slot, len(prompts[0]) + step, 1, [], True, True) for slot in (0, 1)])
    driver.finish()
    assert [driver.tokens[0], driver.tokens[1]] == [alone[0]] * 2
    built.runner.close()


def test_a_model_whose_sizes_the_deterministic_mode_cannot_take_is_refused_at_start(tiny: tuple[Path, Any]):
    with pytest.raises(ConfigError, match="multiples of 16, not vocab_size = 211"):
        cuda(tiny[0], dtype="bfloat16", deterministic=True)


def test_results_carry_the_devices_times(tiny: tuple[Path, Any]):
    driver = Driver(cuda(tiny[0]))
    driver.generate(PROMPTS, 6)
    results = [result for plan, result in driver.results if plan.rows]
    assert all(0 < result.device_s < 10 for result in results)
    assert all(result.device_idle_s >= 0 for result in results)
    assert any(result.device_idle_s > 0 for result in results)
    driver.built.runner.close()


@pytest.mark.alone
def test_the_cache_fills_its_share_of_memory_and_the_largest_step_fits(tiny: tuple[Path, Any]):
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    fraction = min(0.5, 0.8 * free_bytes / total_bytes)
    built = cuda(tiny[0], num_blocks=None, memory_fraction=fraction, max_num_batched_tokens=4096, max_num_seqs=64)
    ledger = built.memory_ledger_bytes
    assert set(ledger) == {"weights", "workspace", "reserve", "graphs", "kv_cache"}
    assert 0.8 * fraction * total_bytes < sum(ledger.values()) <= fraction * total_bytes
    assert "for a step's activations" in built.notes[0]
    driver = Driver(built)
    prompts = [[(31 * i + slot) % 200 + 3 for i in range(63)] for slot in range(64)]
    tokens = driver.generate(prompts, 3, SamplingParams(temperature=1.0, top_p=0.9, seed=0, logprobs=20))
    assert all(len(each) == 3 for each in tokens)
    free_after_bytes, _ = torch.cuda.mem_get_info()
    assert total_bytes - free_after_bytes <= fraction * total_bytes
    built.runner.close()


def test_matrix_products_are_not_done_in_tf32(tiny: tuple[Path, Any]):
    built = cuda(tiny[0])
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    built.runner.close()


def test_nothing_warns(tiny: tuple[Path, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = cuda(tiny[0])
        Driver(built).generate(PROMPTS, 3, GREEDY)
        built.runner.close()


@pytest.mark.alone
@pytest.mark.skipif(not HAS_ROOM, reason="needs 40 GiB of GPU memory")
def test_a_dummy_of_llama_8b_runs_at_its_full_sizes():
    built = build(
        LLAMA_8B, device="cuda", dtype="bfloat16", load_format="dummy", max_num_seqs=256, memory_fraction=0.85
    )
    assert built.memory_ledger_bytes["weights"] == pytest.approx(16.06e9, rel=0.01)
    assert built.num_blocks > 1000
    driver = Driver(built)
    prompts = [[(101 * i + slot) % 120_000 + 10 for i in range(700)] for slot in range(8)]
    params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0, seed=0)
    tokens = driver.generate(prompts, 8, params)
    assert len({tuple(each) for each in tokens}) == 8
    entries = [entry for _, result in driver.results for entry in result.logprobs.values()]
    assert all(-12.0 < entry.logprob < 0.0 for entry in entries)  # of order one: neither flat nor one-hot
    built.runner.close()
