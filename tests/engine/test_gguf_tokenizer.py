"""Tokenizers from GGUF metadata give the ids of the models' own tokenizers, and refuse what they cannot reproduce."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from manta.engine.errors import CheckpointError
from manta.engine.gguf_file import read_gguf_header
from manta.engine.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer, merges_from_scores
from manta.engine.model_source import ModelSource
from manta.engine.tokenizer import Tokenizer
from tests.engine.tokenizer_files import gguf_metadata, golden

FILE = Path("model.gguf")


@pytest.mark.parametrize(("name", "pre"), [("smollm2", "smollm"), ("qwen3", "qwen2")])
def test_ids_are_those_of_the_models_own_tokenizer(name: str, pre: str):
    metadata = gguf_metadata(name, pre)
    start_s = time.perf_counter()
    backend = build_gguf_tokenizer(metadata, FILE)
    assert time.perf_counter() - start_s < 5
    cases = golden(name)
    assert len(cases) > 10
    for case in cases:
        assert backend.encode(case["text"]).ids == case["ids_with_special"], case["text"]
        assert backend.encode(case["text"], add_special_tokens=False).ids == case["ids"], case["text"]
        assert backend.decode(case["ids"], skip_special_tokens=False) == case["decoded"]


def test_qwen_text_is_composed_first():
    backend = build_gguf_tokenizer(gguf_metadata("qwen3", "qwen2"), FILE)
    assert backend.encode("cafe\u0301").ids == backend.encode("caf\u00e9").ids


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'m", "Ġ12345", "Ġok", "!!", "Ċ"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!!", "Ċ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", "Ġok", "!!Ċ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!!Ċ"]),
    ],
)
def test_pre_tokenizers_cut_words_as_they_should(pre: str, words: list[str]):
    assert [word for word, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str("I'm 12345 ok!!\n")] == words


def byte_level(**extra: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "<note>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [4]),
        ({"add_bos_token": True}, [0, 4]),
        ({"add_eos_token": True}, [4, 1]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 4, 1]),
        ({"pre": "llama-bpe"}, [0, 4]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [4]),
    ],
)
def test_bos_and_eos_follow_the_file(flags: dict[str, Any], ids: list[int]):
    backend = build_gguf_tokenizer(byte_level(**flags), FILE)
    assert backend.encode("ab").ids == ids
    assert backend.encode("ab", add_special_tokens=False).ids == [4]


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    backend = build_gguf_tokenizer(byte_level(), FILE)
    assert backend.encode("a<note><s>b").ids == [2, 5, 0, 3]
    assert backend.decode([2, 5, 0, 3], skip_special_tokens=True) == "a<note>b"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pre": "martian"}, "unknown pre-tokenizer 'martian'.*--set tokenizer=PATH"),
        ({"pre": None}, "names no pre-tokenizer"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"model": None}, "holds no tokenizer"),
        ({"merges": ["a z"]}, "contradict"),
        ({"model": "llama"}, "lacks scores"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(extra: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        build_gguf_tokenizer(byte_level(**extra), FILE)


# SentencePiece-like: pieces with scores, longer pieces of random score, and all bytes.
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "abc", "bc", "▁ab", "▁abc", "ca", "cab", "▁b", "▁c"]
SCORES = [-9.0, -9.1, -9.2, -9.3, -1.0, -3.0, -6.0, -2.0, -4.0, -7.0, -2.5, -8.0, -3.5, -5.0]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, *PIECES],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *[0.0] * 256, *SCORES],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@functools.cache
def spm(has_prefix: bool) -> Any:
    return build_gguf_tokenizer({**SPM, "tokenizer.ggml.add_space_prefix": has_prefix}, FILE)


def spm_ids(text: str) -> list[int]:
    """The definition: of all neighbours that make a piece merge the best one, the leftmost among equals."""
    symbols, score = list(text), dict(zip(PIECES, SCORES, strict=True))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids = []
    for symbol in symbols:
        known = symbol in score
        ids += [259 + PIECES.index(symbol)] if known else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text(alphabet="abc é", max_size=24))
def test_scores_become_the_merges_they_mean(text: str):
    assert spm(False).encode(text, add_special_tokens=False).ids == spm_ids(text.replace(" ", "▁"))
    if text:
        assert spm(True).encode(text, add_special_tokens=False).ids == spm_ids("▁" + text.replace(" ", "▁"))


def test_sentencepiece_adds_bos_and_comes_back():
    assert spm(True).encode("ab é").ids[0] == 1
    assert spm(True).decode(spm(True).encode("ab é").ids) == "ab é"


def test_merges_prefer_the_better_piece():
    assert merges_from_scores([("a", -9, 0), ("b", -9, 1), ("ab", -2, 2), ("ba", -1, 3)]) == [("b", "a"), ("a", "b")]


def write_gguf(file: Path) -> None:
    writer = GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "", "聪明"])
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 4])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(4, 3))
    writer.add_tensor("norm.weight", np.arange(3, dtype=np.float32) + 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    header, reader = read_gguf_header(file), GGUFReader(file)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert expected["tokenizer.ggml.tokens"] == ["<s>", "é", "", "聪明"]
    assert {t.name: (t.offset, t.shape) for t in header.tensors.values()} == {
        t.name: (t.data_offset, tuple(int(size) for size in t.shape)) for t in reader.tensors
    }
    assert header.floats("norm.weight") == [0.5, 1.5, 2.5]


def test_a_cut_or_foreign_file_is_named(tmp_path: Path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    content = file.read_bytes()
    for cut in (6, 30, 100, 200):
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf is not a whole GGUF file"):
            read_gguf_header(file)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        read_gguf_header(file)
    file.write_bytes(content[:4] + b"\x01\0\0\0" + content[8:])
    with pytest.raises(CheckpointError, match="version 1"):
        read_gguf_header(file)
    file.write_bytes(content[:-24])  # 12 bytes of norm.weight and 20 of padding end the file
    with pytest.raises(CheckpointError, match="shorter"):
        read_gguf_header(file).floats("norm.weight")


@pytest.mark.model
def test_the_demo_models_file_gives_the_golden_ids():
    from manta.engine.config import ModelConfig
    from manta.engine.model_source import resolve_model

    source = resolve_model(ModelConfig(model="smollm2-135m"))
    start_s = time.perf_counter()
    tokenizer = Tokenizer.load(source)
    assert time.perf_counter() - start_s < 3  # about 0.2 on an idle core
    for case in golden("smollm2"):
        assert tokenizer.encode(case["text"]) == case["ids_with_special"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert tokenizer.eos_token_ids == (2,)
    assert (tokenizer.bos_token_id, tokenizer.vocab_size) == (1, 49152)
    assert isinstance(source, ModelSource)
