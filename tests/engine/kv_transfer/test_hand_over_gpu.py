"""Hand-overs between engines of one GPU in float32: layer by layer beside eager steps, after steps that are graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manta.engine.core import EngineCore
from manta.engine.request import SamplingParams
from tests.engine.kv_transfer.pairs import TINY, Pair, alone, start, tokens_of
from tests.engine.kv_transfer.test_hand_over import prompt_of

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=8, seed=0, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 33, 64, 100, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps({**TINY, "hidden_size": 576, "intermediate_size": 1536}))
    return str(folder)


def start_here(model: str, **overrides: Any) -> EngineCore:
    sizes = {"device": "cuda:0", "num_blocks": 200, "max_num_batched_tokens": 128, "max_model_len": 512}
    return start(model, **{**sizes, **overrides})


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[EngineCore]:
    """The engine that does everything itself."""
    core = start_here(model, kv_transfer=False)
    yield core
    core.close()


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({"cuda_graphs": False}, {"cuda_graphs": False}),
        ({}, {}),
        ({"tensor_parallel_size": 3}, {}),
        ({}, {"tensor_parallel_size": 3}),
    ],
    ids=["eager", "graphs", "TP 3 to 1", "TP 1 to 3"],
)
def test_tokens_are_those_of_one_engine(model: str, one: EngineCore, p: dict[str, Any], d: dict[str, Any]):
    prompts = [prompt_of(length, first=length) for length in LENGTHS]
    expected = [tokens_of(deltas) for deltas in alone(one, prompts, GREEDY)]
    with Pair(start_here(model, **p), start_here(model, **d)) as pair:
        for round_ in ("cold", "hits"):
            names = [f"{round_}{length}" for length in LENGTHS]
            for name, prompt in zip(names, prompts, strict=True):
                pair.begin(name, prompt, GREEDY)
            pair.run(*names)
            assert [pair.tokens[name] for name in names] == expected
        snapshot = pair.d.snapshot()
        assert (snapshot.num_kv_received, snapshot.num_kv_recomputed) == (2 * len(LENGTHS), 0)
        assert pair.p.snapshot().num_kv_sent == 2 * len(LENGTHS)


@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
def test_8_bit_caches_give_the_tokens_of_one_engine(model: str, kv_cache: str):
    """One prompt at a time: a sum in another order may round to another code."""
    prompts = [prompt_of(length, first=length) for length in LENGTHS]
    with Pair(start_here(model, kv_cache=kv_cache), start_here(model, kv_cache=kv_cache)) as pair:
        expected = [tokens_of(alone(pair.p, [prompt], GREEDY)[0]) for prompt in prompts]
        pair.forget_cached()
        for index, prompt in enumerate(prompts):
            pair.begin(f"n{index}", prompt, GREEDY)
            pair.run(f"n{index}")
        assert [pair.tokens[f"n{index}"] for index in range(len(prompts))] == expected
        assert pair.d.snapshot().num_kv_recomputed == 0


def test_what_is_abandoned_leaves_nothing(model: str):
    with Pair(start_here(model), start_here(model)) as pair:
        for num_turns in range(10):
            name = f"quit{num_turns}"
            pair.begin(name, prompt_of(400, first=num_turns), GREEDY)
            for _ in range(num_turns):
                pair.turn()
            pair.p.cancel(name)
            pair.d.cancel(name)
            pair.d.release(f"t-{name}")
        pair.run_until(lambda: pair.is_idle)
