"""What makes a folder of safetensors a model: index, config.json and tokenizer, from a folder or from GGUF metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from manta.engine.checkpoint_config import read_json
from manta.engine.gguf_file import read_gguf_header
from manta.engine.gguf_tokenizer import build_gguf_tokenizer
from manta.engine.model_shape import ModelShape, RopeScaling
from manta.engine.model_source import ModelSource

_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja", "vocab.*", "merges.txt")


def write_model_folder(
    source: ModelSource, shape: ModelShape, output: Path, files: Sequence[str], quantization: dict[str, Any]
) -> None:
    """`files` in `output` hold the tensors."""
    weight_map: dict[str, str] = {}
    for file in files:
        with safe_open(output / file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), file)
    total = sum((output / file).stat().st_size for file in files)
    _write(output / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    if source.kind == "gguf":
        config = _config_of(shape)
        _write_gguf_tokenizer(source.path, output)
    else:
        config = read_json(source.config_file)
        for pattern in _COPIED:
            for file in sorted(source.config_file.parent.glob(pattern)):
                shutil.copyfile(file, output / file.name)
    _write(output / "config.json", {**config, "quantization_config": quantization})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _config_of(shape: ModelShape) -> dict[str, Any]:
    """config.json of a Llama that came as GGUF."""
    return {
        "architectures": [shape.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "rope_scaling": _scaling_of(shape.rope),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "torch_dtype": shape.dtype,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids),
    }


def _scaling_of(rope: RopeScaling) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    names += ("attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor")
    found = {name: value for name in names if (value := getattr(rope, name)) is not None}
    if rope.original_max_position is not None:
        found["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_type": rope.kind, **found}


def _write_gguf_tokenizer(file: Path, output: Path) -> None:
    metadata = read_gguf_header(file).metadata
    build_gguf_tokenizer(metadata, file).save(str(output / "tokenizer.json"))
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("unk_token", "unknown_token_id")):
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and token_id < len(tokens):
            config[name] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _write(output / "tokenizer_config.json", config)
