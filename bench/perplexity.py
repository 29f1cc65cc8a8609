"""`manta eval perplexity`: how well a model predicts a text, through the engine's own prompt log-probabilities.

Windows of `window` tokens begin every `stride` tokens; each token is scored once, in the first window that holds it,
with all of that window before it as context. The first token of the text has no context and is not scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.llm import LLM
from manta.engine.request import SamplingParams

from .drive import describe_engine
from .report import Report, memory_figures
from .traces import open_text

PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) are the prompt; those from `score_from` are scored."""

    start: int
    end: int
    score_from: int


def windows(num_tokens: int, *, window: int, stride: int) -> list[Window]:
    """Windows over a text in which each token but the first is scored exactly once. Raises ConfigError."""
    if not 1 <= stride < window:
        raise ConfigError(f"stride {stride} must be at least 1 and below the window {window}", field="stride")
    if num_tokens < 2:
        raise ConfigError("the text has fewer than two tokens: there is nothing to predict", field="text")
    result: list[Window] = []
    start, scored = 0, 1
    while scored < num_tokens:
        end = min(start + window, num_tokens)
        result.append(Window(start, end, scored))
        start, scored = start + stride, end
    return result


def run(
    config: EngineConfig,
    text_path: Path,
    *,
    max_tokens: int | None = None,
    window: int = 1024,
    stride: int = 512,
    json_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Perplexity of the first `max_tokens` tokens of a text file (.gz too). Raises ConfigError or CheckpointError."""
    try:
        with open_text(text_path) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"cannot read the text {text_path}: {error}", field="text") from None

    def say(done: int, total: int, perplexity: float) -> None:
        if console is not None:
            console.print(f"{done} of {total} windows, perplexity so far {perplexity:.3f}", highlight=False)

    with LLM(config) as llm:
        info = llm.engine.info
        if window + 1 > info.max_model_len:
            raise ConfigError(f"window {window} does not fit the context of {info.max_model_len}", field="window")
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
        begin_s = time.monotonic()
        score = perplexity_of(llm, token_ids, window=window, stride=stride, say=say)
        seconds = time.monotonic() - begin_s
        report = Report(
            "perplexity",
            model=describe_engine(config, info),
            workload={
                "text": text_path.name,
                "tokens": len(token_ids),
                "window": window,
                "stride": stride,
                "add_special_tokens": False,
            },
            figures={
                "perplexity": score.perplexity,
                "mean_nll_nats": score.nll / score.num_tokens,
                "scored_tokens": float(score.num_tokens),
                "duration_s": seconds,
                "prompt_tokens_per_s": score.num_prompt_tokens / seconds,
                **memory_figures(),
            },
        )
    report.finish(console, json_path)
    return report


@dataclass
class Score:
    """Sum of negative log-likelihoods in nats, and over how many tokens."""

    nll: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)


def perplexity_of(
    llm: LLM,
    token_ids: Sequence[int],
    *,
    window: int,
    stride: int,
    say: Callable[[int, int, float], None] = lambda done, total, perplexity: None,
) -> Score:
    """Score a text's tokens. `say(windows done, of how many, perplexity so far)` is called now and then."""
    listed = windows(len(token_ids), window=window, stride=stride)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    score, said_s = Score(), time.monotonic()
    for number, one in enumerate(listed, 1):
        (output,) = llm.generate([list(token_ids[one.start : one.end])], params)
        _add(score, one, token_ids, output.prompt_logprobs or [])
        if time.monotonic() - said_s > PROGRESS_EVERY_S or number == len(listed):
            said_s = time.monotonic()
            say(number, len(listed), score.perplexity)
    return score


def _add(score: Score, one: Window, token_ids: Sequence[int], entries: Sequence[object]) -> None:
    if len(entries) != one.end - one.start:
        raise EngineFailed(f"The engine gave {len(entries)} prompt log-probabilities for {one.end - one.start} tokens.")
    for position in range(one.score_from, one.end):
        entry = entries[position - one.start]
        if getattr(entry, "token_id", None) != token_ids[position]:
            raise EngineFailed(f"The engine's log-probability at position {position} belongs to another token.")
        score.nll -= entry.logprob  # type: ignore[attr-defined]
    score.num_tokens += one.end - one.score_from
    score.num_prompt_tokens += one.end - one.start
