"""Log-probabilities in OpenAI's two shapes (chat and completions) and in vLLM's for prompts. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from manta.engine.request import TokenLogprobs
from manta.engine.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (OpenAI's own choice)."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions: every token with its exact bytes."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for entry in entries:
        top = [token(*pair) for pair in zip(entry.top_token_ids, entry.top_logprobs, strict=True)]
        content.append({**token(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of completions, over one choice's events: text offsets go on from event to event."""

    def __init__(self, tokenizer: Tokenizer, num_alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._num_alternatives = num_alternatives
        self._offset = 0

    def render(
        self, entries: Sequence[TokenLogprobs | None], prompt_token_ids: Sequence[int] = ()
    ) -> dict[str, list[Any] | None]:
        """`entries` may begin with those of an echoed prompt, whose first is None (nothing predicts it)."""
        tokens: list[str] = []
        offsets: list[int] = []
        top: list[dict[str, float] | None] = []
        for position, entry in enumerate(entries):
            token_id = prompt_token_ids[position] if entry is None else entry.token_id
            tokens.append(self._name(token_id))
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.token_text(token_id))
            top.append(None if entry is None else self._alternatives(entry))
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
            "top_logprobs": top if self._num_alternatives else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        best = {self._name(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in pairs}
        best.setdefault(self._name(entry.token_id), max(entry.logprob, LOWEST_LOGPROB))
        return best

    def _name(self, token_id: int) -> str:
        """The token's text, or its bytes when they are only part of a character, as OpenAI spells them."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        return self._tokenizer.token_text(token_id)


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """One entry a prompt token, the first None: token id -> log-probability and text, the prompt's own token among
    them."""

    def value(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": max(logprob, LOWEST_LOGPROB), "decoded_token": tokenizer.token_text(token_id)}

    rendered: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            rendered.append(None)
            continue
        position = {str(entry.token_id): value(entry.token_id, entry.logprob)}
        for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            position[str(token_id)] = value(token_id, logprob)
        rendered.append(position)
    return rendered
