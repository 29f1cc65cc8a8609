"""One generated sequence at the edge: token deltas in, text pieces out. Knows no endpoint, no HTTP and no engine.

Text is held back while it may still become part of a stop string or of a character; log-probabilities wait with it.
Tokens past the one that completes a stop string appear neither in text, nor in log-probabilities, nor in usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from manta.engine.detokenizer import TextStream
from manta.engine.errors import EngineFailed
from manta.engine.request import EngineRequest, FinishReason, RequestDelta, TokenLogprobs
from manta.engine.tokenizer import Tokenizer

from .client import ChoiceRecord, RequestTerms, RouteNote


@dataclass(slots=True)
class Piece:
    """What a client gets to see next of one choice."""

    choice: Choice
    text: str
    token_ids: list[int] = field(default_factory=list)
    """Tokens since the piece before, also those whose text came earlier or is still held back."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token when asked for."""
    finish_reason: FinishReason | None = None
    """STOP or LENGTH on the last piece."""


class Choice:
    """One of a request's answers. `add` takes every delta in order; after `is_finished` no more is wanted."""

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: Tokenizer,
        *,
        index: int,
        prompt_index: int = 0,
        every_token: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.terms = RequestTerms()
        self.note = RouteNote()
        """Where it went."""
        self.index = index
        self.prompt_index = prompt_index
        self.num_tokens = 0
        """Generated tokens, up to and including the one that completed a stop string."""
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or the stop token id that ended it; None for EOS and length."""
        self._text = TextStream(tokenizer, request.params)
        self._eos_token_ids = tokenizer.eos_token_ids
        self._with_logprobs = request.params.logprobs is not None
        self._every_token = every_token
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[TokenLogprobs] = []
        self._clock = clock
        self._first_token_s: float | None = None
        self._last_token_s = 0.0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: RequestDelta) -> Piece | None:
        """Take a delta in. None when there is nothing to show yet. Raises EngineFailed when the engine gave up."""
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise EngineFailed(delta.error or "The engine ended the request before it was complete.")
        if self._first_token_s is None:
            self._take_first_facts(delta)
        token_ids = delta.token_ids
        self._last_token_s = self._clock()
        # The token that ends an answer is counted but is not part of its text.
        text = self._text.push(token_ids if delta.stop_token_id is None else token_ids[:-1])
        self._take_tokens(delta)
        if self._text.stopped_by is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._text.stopped_by
        elif delta.finish_reason is not None:
            text += self._text.finish()
            self.finish_reason = delta.finish_reason
            if self._text.stopped_by is not None:  # the match ended with the last held-back character
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._text.stopped_by
            elif delta.stop_token_id is not None and delta.stop_token_id not in self._eos_token_ids:
                self.stop_reason = delta.stop_token_id
        if not text and self.finish_reason is None and not (self._every_token and self._pending_ids):
            return None
        piece = Piece(self, text, self._pending_ids, None, self.finish_reason)
        if self._with_logprobs:
            piece.logprobs, self._pending_logprobs = self._pending_logprobs, []
        self._pending_ids = []
        return piece

    def record(self, arrival_s: float, reason: FinishReason) -> ChoiceRecord:
        """For the observer; `reason` counts when the choice did not come to its own end."""
        first_s, gaps = self._first_token_s, self.num_tokens - 1
        return ChoiceRecord(
            finish_reason=self.finish_reason or reason,
            num_completion_tokens=self.num_tokens,
            time_to_first_token_s=None if first_s is None else first_s - arrival_s,
            time_per_output_token_s=(self._last_token_s - first_s) / gaps if first_s is not None and gaps > 0 else None,
            note=self.note,
        )

    def _take_first_facts(self, delta: RequestDelta) -> None:
        if delta.token_ids:
            self._first_token_s = self._clock()
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    def _take_tokens(self, delta: RequestDelta) -> None:
        """Count the delta's tokens, those past a match excluded."""
        num_new = len(delta.token_ids)
        if self._text.stopped_by is not None:
            num_new = min(num_new, max(self._text.num_tokens_used - self.num_tokens, 0))
        self.num_tokens += num_new
        self._pending_ids.extend(delta.token_ids[:num_new])
        if self._with_logprobs:
            self._pending_logprobs.extend((delta.logprobs or ())[:num_new])
