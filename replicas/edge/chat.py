"""POST /v1/chat/completions: from its fields to a job, and the JSON of its answers. Knows no HTTP and no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from manta.engine.errors import InvalidRequest
from manta.engine.stats import EngineInfo

from .client import EdgeContext
from .job import Job, checked_max_tokens, make_choices, new_response_id
from .logprobs import chat_logprobs, prompt_logprobs
from .messages import read_messages
from .schema import ChatFields
from .sse import TextEvent, encode_json, event
from .stream import Choice, Piece


def chat_job(context: EdgeContext, info: EngineInfo, fields: ChatFields, arrival_s: float) -> Job:
    """Render, tokenize and check a conversation. Raises InvalidRequest or ContextLengthExceeded."""
    fields.check()
    prompt = chat_prompt(context, fields)
    max_tokens = checked_max_tokens(info, [prompt], fields.output_limit, param="messages")
    params = fields.sampling_params(
        info.vocab_size,
        max_tokens=max_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
    )
    response_id = new_response_id("chatcmpl")
    return Job(
        response_id=response_id,
        endpoint="chat.completions",
        form=ChatForm(context, fields, response_id),
        stream=fields.stream,
        include_usage=fields.include_usage,
        prompts=[prompt],
        choices=make_choices(context, info, fields, params, [prompt], response_id),
        arrival_s=arrival_s,
    )


def chat_prompt(context: EdgeContext, fields: Any) -> list[int]:
    """Token ids of a conversation (ChatFields or TokenizeFields). The template writes the special tokens itself."""
    messages = read_messages(fields.messages)
    if fields.continue_final_message and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs an assistant message at the end to continue.", param="continue_final_message"
        )
    text = context.tokenizer.render_chat(
        messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        template_kwargs=fields.chat_template_kwargs,
    )
    prompt = context.tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))
    if not prompt:
        raise InvalidRequest("The chat template made an empty prompt of these messages.", param="messages")
    return prompt


class ChatForm:
    """Implements job.Form for chat completions."""

    def __init__(self, context: EdgeContext, fields: ChatFields, response_id: str) -> None:
        self._tokenizer = context.tokenizer
        self._with_token_ids = fields.return_token_ids
        self._response_id = response_id
        self._created, self._model = int(time.time()), context.model_name
        self._nulls = {"usage": None} if fields.include_usage else {}
        self._text_events: dict[int, TextEvent] = {}

    def events(self, pieces: Sequence[Piece]) -> bytes:
        parts: list[bytes] = []
        for piece in pieces:
            text_event = self._text_events.get(piece.choice.index)
            if text_event is None:
                text_event = self._begin(piece.choice, parts)
            if piece.finish_reason is None and piece.logprobs is None and not self._with_token_ids:
                parts.append(text_event.render(piece.text))
            else:
                parts.append(event(self._full_chunk(piece)))
        return b"".join(parts)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})

    def body(self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> bytes:
        rendered = [self._choice(choice, own) for choice, own in zip(choices, pieces, strict=True)]
        answer = {**self._head("chat.completion"), "choices": rendered, "usage": usage}
        if choices[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choices[0].prompt_logprobs)
        if self._with_token_ids:
            answer["prompt_token_ids"] = choices[0].request.prompt_token_ids
        return encode_json(answer)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._response_id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **self._nulls}

    def _begin(self, choice: Choice, parts: list[bytes]) -> TextEvent:
        first = self._chunk(choice.index, {"role": "assistant", "content": ""})
        if self._with_token_ids and choice.index == 0:
            first["prompt_token_ids"] = choice.request.prompt_token_ids
        parts.append(event(first))
        text_event = TextEvent(lambda text: self._chunk(choice.index, {"content": text}))
        self._text_events[choice.index] = text_event
        return text_event

    def _full_chunk(self, piece: Piece) -> dict[str, Any]:
        chunk = self._chunk(piece.choice.index, {"content": piece.text} if piece.text else {})
        choice = chunk["choices"][0]
        if piece.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, piece.logprobs)
        if self._with_token_ids:
            choice["token_ids"] = piece.token_ids
        if piece.finish_reason is not None:
            choice["finish_reason"] = piece.finish_reason.value
            choice["stop_reason"] = piece.choice.stop_reason
        return chunk

    def _choice(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        assert choice.finish_reason is not None
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        rendered = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, entries) if choice.request.params.logprobs is not None else None,
            "finish_reason": choice.finish_reason.value,
            "stop_reason": choice.stop_reason,
        }
        if self._with_token_ids:
            rendered["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return rendered
