"""The fields of the API's requests: names, types, what is ignored and what is refused. Knows no engine.

A field is one of: known (validated strictly), harmless (OpenAI defines it, it changes nothing here: ignored), or
unsupported (it would change the answer: refused unless it asks for what happens anyway). Any other name is refused
with the nearest known one, so that a misspelt parameter is never dropped in silence. `null` means absent.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manta.engine.errors import InvalidRequest
from manta.engine.request import MAX_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16
"""OpenAI allows 4."""

Unsupported = Mapping[str, Callable[[Any], bool]]
"""Field -> whether a value asks for nothing but the default behaviour."""

_HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention",
                       "parallel_tool_calls", "prediction"})  # fmt: skip


def _never(value: Any) -> bool:
    return False


class StreamOptions(BaseModel):
    """`stream_options`; obfuscation is never added."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class Fields(BaseModel):
    """Base of all bodies: strict types, and the names that are neither known nor unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    harmless: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Unsupported] = {}


class GenerationFields(Fields):
    """What chat completions and completions have in common. Ranges are checked by SamplingParams."""

    harmless: ClassVar[frozenset[str]] = _HARMLESS

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, Any] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    deadline_s: float | None = Field(default=None, ge=0)
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """What concerns several fields. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of is supported only when it equals n.", param="best_of")
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt must not be empty.", param="cache_salt")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop holds more than {MAX_STOP_STRINGS} strings.", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(
        self,
        vocab_size: int,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The engine's parameters. Raises InvalidRequest naming the field."""
        params = SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k < vocab_size else 0,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_token_biases(self.logit_bias),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        params.check_vocab(vocab_size)
        return params


class ChatFields(GenerationFields):
    """Body of POST /v1/chat/completions. Messages are read by messages.py."""

    unsupported: ClassVar[Unsupported] = {
        "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
        "modalities": lambda value: value == ["text"],
        "functions": lambda value: value == [],
        "function_call": lambda value: value == "none",
        "audio": _never,
        "reasoning_effort": _never,
        "verbosity": _never,
        "web_search_options": _never,
        "moderation": _never,
    }

    messages: Any
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}.", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest("max_tokens and max_completion_tokens contradict each other.", param="max_tokens")
        if self.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest(
                "tool_choice may be 'auto' or 'none': this server cannot force a call.", param="tool_choice"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false: an answer is either continued or "
                "begun.",
                param="add_generation_prompt",
            )

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class CompletionFields(GenerationFields):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[Unsupported] = {"suffix": lambda value: value == ""}

    prompt: Any
    logprobs: int | None = None
    echo: bool = False


class TokenizeFields(Fields):
    """Body of POST /tokenize: a prompt, or messages as they are given to chat completions."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


F = TypeVar("F", bound=Fields)


def read_fields(kind: type[F], tree: Mapping[str, Any]) -> F:
    """`tree` as the given kind of request. Raises InvalidRequest naming the field."""
    given = {name: value for name, value in tree.items() if value is not None}
    known = kind.model_fields
    for name in [name for name in given if name not in known]:
        if name in kind.unsupported:
            if not kind.unsupported[name](given[name]):
                message = f"{name} = {_short(given[name])} is not supported by this server."
                raise InvalidRequest(message, param=name, code="unsupported_parameter")
        elif name not in kind.harmless:
            close = difflib.get_close_matches(name, [*known, *kind.unsupported], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            message = f"Unrecognized request argument: {_short(name)}.{hint}"
            raise InvalidRequest(message, param=_short(name), code="unknown_parameter")
        del given[name]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"] if str(part) not in ("str", "list[str]"))
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required.", param=param, code="missing_required_parameter")
    message = f"{param} = {_short(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}."
    return InvalidRequest(message, param=param, code="invalid_type")


def _token_biases(given: dict[str, Any] | None) -> dict[int, float] | None:
    if not given:
        return None
    biases = {}
    for text, bias in given.items():
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            message = f"logit_bias: {_short(text)} is not a token id of this model."
            raise InvalidRequest(message, param="logit_bias")
        biases[int(text)] = bias
    return biases


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
