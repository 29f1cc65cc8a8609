"""A generation request that has been read: its choices, and how they are to be shown. Knows no HTTP and no engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from manta.engine.errors import ContextLengthExceeded, InvalidRequest
from manta.engine.prefix_cache import BlockHasher
from manta.engine.request import EngineRequest, FinishReason, SamplingParams
from manta.engine.stats import EngineInfo

from .client import EdgeContext, RequestRecord
from .schema import GenerationFields
from .stream import Choice, Piece


class Form(Protocol):
    """The JSON of one endpoint. `bytes` are whole SSE events or a whole body."""

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """The events of a stream for these pieces."""
        ...

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last event before the terminator, with no choices."""
        ...

    def body(self, choices: Sequence[Choice], pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> bytes:
        """The answer that is not streamed; `pieces[i]` are those of `choices[i]`."""
        ...


@dataclass
class Job:
    """All about one request that the endpoints share."""

    response_id: str
    endpoint: str
    form: Form
    stream: bool
    include_usage: bool
    prompts: list[list[int]]
    choices: list[Choice]
    arrival_s: float
    submitted_s: float = field(default_factory=time.monotonic)
    traceparent: str | None = None
    """The caller's trace."""

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage over all prompts and choices; a prompt counts once, whatever n is."""
        num_prompt_tokens = sum(map(len, self.prompts))
        num_completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    @property
    def num_cached_tokens(self) -> int:
        num_a_prompt = len(self.choices) // len(self.prompts)
        return sum(choice.num_cached_tokens for choice in self.choices[::num_a_prompt])

    def record(self, reason: FinishReason) -> RequestRecord:
        """For the observer; `reason` is how choices ended that did not come to their own end."""
        return RequestRecord(
            endpoint=self.endpoint,
            stream=self.stream,
            num_prompt_tokens=sum(map(len, self.prompts)),
            num_cached_tokens=self.num_cached_tokens,
            queue_s=self.submitted_s - self.arrival_s,
            e2e_s=time.monotonic() - self.arrival_s,
            choices=tuple(choice.record(self.arrival_s, reason) for choice in self.choices),
            arrival_s=self.arrival_s,
            response_id=self.response_id,
            traceparent=self.traceparent,
        )


def new_response_id(prefix: str) -> str:
    """Unique over all edges; shown to the client and used as the stem of the engine's request ids."""
    return f"{prefix}-{secrets.token_hex(16)}"


def make_choices(
    context: EdgeContext,
    info: EngineInfo,
    fields: GenerationFields,
    params: SamplingParams,
    prompts: Sequence[list[int]],
    response_id: str,
) -> list[Choice]:
    """n choices for each prompt, prompt by prompt. The blocks of each prompt are hashed here, once."""
    if len(prompts) * params.n > context.max_sequences:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {params.n} are more than {context.max_sequences} sequences.", param="n"
        )
    choices = []
    for prompt_index, prompt in enumerate(prompts):
        block_hashes: list[bytes] = []
        if info.hash_domain is not None:
            hasher = BlockHasher(info.block_size, domain=info.hash_domain, key=context.hash_key)
            hasher.extend(block_hashes, prompt, salt=fields.cache_salt)
        for own in params.for_choices():
            index = len(choices)
            request = EngineRequest(
                request_id=f"{response_id}-{index}",
                prompt_token_ids=prompt,
                params=own,
                priority=fields.priority,
                cache_salt=fields.cache_salt,
                block_hashes=block_hashes,
            )
            choices.append(
                Choice(
                    request,
                    context.tokenizer,
                    index=index,
                    prompt_index=prompt_index,
                    every_token=fields.return_token_ids,
                )
            )
    return choices


def checked_max_tokens(info: EngineInfo, prompts: Sequence[list[int]], max_tokens: int | None, *, param: str) -> int:
    """The output limit, by default what fits. Raises ContextLengthExceeded with the limit and the counts.

    A prompt without an explicit limit needs room for one token. With several prompts the longest decides.
    """
    num_prompt_tokens, limit = max(map(len, prompts)), info.max_model_len
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + wanted > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. The request has {num_prompt_tokens} prompt tokens "
            f"and asks for {wanted} output tokens ({num_prompt_tokens + wanted} in all). Shorten the prompt or lower "
            "max_tokens.",
            param=param,
        )
    return limit - num_prompt_tokens if max_tokens is None else max_tokens
