"""Sampling parameters: limits are inclusive as documented, everything else is refused by name."""

import math
from typing import Any

import msgspec
import pytest

from manta.engine.errors import InvalidRequest
from manta.engine.request import EngineRequest, RequestDelta, ResumeState, SamplingParams


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [math.nan, math.inf, -0.1, "hot", None],
        "top_p": [math.nan, -0.1, 1.1],
        "top_k": [-2, 1.5, True],
        "min_p": [math.nan, -0.1, 1.1],
        "repetition_penalty": [math.nan, 0.0, -1.0],
        "presence_penalty": [math.nan, 2.1],
        "frequency_penalty": [-2.1, math.inf],
        "max_tokens": [-1, 1.5],
        "n": [0, -1, 129],
        "logprobs": [-1, 21],
        "seed": [1.5, 2**64],
        "stop": [[""], [1]],
        "logit_bias": [{-1: 1.0}, {"a": 1.0}, {1: 101.0}, {1: math.nan}],
    }.items(),
)
def test_values_outside_the_limits_are_refused_by_name(field: str, values: list[Any]):
    for value in values:
        with pytest.raises(InvalidRequest) as error:
            SamplingParams(**{field: value})
        assert error.value.param == field
        assert field in str(error.value)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"top_p": 1},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 999_999_999},
        {"min_p": 1},
        {"seed": 9007199254740993},
        {"max_tokens": 0},
        {"logit_bias": {5: -100}},
        {"stop": "x"},
    ],
    ids=str,
)
def test_values_on_the_limits_are_taken(params: dict[str, Any]):
    SamplingParams(**params)  # type: ignore[arg-type]


def test_more_minimum_than_maximum_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("params", [{"logit_bias": {10: 1.0}}, {"stop_token_ids": (10,)}], ids=str)
def test_token_ids_past_the_vocabulary_are_refused_by_name(params: dict[str, Any]):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**params).check_vocab(10)  # type: ignore[arg-type]
    assert error.value.param == next(iter(params))


def test_one_stop_string_and_a_list_mean_the_same():
    assert SamplingParams(stop="x") == SamplingParams(stop=("x",)) == SamplingParams(stop=["x"])  # type: ignore[arg-type]


def test_choices_have_seeds_that_differ_and_follow_from_the_given_one():
    seeds = [[params.seed for params in SamplingParams(n=3, seed=seed).for_choices()] for seed in (5, 5, None, None)]
    assert seeds[0] == seeds[1] == [5, 6, 7]
    assert seeds[2] != seeds[3]
    assert None not in seeds[2]


def test_a_resume_state_survives_the_wire_and_keeps_what_was_received():
    state = ResumeState(
        request=EngineRequest(request_id="a", prompt_token_ids=[1, 2], params=SamplingParams(seed=3, stop=("x",)))
    )
    state.num_failures_without_progress = 1
    state.add(RequestDelta(request_id="a", token_ids=[7, 8]))
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ResumeState)
    assert copy == state
    assert copy.request.output_token_ids == [7, 8]
    assert copy.num_failures_without_progress == 0
