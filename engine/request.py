"""What a request is, from the API to the scheduler: parameters, messages, status. Torch-free; knows no scheduler.

The msgspec structs here also travel over the channel as they are.
"""

from __future__ import annotations

import enum
import math
import secrets
from typing import Annotated

import msgspec

from .errors import InvalidRequest
from .kv_transfer.messages import SendKv, TakeKv

MAX_LOGPROBS = 20
"""Most alternatives that `logprobs` and `prompt_logprobs` may ask for (OpenAI's limit for chat)."""


class FinishReason(enum.StrEnum):
    """Why a request ended. The first two are OpenAI's `finish_reason` values."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """Waits again, its blocks given to others; its tokens are recomputed when it runs."""
    FINISHED = enum.auto()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when generation ends. Names and meanings follow OpenAI and vLLM.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch a filter off. `top_p` 0 keeps the most
    likely token only. `logprobs` asks for the chosen token's log-probability plus that many alternatives (0: chosen
    token only), from the model's own distribution before penalties and temperature. `max_tokens` None means: as far
    as the context goes.

    Raises InvalidRequest, naming the field, at construction. What depends on the model (token ids below its
    vocabulary size) is checked by `check_vocab`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif not isinstance(self.stop, tuple):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop or ()))
        if not isinstance(self.stop_token_ids, tuple):
            msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check_number("n", self.n, low=1, high=128, integer=True)
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        _check_number("top_k", self.top_k, low=-1, integer=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, exclusive=True)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("min_tokens", self.min_tokens, low=0, integer=True)
        if self.seed is not None:
            _check_number("seed", self.seed, low=-(2**63), high=2**64 - 1, integer=True)
        if self.max_tokens is not None:
            _check_number("max_tokens", self.max_tokens, low=0, integer=True)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value, low=0, high=MAX_LOGPROBS, integer=True)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest("stop must hold non-empty strings.", param="stop")
        for token_id, bias in (self.logit_bias or {}).items():
            if not isinstance(token_id, int) or token_id < 0:
                raise InvalidRequest(f"logit_bias: {token_id!r} is not a token id.", param="logit_bias")
            _check_number("logit_bias", bias, low=-100.0, high=100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def for_choices(self) -> list[SamplingParams]:
        """Parameters of each of the `n` answers. Their seeds differ, and the same seed gives the same answers again;
        without one they are random, but set, so that an answer can go on elsewhere."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [msgspec.structs.replace(self, n=1, seed=(seed + index) % 2**63) for index in range(self.n)]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id is not below `vocab_size`."""
        for token_id in self.logit_bias or ():
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"logit_bias: token id {token_id} is not in the vocabulary (size {vocab_size}).", param="logit_bias"
                )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids: {token_id} is not in the vocabulary (size {vocab_size}).", param="stop_token_ids"
                )


def _check_number(
    name: str,
    value: object,
    *,
    low: float,
    high: float = math.inf,
    exclusive: bool = False,
    integer: bool = False,
) -> None:
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise InvalidRequest(f"{name} must be {kind}, not {value!r}.", param=name)
    if not integer and not math.isfinite(value):  # type: ignore[arg-type]
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}.", param=name)
    if value < low or value > high or (exclusive and value == low):  # type: ignore[operator]
        bounds = f"above {low:g}" if exclusive else f"at least {low:g}"
        bounds += "" if high == math.inf else f" and at most {high:g}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value!r}.", param=name)


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate, as it is submitted to an engine core (n > 1 is fanned out by the submitter).

    `params.seed` and `params.max_tokens` are set by the submitter (a random seed when the user gave none), so that
    the same request continues identically elsewhere. `output_token_ids` are tokens generated before, by another
    engine: generation continues after them.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = []
    priority: int = 0
    """Lower runs first; equal ones by arrival."""
    cache_salt: str | None = None
    block_hashes: list[bytes] = []
    """Hashes of the prompt's full blocks, where the submitter has them: the engine then need not compute them."""
    handoff: SendKv | TakeKv | None = None
    """The KV of all tokens goes to another engine (which decodes), or comes from one (which has prefilled)."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probability of one token and the most likely alternatives at its position, best first."""

    token_id: int
    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step adds to one request.

    `logprobs` has one entry per token in `token_ids` when asked for. `prompt_logprobs` (one entry per prompt token,
    the first None) and `num_cached_tokens` come with the first delta. After `finish_reason` nothing follows.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The EOS or stop token that ended the request; it is the last of `token_ids`."""
    error: str | None = None


class RefusalReason(enum.StrEnum):
    OVERLOADED = "overloaded"
    """The queue is full; the same request may be sent again later."""
    INVALID = "invalid"
    TOO_LONG = "too_long"
    """Can never fit into this engine."""
    DRAINING = "draining"


class Refusal(msgspec.Struct, kw_only=True, frozen=True):
    """A request that an engine does not take, and why."""

    request_id: str
    reason: RefusalReason
    message: str
    retry_after_s: float = 1.0


RESUME_VERSION = 1


class ResumeState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All that a stream needs to go on elsewhere: `submission` is what the next engine gets.

    Its continuation equals what the engine before would have generated: draws depend on the seed and a token's
    position, penalties and lengths on the prompt and the tokens so far, and all of these are in the request. What the
    client has seen of the tokens (text, stop strings, log-probabilities) stays with whoever shows them.

    `version` changes when a field changes its meaning. Raises InvalidRequest for one that is not known here.
    """

    request: EngineRequest
    """Its `output_token_ids` grow with every delta that was received."""
    version: Annotated[int, msgspec.Meta(ge=1)] = RESUME_VERSION
    has_begun: bool = False
    """Whether a delta was received: its first facts (cached tokens, prompt log-probabilities) count for good."""
    num_cached_tokens: int = 0
    num_submissions: int = 0
    num_failures_without_progress: int = 0

    def __post_init__(self) -> None:
        if self.version != RESUME_VERSION:
            raise InvalidRequest(
                f"A stream's state has version {self.version}, but version {RESUME_VERSION} is known here: run the "
                "same version of Manta everywhere."
            )

    def submission(self) -> EngineRequest:
        """What to send to an engine now: the request with all tokens so far, under an id of its own each time."""
        request, params = self.request, self.request.params
        if self.has_begun and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        suffix = f".{self.num_submissions}" if self.num_submissions else ""
        self.num_submissions += 1
        return msgspec.structs.replace(
            request,
            request_id=request.request_id + suffix,
            params=params,
            output_token_ids=list(request.output_token_ids),
        )

    def add(self, delta: RequestDelta) -> None:
        """Record what was received, and make of it the next delta of one stream, whatever engine it comes from."""
        delta.request_id = self.request.request_id
        if self.has_begun:
            delta.num_cached_tokens = delta.prompt_logprobs = None
        else:
            self.has_begun = True
            self.num_cached_tokens = delta.num_cached_tokens or 0
        if delta.token_ids:
            self.request.output_token_ids.extend(delta.token_ids)
            self.num_failures_without_progress = 0
