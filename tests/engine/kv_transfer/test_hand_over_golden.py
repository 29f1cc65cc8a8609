"""Hand-overs of the demo model in float32: golden tokens, every prompt length, unequal splits, hits on either side.

The golden file holds what transformers generates from the same weights (tests/data/README.md).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from manta.engine.core import EngineCore
from manta.engine.request import EngineRequest, SamplingParams
from tests.engine.kv_transfer.pairs import Pair, alone, start, tokens_of

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/smollm2_135m_q4_1.json").read_text())["prompts"]
NUMBERS = itertools.count()
TEXT = [token_id for golden in GOLDEN for token_id in golden["prompt_ids"]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, seed=0, ignore_eos=True)
SIZES = {"num_blocks": 400, "max_num_seqs": 80, "max_num_batched_tokens": 256, "max_model_len": 256}


@pytest.fixture(scope="module")
def first() -> Iterator[EngineCore]:
    core = start("smollm2-135m", **SIZES)
    yield core
    core.close()


@pytest.fixture(scope="module")
def second() -> Iterator[EngineCore]:
    core = start("smollm2-135m", **SIZES)
    yield core
    core.close()


@pytest.fixture(scope="module")
def three() -> Iterator[EngineCore]:
    """An engine of three ranks."""
    core = start("smollm2-135m", tensor_parallel_size=3, **SIZES)
    yield core
    core.close()


@pytest.fixture(scope="module")
def expected(first: EngineCore) -> list[list[int]]:
    """Tokens after the first 1 to 70 of TEXT, from one engine that does everything itself."""
    first.scheduler.cache.pool.evict_all()
    tokens: dict[str, list[int]] = {}
    for length in range(1, 71):
        name = f"alone{length}"
        tokens[name] = []
        assert first.add(EngineRequest(request_id=name, prompt_token_ids=TEXT[:length], params=GREEDY)) is None
    while first.has_work:
        for delta in first.step():
            tokens[delta.request_id] += delta.token_ids
    return [tokens[f"alone{length}"] for length in range(1, 71)]


def assert_handed_over(pair: Pair, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Hand all prompts over at once. Returns their tokens; each must have come, and none was computed again."""
    before = pair.p.snapshot().num_kv_sent, pair.d.snapshot().num_kv_received, pair.d.snapshot().num_kv_recomputed
    names = [f"r{next(NUMBERS)}" for _ in prompts]
    for name, prompt, asked in zip(names, prompts, params, strict=True):
        pair.begin(name, prompt, asked)
    pair.run(*names)
    after = pair.p.snapshot().num_kv_sent, pair.d.snapshot().num_kv_received, pair.d.snapshot().num_kv_recomputed
    assert [now - then for now, then in zip(after, before, strict=True)] == [len(prompts), len(prompts), 0]
    return [pair.tokens[name] for name in names]


def test_golden_prompts_give_their_golden_tokens(first: EngineCore, second: EngineCore):
    pair = Pair(first, second)
    pair.forget_cached()
    prompts = [golden["prompt_ids"] for golden in GOLDEN]
    lengths = [min(16, len(golden["continuation_ids"])) for golden in GOLDEN]
    params = [SamplingParams(temperature=0, max_tokens=length, seed=0) for length in lengths]
    found = assert_handed_over(pair, prompts, params)
    assert found == [golden["continuation_ids"][:length] for golden, length in zip(GOLDEN, lengths, strict=True)]


@pytest.mark.parametrize("length", [1, 16, 17, 48, 70])
def test_a_prompt_is_handed_over_without_any_hit(
    first: EngineCore, second: EngineCore, expected: list[list[int]], length: int
):
    pair = Pair(first, second)
    pair.forget_cached()
    cached = first.snapshot().num_cached_tokens + second.snapshot().num_cached_tokens
    assert assert_handed_over(pair, [TEXT[:length]], [GREEDY]) == [expected[length - 1]]
    assert first.snapshot().num_cached_tokens + second.snapshot().num_cached_tokens == cached


@pytest.mark.parametrize("sizes", ["1 to 1", "1 to 3", "3 to 1"])
def test_prompts_of_1_to_70_tokens_with_hits_on_either_side(
    first: EngineCore, second: EngineCore, three: EngineCore, expected: list[list[int]], sizes: str
):
    pair = {"1 to 1": Pair(first, second), "1 to 3": Pair(first, three), "3 to 1": Pair(three, first)}[sizes]
    pair.forget_cached()
    prompts, params = [TEXT[:length] for length in range(1, 71)], [GREEDY] * 70
    assert assert_handed_over(pair, prompts, params) == expected
    for core in (pair.d, pair.p):  # what one has is found by it, the other begins anew
        core.scheduler.cache.pool.evict_all()
        assert assert_handed_over(pair, prompts[8::10], params[8::10]) == expected[8::10]


def test_prompts_handed_over_in_8_bits_give_the_tokens_of_one_engine():
    """One at a time: a sum in another order may round to another code, which shows where two tokens are close."""
    engines = [start("smollm2-135m", kv_cache="int8", **SIZES) for _ in range(2)]
    prompts = [golden["prompt_ids"] for golden in GOLDEN]
    colocated = [tokens_of(alone(engines[0], [prompt], GREEDY)[0]) for prompt in prompts]
    pair = Pair(*engines)
    pair.forget_cached()
    found = [assert_handed_over(pair, [prompt], [GREEDY])[0] for prompt in prompts]
    assert found == colocated
    for core in engines:
        core.close()
