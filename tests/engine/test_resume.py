"""A generation that goes on in another engine is the one that the first engine would have given, at every token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.errors import InvalidRequest
from manta.engine.request import (
    EngineRequest,
    FinishReason,
    RequestDelta,
    ResumeState,
    SamplingParams,
    TokenLogprobs,
)
from manta.engine.startup import start_engine
from tests.engine.runners import save_tiny

NUM_TOKENS = 50
PROMPT = [3 + (7 * i) % 97 for i in range(37)]
HARD: dict[str, Any] = {
    "temperature": 0.9, "top_k": 60, "top_p": 0.97, "seed": 1234, "repetition_penalty": 1.2, "presence_penalty": 0.4,
    "frequency_penalty": 0.3, "logit_bias": {9: 2.0, 11: -5.0}, "min_tokens": 20, "stop_token_ids": (5, 6, 7, 8),
    "logprobs": 3, "prompt_logprobs": 1,
}  # fmt: skip
"""Everything that looks at the tokens before, at their number or at their position."""


def make_request(**changes: Any) -> EngineRequest:
    """HARD with changes."""
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **HARD, **changes})
    return EngineRequest(request_id="r", prompt_token_ids=PROMPT, params=params)


def generate(core: EngineCore, state: ResumeState, *, until: int | None = None) -> list[RequestDelta]:
    """The deltas of one stream, broken off after its `until`-th token as a lost engine would."""
    request = state.submission()
    assert core.add(request) is None
    deltas: list[RequestDelta] = []
    while core.has_work:
        for delta in core.step():
            assert delta.request_id == request.request_id
            state.add(delta)
            deltas.append(delta)
        if until is not None and len(state.request.output_token_ids) >= until:
            core.cancel(request.request_id)
            until = None
            while core.has_work:
                assert core.step() == []
    return deltas


def moved(first: EngineCore, second: EngineCore, request: EngineRequest, after: int) -> list[RequestDelta]:
    """The deltas of a stream that leaves `first` after so many tokens; 0: before any."""
    state = ResumeState(request=msgspec.structs.replace(request, output_token_ids=[]))
    deltas = generate(first, state, until=after) if after else []
    if not after:
        state.submission()
    return deltas + generate(second, state)


def tokens_of(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def logprobs_of(deltas: list[RequestDelta]) -> list[TokenLogprobs]:
    return [entry for delta in deltas for entry in delta.logprobs or ()]


def assert_same_stream(deltas: list[RequestDelta], expected: list[RequestDelta], *, tolerance: float) -> None:
    assert tokens_of(deltas) == tokens_of(expected)
    assert {delta.request_id for delta in deltas} == {"r"}
    assert [delta.finish_reason for delta in deltas] == [delta.finish_reason for delta in expected]
    assert [delta.stop_token_id for delta in deltas] == [delta.stop_token_id for delta in expected]
    first_facts = [(delta.num_cached_tokens is not None, delta.prompt_logprobs is not None) for delta in deltas]
    assert first_facts == [(True, True)] + [(False, False)] * (len(deltas) - 1)
    for entry, other in zip(logprobs_of(deltas), logprobs_of(expected), strict=True):
        assert (entry.token_id, entry.top_token_ids) == (other.token_id, other.top_token_ids)
        assert entry.logprob == pytest.approx(other.logprob, abs=tolerance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module", params=["model", "simulated"])
def engines(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[EngineCore, EngineCore]]:
    """Two that share nothing but the model. The second one's cache, batches and chunks are other ones."""
    device: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_cache_gib": 0.05}
    if request.param == "simulated":
        device = {"device": "sim:0ms", "load_format": "dummy", "num_blocks": 200}
    first = start_engine(EngineConfig.build(str(folder), block_size=16, max_num_seqs=8, **device))
    sizes = {"block_size": 32, "max_num_batched_tokens": 19, "max_num_seqs": 8, "enable_prefix_caching": False}
    second = start_engine(EngineConfig.build(str(folder), **sizes, **device))
    yield first, second
    first.close()
    second.close()


@pytest.mark.parametrize("temperature", [0.9, 0.0], ids=["drawn", "greedy"])
def test_a_stream_goes_on_unchanged_from_every_token(
    engines: tuple[EngineCore, EngineCore], temperature: float
) -> None:
    request = make_request(temperature=temperature, stop_token_ids=())
    expected = moved(engines[0], engines[0], request, 0)
    assert len(tokens_of(expected)) == NUM_TOKENS
    for after in range(0, NUM_TOKENS, 1 if temperature else 7):
        assert_same_stream(moved(*engines, request, after), expected, tolerance=1e-3)


def test_a_stop_token_counts_from_the_beginning_of_the_stream(engines: tuple[EngineCore, EngineCore]) -> None:
    """min_tokens forbids the stop tokens at first; the stream ends by one of them wherever it was broken off."""
    request = make_request(logit_bias=dict.fromkeys((5, 6, 7, 8), 4.0))
    if engines[0].info.device != "cpu":  # the simulated model knows no bias: let it stop at a token that it draws
        drawn = tokens_of(moved(engines[0], engines[0], request, 0))[24]
        request = make_request(stop_token_ids=(drawn,))
    expected = moved(engines[0], engines[0], request, 0)
    num_tokens = len(tokens_of(expected))
    assert 20 <= num_tokens < NUM_TOKENS
    assert expected[-1].finish_reason is FinishReason.STOP
    for after in range(num_tokens):
        assert_same_stream(moved(*engines, request, after), expected, tolerance=1e-3)


def test_a_stream_that_moves_again_and_again_is_the_same(engines: tuple[EngineCore, EngineCore]) -> None:
    request = make_request(stop_token_ids=())
    expected = moved(engines[0], engines[0], request, 0)
    rng = random.Random(5)
    for _ in range(5):
        state = ResumeState(request=msgspec.structs.replace(request, output_token_ids=[]))
        deltas: list[RequestDelta] = []
        while not deltas or deltas[-1].finish_reason is None:
            until = len(state.request.output_token_ids) + rng.randint(1, 12)
            deltas += generate(engines[rng.randint(0, 1)], state, until=until)
        assert_same_stream(deltas, expected, tolerance=1e-3)
        assert state.num_submissions > 4


def test_an_engine_refuses_what_has_all_its_output(engines: tuple[EngineCore, EngineCore]) -> None:
    params = SamplingParams(max_tokens=2, seed=1)
    refusal = engines[0].add(
        EngineRequest(request_id="r", prompt_token_ids=PROMPT, params=params, output_token_ids=[4, 5])
    )
    assert refusal is not None
    assert "all the output" in refusal.message


def test_a_state_of_another_version_is_refused() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(seed=1))
    sent = msgspec.msgpack.encode({"request": msgspec.to_builtins(request), "version": 2})
    with pytest.raises((InvalidRequest, msgspec.ValidationError), match="version 2"):
        msgspec.msgpack.decode(sent, type=ResumeState)


def test_submissions_have_ids_of_their_own_and_copies_of_the_tokens() -> None:
    state = ResumeState(request=EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(seed=1)))
    first = state.submission()
    state.add(RequestDelta(request_id="r", token_ids=[7]))
    second = state.submission()
    assert (first.request_id, second.request_id) == ("r", "r.1")
    assert (first.output_token_ids, second.output_token_ids) == ([], [7])
