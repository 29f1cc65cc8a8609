"""The bytes that each token stands for, by the kind of decoder its vocabulary has. Knows no texts and no streams."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """How tokens become bytes."""

    is_exact: bool
    """Whether a text is the concatenation of its tokens' bytes."""
    strips_first_space: bool
    """Whether a text loses the space before its first word."""

    def spell(self, token_id: int) -> bytes: ...


def make_spelling(backend: Backend, added: Mapping[int, str]) -> Spelling:
    """`added` are the texts of added tokens, which stand for themselves."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel(backend, added)
    if kinds == ["Metaspace"]:
        return _Pieces(backend, added, steps[0].get("replacement", "▁"), steps[0].get("prepend_scheme") != "never")
    if kinds[:1] == ["Replace"] and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        space, strip = steps[0], next((step for step in steps if step["type"] == "Strip"), {})
        space_is_plain = space.get("content") == " " and "String" in space.get("pattern", {})
        strip_is_plain = not strip or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
        if space_is_plain and strip_is_plain and kinds.count("Replace") == 1 and "ByteFallback" in kinds:
            return _Pieces(backend, added, space["pattern"]["String"], bool(strip))
    return _ByDifference(backend, added)


@functools.cache
def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters stand for themselves, the rest begins at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(others)}}


class _ByteLevel:
    """Each character of a token is a byte."""

    is_exact, strips_first_space = True, False

    def __init__(self, backend: Backend, added: Mapping[int, str]) -> None:
        self._backend, self._added = backend, added
        alphabet = byte_of_character()
        self._table = str.maketrans({character: chr(byte) for character, byte in alphabet.items()})
        self._dropped = str.maketrans(dict.fromkeys(alphabet))

    def spell(self, token_id: int) -> bytes:
        text = self._added.get(token_id)
        if text is not None:
            return text.encode("utf-8")
        token = self._backend.id_to_token(token_id) or ""
        if token.translate(self._dropped):  # a token outside the alphabet stands for itself
            return token.encode("utf-8")
        return token.translate(self._table).encode("latin-1")


class _Pieces:
    """Tokens are text in which one character stands for the space; `<0x41>` is a byte."""

    is_exact = True

    def __init__(self, backend: Backend, added: Mapping[int, str], space: str, strips_first_space: bool) -> None:
        self._backend, self._added, self._space = backend, added, space
        self.strips_first_space = strips_first_space

    def spell(self, token_id: int) -> bytes:
        text = self._added.get(token_id)
        if text is not None:
            return text.encode("utf-8")
        token = self._backend.id_to_token(token_id) or ""
        if byte := _BYTE_PIECE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace(self._space, " ").encode("utf-8")


class _ByDifference:
    """Any other decoder: what a token adds to the text of an ordinary token before it."""

    is_exact, strips_first_space = False, False

    def __init__(self, backend: Backend, added: Mapping[int, str]) -> None:
        self._backend, self._added = backend, added

    @functools.cached_property
    def _before(self) -> tuple[int, str]:
        for token_id in range(self._backend.get_vocab_size(with_added_tokens=True)):
            if token_id not in self._added and (text := self._decode([token_id])).isalpha():
                return token_id, text
        return 0, self._decode([0])

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def spell(self, token_id: int) -> bytes:
        if self._backend.id_to_token(token_id) is None:
            return b""
        before_id, before = self._before
        both: Any = self._decode([before_id, token_id])
        return (both[len(before) :] if both.startswith(before) else self._decode([token_id])).encode("utf-8")
