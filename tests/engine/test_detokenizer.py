"""A stream's pieces join to the whole text, whatever the tokens, their grouping and the stop strings (P01, P02)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.engine.detokenizer import TextStream
from manta.engine.request import SamplingParams


class Speller:
    """Token i is `tokens[i]`; those in `special` are special."""

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self._tokens, self._special = tokens, special

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def stream(tokens: Sequence[bytes], special: frozenset[int] = frozenset(), **params) -> TextStream:
    return TextStream(Speller(tokens, special), SamplingParams(**params))


def whole(tokens: Sequence[bytes], **params) -> str:
    text = stream(tokens, **params)
    return text.push(range(len(tokens))) + text.finish()


def best_match(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the earliest start, then the earliest end."""
    found = [(text.index(stop), text.index(stop) + len(stop)) for stop in stops if stop in text]
    return min(found, default=None)


CHARACTERS = "ab é聪🚀\ufffd"
chopped = st.one_of(
    st.lists(st.binary(max_size=5), max_size=12),
    st.text(alphabet=CHARACTERS, max_size=12).flatmap(
        lambda text: st.lists(st.integers(0, len(text.encode())), max_size=8).map(
            lambda cuts: [
                text.encode()[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(text.encode())], strict=True)
            ]
        )
    ),
)
stop_strings = st.lists(st.text(alphabet="ab é🚀\ufffd", min_size=1, max_size=5), max_size=4)


@given(chopped)
def test_text_is_that_of_the_joined_bytes(tokens: list[bytes]):
    assert whole(tokens) == b"".join(tokens).decode("utf-8", "replace")


@given(chopped, stop_strings, st.booleans(), st.data())
def test_grouping_of_tokens_changes_nothing(tokens: list[bytes], stops: list[str], include: bool, data: st.DataObject):
    full = b"".join(tokens).decode("utf-8", "replace")
    match = best_match(full, stops)
    want = full if match is None else full[: match[1] if include else match[0]]
    text, at, given_out = stream(tokens, stop=tuple(stops), include_stop_str_in_output=include), 0, ""
    while at < len(tokens) and text.stopped_by is None:
        step = data.draw(st.integers(1, len(tokens) - at))
        given_out += text.push(range(at, at + step))
        assert want.startswith(given_out), "a part of the stop string leaked"
        at += step
    given_out += text.finish()
    assert given_out == want
    assert text.stopped_by == (None if match is None else full[match[0] : match[1]])
    if match is not None:
        # The last token that was needed: without it the match is not complete.
        used = text.num_tokens_used
        before = [whole(tokens[:count], stop=()) for count in (used - 1, used)]
        assert len(before[0].rstrip("\ufffd")) < match[1] <= max(len(before[1]), len(full))
    assert text.push(range(len(tokens))) == ""
    assert text.finish() == ""


@given(chopped, stop_strings)
def test_only_what_may_become_a_stop_is_held_back(tokens: list[bytes], stops: list[str]):
    text, given_out = stream(tokens, stop=tuple(stops)), ""
    for index in range(len(tokens)):
        given_out += text.push([index])
        if text.stopped_by is not None:
            return
        # What is complete so far: a cut character at the end is not.
        complete = b"".join(tokens[: index + 1])
        for cut in range(4):
            head = complete[: len(complete) - cut]
            try:
                tail_is_cut = cut == 0 or complete[len(head) :].decode() is None
            except UnicodeDecodeError as error:
                tail_is_cut = error.reason == "unexpected end of data" and error.start == 0
            if tail_is_cut:
                seen = head.decode("utf-8", "replace")
        if best_match(seen, stops) is None:
            held = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
            assert given_out == seen[: len(seen) - held]


def test_a_character_arrives_with_its_last_byte():
    rocket = "🚀".encode()
    text = stream([b"a", rocket[:1], rocket[1:3], rocket[3:] + b"b", rocket[:2]])
    assert [text.push([index]) for index in range(5)] == ["a", "", "", "🚀b", ""]
    assert text.finish() == "\ufffd"
    assert text.finish() == ""


def test_special_tokens_are_skipped_on_request():
    tokens, special = [b"a", b"<end>", b"b"], frozenset({1})
    assert stream(tokens, special).push([0, 1, 2]) == "ab"
    assert stream(tokens, special, skip_special_tokens=False).push([0, 1, 2]) == "a<end>b"
    counted = stream(tokens, special)
    counted.push([0, 1, 2])
    assert counted.num_tokens_used == 3


def test_a_stop_across_tokens_never_leaks():
    text = stream([b"one", b" two", b", th", b"ree", b" four"], stop=(", three",))
    assert [text.push([index]) for index in range(5)] == ["one", " two", "", "", ""]
    assert (text.stopped_by, text.num_tokens_used) == (", three", 4)


def test_every_stop_cut_from_a_text_ends_it_there():
    full = "one, two, three, four, five, six: naïve 🚀 end"
    raw = full.encode()
    tokens = [raw[i : i + 3] for i in range(0, len(raw), 3)]
    for start in range(len(full)):
        for length in (1, 2, 7, 16):
            stop = full[start : start + length]
            where = full.index(stop)
            assert whole(tokens, stop=(stop, "\u0007never")) == full[:where]
            assert whole(tokens, stop=(stop,), include_stop_str_in_output=True) == full[: where + len(stop)]


def test_held_text_is_given_out_as_soon_as_it_cannot_be_a_stop():
    text = stream([b"aab", b"aa", b"c"], stop=("aabaad",))
    assert [text.push([index]) for index in range(3)] == ["", "", "aabaac"]


def test_the_earliest_start_wins_even_when_it_ends_later():
    tokens = [b"x", b"ab", b"cd", b"ef", b"g"]
    text = stream(tokens, stop=("cd", "abcdef"))
    assert "".join(text.push([index]) for index in range(5)) == "x"
    assert (text.stopped_by, text.num_tokens_used) == ("abcdef", 4)


def test_a_match_that_waited_in_vain_counts_from_its_own_token():
    text = stream([b"x", b"abcd", b"e", b"z", b"y"], stop=("cd", "abcdef"))
    assert "".join(text.push([index]) for index in range(5)) == "xab"
    assert (text.stopped_by, text.num_tokens_used) == ("cd", 2)
    ended = stream([b"x", b"abcd", b"e"], stop=("cd", "abcdef"))
    assert ended.push(range(3)) == "x"
    assert ended.stopped_by is None
    assert ended.finish() == "ab"
    assert (ended.stopped_by, ended.num_tokens_used) == ("cd", 2)


def test_of_stops_that_start_together_the_first_complete_one_wins():
    assert stream([b"abc"], stop=("abc", "ab")).push([0]) == ""
    text = stream([b"abc"], stop=("abc", "ab"), include_stop_str_in_output=True)
    assert (text.push([0]), text.stopped_by) == ("ab", "ab")


def test_a_stop_counts_only_after_min_tokens():
    tokens = [b"a", b".", b"b", b".", b"c"]
    text = stream(tokens, stop=(".",), min_tokens=2)
    assert text.push(range(5)) == "a.b"
    assert text.num_tokens_used == 4


@pytest.mark.parametrize("stops", [(), ("never" * 400, "aaab")], ids=["no stops", "long stops"])
def test_cost_grows_with_the_length_only(stops: tuple[str, ...]):
    def seconds(num_tokens: int) -> float:
        text, best_s = None, float("inf")
        for _ in range(3):
            text = stream([b"aaa"], stop=stops)
            start_s = time.process_time()
            for _ in range(num_tokens):
                text.push([0])
            best_s = min(best_s, time.process_time() - start_s)
        return best_s

    assert seconds(16_000) < 40 * max(seconds(2_000), 1e-4)  # 8 when linear, 64 when quadratic
