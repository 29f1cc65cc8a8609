"""A Llama-family model in transformers, read independently of our own loader, as a yardstick. Knows no engine.

GGUF files are read with the `gguf` package, so that transformers' own way, which needs accelerate, is not needed.
"""

from __future__ import annotations

from typing import Any

import torch

from manta.engine.errors import CheckpointError
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load_hf_model(source: ModelSource, shape: ModelShape, *, dtype: str, device: str) -> Any:
    """A transformers model ready for generate. Raises CheckpointError for what it cannot be compared with."""
    import transformers

    torch_dtype = getattr(torch, dtype)
    if source.kind == "safetensors":
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(source.path), dtype=torch_dtype)
    elif source.kind == "gguf" and shape.architecture == "LlamaForCausalLM" and shape.rope.kind == "default":
        model = _from_gguf(source, shape, torch_dtype)
    else:
        raise CheckpointError(f"{source.name}: the comparison needs a checkpoint of safetensors or a Llama GGUF file")
    # As our `ignore_eos`: `min_new_tokens` would forbid the end-of-sequence token instead of going on after it.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.to(device)
    return model.eval()


def _from_gguf(source: ModelSource, shape: ModelShape, dtype: torch.dtype) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        attention_bias=shape.attention_bias,
        mlp_bias=shape.mlp_bias,
        bos_token_id=shape.bos_token_id,
        eos_token_id=list(shape.eos_token_ids),
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(dtype)
    unlike = model.load_state_dict(_gguf_state(source, shape, dtype), strict=False)
    tied = ["lm_head.weight"] if shape.tie_word_embeddings else []
    if unlike.unexpected_keys or [name for name in unlike.missing_keys if name not in tied]:
        raise CheckpointError(f"{source.name}: transformers' model has other tensors: {unlike}")
    model.tie_weights()
    return model


def _gguf_state(source: ModelSource, shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    import gguf

    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(source.path).tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).to(dtype)
        if tensor.name in _OUTER:
            state[_OUTER[tensor.name]] = weight
            continue
        _, layer, part, kind = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            weight = _without_pairs(weight, shape.num_heads if part == "attn_q" else shape.num_kv_heads)
        state[f"model.layers.{layer}.{_INNER[part]}.{kind}"] = weight
    return state


def _without_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF stores rotary dimensions as adjacent pairs (i, i + half); transformers wants the halves apart."""
    head_dim = weight.shape[0] // num_heads
    paired = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)
