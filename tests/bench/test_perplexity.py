"""Windows score each token but the first exactly once, and the sum over windows is right."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from manta.bench.perplexity import Window, perplexity_of, windows
from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.llm import CompletionOutput, RequestOutput
from manta.engine.request import TokenLogprobs


def test_windows_of_a_small_text() -> None:
    assert windows(10, window=4, stride=2) == [
        Window(0, 4, 1),
        Window(2, 6, 4),
        Window(4, 8, 6),
        Window(6, 10, 8),
    ]
    assert windows(3, window=4, stride=2) == [Window(0, 3, 1)]


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"), [(20_000, 1024, 512), (1025, 1024, 512), (2, 8, 3), (97, 8, 7)]
)
def test_each_token_is_scored_once_with_enough_context(num_tokens: int, window: int, stride: int) -> None:
    listed = windows(num_tokens, window=window, stride=stride)
    scored = [position for one in listed for position in range(one.score_from, one.end)]
    assert scored == list(range(1, num_tokens))
    assert all(0 < one.end - one.start <= window for one in listed)
    assert all(one.score_from - one.start >= min(window - stride, one.score_from) for one in listed)


def test_windows_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="stride 8"):
        windows(100, window=8, stride=8)
    with pytest.raises(ConfigError, match="fewer than two"):
        windows(1, window=8, stride=4)


class CountingModel:
    """Stands in for an LLM: a token's log-probability is -1 / (tokens before it in the window)."""

    def __init__(self, wrong_token: bool = False) -> None:
        self.wrong_token = wrong_token

    def generate(self, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
        assert params.prompt_logprobs == 0
        (ids,) = prompts
        entries = [TokenLogprobs(t + self.wrong_token, -1 / max(1, i), [], []) for i, t in enumerate(ids)]
        return [RequestOutput(None, ids, [CompletionOutput(0)], prompt_logprobs=[None, *entries[1:]])]


def test_the_score_is_the_mean_over_scored_tokens() -> None:
    said: list[tuple[int, int]] = []
    score = perplexity_of(
        cast(Any, CountingModel()),
        list(range(6)),
        window=4,
        stride=2,
        say=lambda done, total, _: said.append((done, total)),
    )
    # Window 0 to 4 scores tokens with 1, 2 and 3 before them; window 2 to 6 those with 2 and 3.
    mean = (1 + 1 / 2 + 1 / 3 + 1 / 2 + 1 / 3) / 5
    assert score.num_tokens == 5
    assert score.num_prompt_tokens == 8
    assert score.perplexity == pytest.approx(math.exp(mean))
    assert said == [(2, 2)]


def test_log_probabilities_of_other_tokens_are_noticed() -> None:
    with pytest.raises(EngineFailed, match="another token"):
        perplexity_of(cast(Any, CountingModel(wrong_token=True)), [1, 2, 3], window=4, stride=2)
