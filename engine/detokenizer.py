"""Text of one answer as its tokens arrive: whole characters, stop strings held back. Knows no engine and no HTTP.

The pieces that `push` and `finish` return, joined, are the whole text: streamed and unstreamed answers cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from .request import SamplingParams


class TokenSpeller(Protocol):
    """What a stream needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class TextStream:
    """One per choice. Characters are never delayed once complete, except those that may begin a stop string.

    Among several stop strings the match that starts first in the text wins, and of those that start together the one
    that ends first; so a match waits while a longer one around it is still possible. A match counts only if it begins
    after `min_tokens` tokens.
    """

    def __init__(self, tokenizer: TokenSpeller, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._cut_character = b""
        """The bytes of a character that is not complete yet."""
        self._matcher = _StopMatcher(params.stop) if params.stop else None
        self._held = ""
        """Text not given out yet: its end may become a stop string."""
        self._num_held_before = 0
        """Position of `_held` in the text, counted in characters since stop strings are watched."""
        self._is_finished = False
        self.stopped_by: str | None = None
        """The stop string that ended the answer; nothing comes after it."""
        self.num_tokens_used = 0
        """Tokens pushed; after a stop, up to and including the one that completed the match."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens in; the text that is safe to give out now. Nothing once a stop string was found."""
        pieces: list[str] = []
        for token_id in token_ids:
            if self.stopped_by is not None or self._is_finished:
                break
            self.num_tokens_used += 1
            if self._skip_special_tokens and self._tokenizer.is_special(token_id):
                continue
            text = self._decode(self._tokenizer.token_bytes(token_id))
            pieces.append(self._watch(text) if self._matcher is not None else text)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest: what was held back, and one replacement mark for a cut character. May find a stop string too."""
        if self._is_finished or self.stopped_by is not None:
            return ""
        text = self._cut_character.decode("utf-8", "replace")
        self._is_finished = True
        if self._matcher is None:
            return text
        given = self._watch(text)
        if self.stopped_by is None:
            self._matcher.give_up_waiting()
            given += self._cut() if self._matcher.match is not None else self._give(len(self._held))
        return given

    def _decode(self, spelled: bytes) -> str:
        """The characters that are complete with these bytes."""
        if self._cut_character:
            spelled = self._cut_character + spelled
        elif spelled.isascii():
            return spelled.decode("ascii")
        text, num_used = codecs.utf_8_decode(spelled, "replace", False)
        self._cut_character = spelled[num_used:]
        return text

    def _watch(self, text: str) -> str:
        assert self._matcher is not None
        if self.num_tokens_used <= self._min_tokens:
            return text
        self._held += text
        self._matcher.feed(text, self.num_tokens_used)
        if self._matcher.is_decided:
            return self._cut()
        return self._give(self._matcher.earliest_start - self._num_held_before)

    def _give(self, num_characters: int) -> str:
        given, self._held = self._held[:num_characters], self._held[num_characters:]
        self._num_held_before += len(given)
        return given

    def _cut(self) -> str:
        """The text up to the match."""
        assert self._matcher is not None
        match = self._matcher.match
        assert match is not None
        self.stopped_by, self.num_tokens_used = match.stop, match.num_tokens
        given = self._give(match.start + len(match.stop) * self._include_stop - self._num_held_before)
        self._held = ""
        return given


class _Match:
    """A stop string found at `start`, completed by the token with the number `num_tokens` (from 1)."""

    __slots__ = ("num_tokens", "start", "stop")

    def __init__(self, stop: str, start: int, num_tokens: int) -> None:
        self.stop, self.start, self.num_tokens = stop, start, num_tokens


class _StopMatcher:
    """Follows all stop strings over the text, constant time a character and stop (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)
        """How many characters of each stop the text ends with."""
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._position = 0
        self.match: _Match | None = None
        self.is_decided = False
        """Whether there is a match and none that starts earlier can come."""

    @property
    def earliest_start(self) -> int:
        """Where the earliest stop string that is found or still possible begins; the end of the text without any."""
        start = self._position - max(self._lengths)
        return start if self.match is None else min(start, self.match.start)

    def feed(self, text: str, num_tokens: int) -> None:
        """Follow the text until it is decided; `num_tokens` goes into a match that ends in it."""
        if self.match is None and not any(self._lengths) and self._first_characters.isdisjoint(text):
            self._position += len(text)
            return
        for character in text:
            self._position += 1
            for index, stop in enumerate(self._stops):
                length = self._step(index, stop, character)
                if length == len(stop):
                    start = self._position - length
                    if self.match is None or start < self.match.start:
                        self.match = _Match(stop, start, num_tokens)
                    length = self._borders[index][length]
                self._lengths[index] = length
            if self.match is not None and self._position - max(self._lengths) >= self.match.start:
                self.is_decided = True
                return

    def give_up_waiting(self) -> None:
        """The text is over: a match that waited for a longer one counts."""
        self.is_decided = self.match is not None

    def _step(self, index: int, stop: str, character: str) -> int:
        length, borders = self._lengths[index], self._borders[index]
        while length and stop[length] != character:
            length = borders[length]
        return length + 1 if stop[length] == character else 0


def _borders(stop: str) -> list[int]:
    """For each prefix length the length of the longest proper prefix of it that is also its suffix."""
    borders, length = [0, 0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
