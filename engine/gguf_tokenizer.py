"""A tokenizer from GGUF metadata: byte-level BPE and SentencePiece-like BPE. Knows no chat templates and no streams.

Byte-level BPE needs the pre-tokenizer that `tokenizer.ggml.pre` names; only those in `PRE_TOKENIZERS` are known to
give the model's own token ids, any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from .errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Values of `tokenizer.ggml.token_type`."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _split(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt_2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": _gpt_2,
    "smollm": _single_digits,
    "llama-bpe": _split(_words(r"\p{N}{1,3}")),
    "llama3": _split(_words(r"\p{N}{1,3}")),
    "llama-v3": _split(_words(r"\p{N}{1,3}")),
    "qwen2": _split(_words(r"\p{N}")),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}
"""A word that is a token is taken whole, even where merges would not lead to it."""
_NFC = {"qwen2"}
_ADDS_BOS = {"llama-bpe", "llama3", "llama-v3"}
"""Where the file does not say whether text begins with BOS."""


def build_gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Backend:
    """`path` is for messages. Raises CheckpointError for a tokenizer that could not be reproduced exactly."""
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or model is None:
        raise CheckpointError(f"{path} holds no tokenizer: name one with `--set tokenizer=PATH`")
    if model == "gpt2":
        backend, adds_bos = _byte_level(metadata, path)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(metadata, path)
    else:
        raise CheckpointError(
            f"{path}: tokenizer model {model!r} is not supported (gpt2 and llama are): give the folder of the "
            "model's tokenizer.json with `--set tokenizer=PATH`"
        )
    _add_special_tokens(backend, metadata)
    _add_bos_and_eos(backend, metadata, adds_bos=adds_bos)
    return backend


def _byte_level(metadata: Mapping[str, Any], path: Path) -> tuple[Backend, bool]:
    pre: str | None = metadata.get("tokenizer.ggml.pre")
    if pre is None or pre not in PRE_TOKENIZERS:
        what = "names no pre-tokenizer" if pre is None else f"has the unknown pre-tokenizer {pre!r}"
        raise CheckpointError(
            f"{path} {what}, so its token ids cannot be trusted (known: {', '.join(PRE_TOKENIZERS)}): give the folder "
            "of the model's tokenizer.json with `--set tokenizer=PATH`"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())]
    backend = Backend(_bpe(path, vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _ADDS_BOS


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> tuple[Backend, bool]:
    """BPE whose merges follow from the pieces' scores, with bytes for what no piece spells."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores, types = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.token_type")
    if scores is None or types is None or len(scores) != len(tokens) or len(types) != len(tokens):
        raise CheckpointError(f"{path}: the tokenizer lacks scores or token types: use `--set tokenizer=PATH`")
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = [index for index, kind in enumerate(types) if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)]
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    backend = Backend(
        _bpe(
            path,
            vocab=vocab,
            merges=merges_from_scores([(tokens[index], scores[index], index) for index in pieces]),
            byte_fallback=_BYTE in types,
            fuse_unk=True,
            unk_token=unknown,
        )
    )
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend, True


def merges_from_scores(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Every split of a piece (text, score, id) into two pieces; of two possible merges the better piece comes first."""
    ids = {text: index for text, _, index in pieces}
    merges = []
    for text, score, _ in pieces:
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-score, left, right, text[:cut], text[cut:]))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _bpe(path: Path, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # the library raises bare exceptions for merges that name no token
        raise CheckpointError(f"{path}: the tokenizer's merges and tokens contradict each other ({error})") from None


def _add_special_tokens(backend: Backend, metadata: Mapping[str, Any]) -> None:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and token:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_bos_and_eos(backend: Backend, metadata: Mapping[str, Any], *, adds_bos: bool) -> None:
    begins = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos = metadata.get("tokenizer.ggml.bos_token_id") if begins else None
    eos = metadata.get("tokenizer.ggml.eos_token_id") if ends else None
    tokens = {token_id: backend.id_to_token(token_id) for token_id in (bos, eos) if token_id is not None}
    single = [*([tokens[bos]] if bos is not None else []), "$A", *([tokens[eos]] if eos is not None else [])]
    special_tokens = [(token, token_id) for token_id, token in tokens.items()]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
