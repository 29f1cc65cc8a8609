"""Tokenizers for tests: folders unpacked from tests/data/tokenizers, and the same vocabulary as GGUF metadata."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

from manta.engine.model_source import ModelSource
from manta.engine.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def unpacked(name: str, folder: Path) -> Path:
    """`folder`, with the tokenizer's files in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (DATA / name).iterdir():
        if file.suffix == ".xz":
            (folder / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        elif file.name != "golden_encodings.json":
            shutil.copyfile(file, folder / file.name)
    return folder


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name / "golden_encodings.json").read_text())


def load(folder: Path, **options: Any) -> Tokenizer:
    return Tokenizer.load(ModelSource("test", "dummy", folder, folder), **options)


def write_json(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def gguf_metadata(name: str, pre: str, **extra: Any) -> dict[str, Any]:
    """What a GGUF file would say of a byte-level tokenizer."""
    content = json.loads(lzma.decompress((DATA / name / "tokenizer.json.xz").read_bytes()))
    vocab: dict[str, int] = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content["added_tokens"]}}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    types = [1] * len(tokens)
    for token in content["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
