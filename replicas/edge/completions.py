"""POST /v1/completions: from its fields to a job, and the JSON of its answers. Knows no HTTP and no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from manta.engine.errors import InvalidRequest
from manta.engine.stats import EngineInfo
from manta.engine.tokenizer import Tokenizer

from .client import EdgeContext
from .job import Job, checked_max_tokens, make_choices, new_response_id
from .logprobs import CompletionLogprobs, prompt_logprobs
from .schema import CompletionFields
from .sse import TextEvent, encode_json, event
from .stream import Choice, Piece

DEFAULT_MAX_TOKENS = 16
"""OpenAI's. Fewer when that does not fit any more."""


def completions_job(context: EdgeContext, info: EngineInfo, fields: CompletionFields, arrival_s: float) -> Job:
    """Tokenize and check the prompts. Raises InvalidRequest or ContextLengthExceeded."""
    fields.check()
    add_special_tokens = fields.add_special_tokens is not False
    prompts = read_prompts(context.tokenizer, fields.prompt, add_special_tokens, vocab_size=info.vocab_size)
    token_ids = [prompt for _, prompt in prompts]
    max_tokens = checked_max_tokens(info, token_ids, fields.max_tokens, param="prompt")
    if fields.max_tokens is None:
        max_tokens = min(max_tokens, DEFAULT_MAX_TOKENS)
    wanted = [fields.prompt_logprobs, fields.logprobs if fields.echo else None]
    params = fields.sampling_params(
        info.vocab_size,
        max_tokens=max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=max((number for number in wanted if number is not None), default=None),
    )
    response_id = new_response_id("cmpl")
    return Job(
        response_id=response_id,
        endpoint="completions",
        form=CompletionForm(context, fields, [text for text, _ in prompts], response_id),
        stream=fields.stream,
        include_usage=fields.include_usage,
        prompts=token_ids,
        choices=make_choices(context, info, fields, params, token_ids, response_id),
        arrival_s=arrival_s,
    )


def read_prompts(
    tokenizer: Tokenizer, given: Any, add_special_tokens: bool, *, vocab_size: int
) -> list[tuple[str | None, list[int]]]:
    """(text or None, token ids) of each prompt: text, token ids, or a list of either. Token ids stay as they are."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("prompt must be text, token ids, or a non-empty list of these.", param="prompt")
    prompts: list[tuple[str | None, list[int]]] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append((prompt, tokenizer.encode(prompt, add_special_tokens=add_special_tokens)))
        elif isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
            if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
                raise InvalidRequest(
                    f"prompt holds token ids outside the vocabulary (0 to {vocab_size - 1}).", param="prompt"
                )
            prompts.append((None, prompt))
        else:
            raise InvalidRequest("prompt must be text, token ids, or a list of these.", param="prompt")
    if any(not token_ids for _, token_ids in prompts):
        raise InvalidRequest("prompt must hold at least one token.", param="prompt")
    return prompts


class CompletionForm:
    """Implements job.Form for completions."""

    def __init__(
        self, context: EdgeContext, fields: CompletionFields, prompt_texts: Sequence[str | None], response_id: str
    ) -> None:
        self._tokenizer = context.tokenizer
        self._fields = fields
        self._prompt_texts = prompt_texts
        self._response_id = response_id
        self._created, self._model = int(time.time()), context.model_name
        self._nulls = {"usage": None} if fields.include_usage else {}
        self._text_events: dict[int, TextEvent] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def events(self, pieces: Sequence[Piece]) -> bytes:
        parts: list[bytes] = []
        for piece in pieces:
            text_event = self._text_events.get(piece.choice.index)
            if (
                text_event is not None
                and piece.finish_reason is None
                and piece.logprobs is None
                and not self._fields.return_token_ids
            ):
                parts.append(text_event.render(piece.text))
            else:
                parts.append(event({**self._chunk(self._choice(piece.choice, (piece,))), **self._nulls}))
        return b"".join(parts)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return event({**self._chunk(), "usage": usage})

    def body(self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> bytes:
        rendered = [self._choice(choice, own) for choice, own in zip(choices, pieces, strict=True)]
        return encode_json({**self._chunk(*rendered), "usage": usage})

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._response_id, "object": "text_completion", "created": self._created, "model": self._model}
        return {**head, "choices": choices}

    def _choice(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The choice's next part: `pieces` joined, after the echoed prompt when it is the first."""
        index, params = choice.index, choice.request.params
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        rendered: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        is_first = index not in self._text_events
        if is_first:
            self._text_events[index] = TextEvent(
                lambda text: {**self._chunk({**_PLAIN, "index": index, "text": text}), **self._nulls}
            )
            if self._fields.echo:
                rendered["text"] = self._prompt_text(choice) + text
                entries = [*(choice.prompt_logprobs or ()), *entries]
            if self._fields.prompt_logprobs is not None and choice.prompt_logprobs is not None:
                rendered["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice.prompt_logprobs)
        if params.logprobs is not None:
            renderer = self._logprobs.setdefault(index, CompletionLogprobs(self._tokenizer, params.logprobs))
            rendered["logprobs"] = renderer.render(entries, choice.request.prompt_token_ids)
        if self._fields.return_token_ids:
            rendered["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
            if is_first:
                rendered["prompt_token_ids"] = choice.request.prompt_token_ids
        if pieces[-1].finish_reason is not None:
            rendered["finish_reason"] = pieces[-1].finish_reason.value
            rendered["stop_reason"] = choice.stop_reason
        return rendered

    def _prompt_text(self, choice: Choice) -> str:
        text = self._prompt_texts[choice.prompt_index]
        if text is not None:
            return text
        prompt = choice.request.prompt_token_ids
        return self._tokenizer.decode(prompt, skip_special_tokens=self._fields.skip_special_tokens)


_PLAIN = {"logprobs": None, "finish_reason": None}
