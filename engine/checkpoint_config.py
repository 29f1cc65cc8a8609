"""ModelShape from a Hugging Face config.json or from GGUF metadata: the Llama family. Reads no weights.

An architecture or a rope type that the engine would compute wrongly is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from .errors import CheckpointError
from .gguf_file import GgufHeader
from .model_shape import ModelShape, RopeScaling, RopeType

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
"""Of config.json: decoders with RMSNorm, rotary embedding, grouped-query attention and SwiGLU."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_GGUF_DTYPES = {0: "float32", 1: "float16"}
_LLAMA3_ORIGINAL_CONTEXT = 8192


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file, {} where there is no file. Raises CheckpointError for anything else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return content


def token_ids(value: object) -> tuple[int, ...]:
    """Ids that a config gives as a number, as a list or not at all."""
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends an answer: ids of config.json and of the generation_config.json beside it."""
    generation = read_json(folder / "generation_config.json")
    ids = (*token_ids(config.get("eos_token_id")), *token_ids(generation.get("eos_token_id")))
    return tuple(dict.fromkeys(ids))


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends an answer: end of text, of turn and of message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for name in names for i in token_ids(metadata.get(f"tokenizer.ggml.{name}"))))


def shape_from_config(file: Path) -> ModelShape:
    """Raises CheckpointError naming the file and the missing or unsupported entry."""
    config = read_json(file)
    if not config:
        raise CheckpointError(f"{file} is missing or empty")
    architecture = _architecture(file, config)
    num_heads, hidden_size = _size(file, config, "num_attention_heads"), _size(file, config, "hidden_size")
    if not config.get("head_dim") and hidden_size % num_heads:
        raise CheckpointError(f"{file}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    max_position = _size(file, config, "max_position_embeddings")
    window = config.get("sliding_window")
    if architecture == "MistralForCausalLM" and isinstance(window, int):
        max_position = min(max_position, window)  # up to its window, sliding attention is full attention
    if config.get("use_sliding_window"):
        raise CheckpointError(f"{file}: use_sliding_window is not supported")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{file}: hidden_act {act!r} is not supported (silu is)")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelShape(
        architecture=architecture,
        num_layers=_size(file, config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=_size(file, config, "intermediate_size"),
        vocab_size=_size(file, config, "vocab_size"),
        max_position_embeddings=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(file, config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=_dtype(config),
        bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        eos_token_ids=eos_token_ids(file.parent, config),
    )


def _architecture(file: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [_MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))]
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise CheckpointError(
        f"{file}: architecture {names[0]!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def _size(file: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {name} must be a positive integer, not {value!r}")
    return value


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16", "float32") else "bfloat16"


def _rope(file: Path, config: Mapping[str, Any]) -> RopeScaling:
    """From `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise CheckpointError(f"{file}: rope type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    partial = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if kind == "default":
        return RopeScaling(theta=theta, partial_rotary_factor=partial)
    if scaling.get("factor") is None:
        raise CheckpointError(f"{file}: rope type {kind!r} needs a factor")
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind != "linear" and original is None:
        original = config.get("max_position_embeddings")
    return RopeScaling(
        theta=theta,
        kind=cast(RopeType, kind),
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=None if original is None else int(original),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        partial_rotary_factor=partial,
    )


def shape_from_gguf(header: GgufHeader) -> ModelShape:
    """Raises CheckpointError naming the file and the missing or unsupported key."""
    data, file = header.metadata, header.path
    architecture = data.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file}: GGUF architecture {architecture!r} is not supported; supported is llama")
    if data.get("split.count", 1) > 1:
        raise CheckpointError(f"{file} is one of {data['split.count']} parts: merge them into one GGUF file first")
    if data.get("llama.expert_count", 0):
        raise CheckpointError(f"{file}: mixture-of-experts models (llama.expert_count) are not supported")

    def size(name: str) -> int:
        value = data.get(f"llama.{name}")
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{file}: llama.{name} must be a positive integer, not {value!r}")
        return value

    num_heads, hidden_size = size("attention.head_count"), size("embedding_length")
    head_dim = data.get("llama.attention.key_length") or hidden_size // num_heads
    vocab_size = data.get("llama.vocab_size") or len(data.get("tokenizer.ggml.tokens", ()))
    if "token_embd.weight" in header.tensors:
        vocab_size = header.tensors["token_embd.weight"].shape[-1]
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=size("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=data.get("llama.attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        intermediate_size=size("feed_forward_length"),
        vocab_size=vocab_size,
        max_position_embeddings=size("context_length"),
        rms_norm_eps=_float32(data.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        rope=_gguf_rope(header, head_dim),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        dtype=_GGUF_DTYPES.get(data.get("general.file_type", -1), "bfloat16"),
        bos_token_id=data.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=gguf_eos_token_ids(data),
    )


def _float32(value: float) -> float:
    """The decimal number that somebody rounded to float32: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.7g}")


def _gguf_rope(header: GgufHeader, head_dim: int) -> RopeScaling:
    data, file = header.metadata, header.path
    theta = float(data.get("llama.rope.freq_base", 10_000.0))
    partial = data.get("llama.rope.dimension_count", head_dim) / head_dim
    kind = data.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        return _llama3_from_factors(header, theta, partial)
    factor = float(data.get("llama.rope.scaling.factor") or data.get("llama.rope.scale_linear") or 1.0)
    if kind == "none" and "llama.rope.scale_linear" in data:
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeScaling(theta=theta, partial_rotary_factor=partial)
    original = data.get("llama.rope.scaling.original_context_length")
    if kind == "linear":
        return RopeScaling(theta=theta, kind="linear", factor=factor, partial_rotary_factor=partial)
    if kind != "yarn":
        raise CheckpointError(f"{file}: rope scaling {kind!r} is not supported; supported are none, linear and yarn")
    strength = data.get("llama.rope.scaling.attn_factor", 1.0)
    return RopeScaling(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original or data.get("llama.context_length"),
        beta_fast=float(data.get("llama.rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(data.get("llama.rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=None if strength == 1.0 else strength * (0.1 * math.log(factor) + 1.0),
        partial_rotary_factor=partial,
    )


def _llama3_from_factors(header: GgufHeader, theta: float, partial: float) -> RopeScaling:
    """The file holds one divisor a frequency; only those of Llama 3's published parameters are recognised."""
    factors = header.floats("rope_freqs.weight")
    scaling = RopeScaling(
        theta=theta,
        kind="llama3",
        factor=round(max(factors), 3),
        original_max_position=_LLAMA3_ORIGINAL_CONTEXT,
        partial_rotary_factor=partial,
    )
    expected = llama3_factors(scaling, 2 * len(factors))
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
        raise CheckpointError(f"{header.path}: rope_freqs.weight holds factors that are not those of Llama 3")
    return scaling


def llama3_factors(scaling: RopeScaling, rotary_dim: int) -> list[float]:
    """What Llama 3 divides each frequency by: 1 for short waves, `factor` for long ones, blended between."""
    factors = []
    for index in range(rotary_dim // 2):
        wavelength = 2 * math.pi * scaling.theta ** (2 * index / rotary_dim)
        periods = (scaling.original_max_position or _LLAMA3_ORIGINAL_CONTEXT) / wavelength
        width = scaling.high_freq_factor - scaling.low_freq_factor
        blend = min(max((periods - scaling.low_freq_factor) / width, 0.0), 1.0)
        factors.append(1 / ((1 - blend) / scaling.factor + blend))
    return factors
