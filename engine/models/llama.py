"""Llama and those that share its decoder to the last detail, Mistral without a sliding window among them."""

from __future__ import annotations

from .family import Family

LLAMA = Family(
    hugging_face={
        "embedding": "model.embed_tokens",
        "head": "lm_head",
        "final_norm": "model.norm",
        "input_norm": "model.layers.{layer}.input_layernorm",
        "q": "model.layers.{layer}.self_attn.q_proj",
        "k": "model.layers.{layer}.self_attn.k_proj",
        "v": "model.layers.{layer}.self_attn.v_proj",
        "output": "model.layers.{layer}.self_attn.o_proj",
        "post_norm": "model.layers.{layer}.post_attention_layernorm",
        "gate": "model.layers.{layer}.mlp.gate_proj",
        "up": "model.layers.{layer}.mlp.up_proj",
        "down": "model.layers.{layer}.mlp.down_proj",
    },
    gguf={
        "embedding": "token_embd",
        "head": "output",
        "final_norm": "output_norm",
        "input_norm": "blk.{layer}.attn_norm",
        "q": "blk.{layer}.attn_q",
        "k": "blk.{layer}.attn_k",
        "v": "blk.{layer}.attn_v",
        "output": "blk.{layer}.attn_output",
        "post_norm": "blk.{layer}.ffn_norm",
        "gate": "blk.{layer}.ffn_gate",
        "up": "blk.{layer}.ffn_up",
        "down": "blk.{layer}.ffn_down",
    },
    gguf_interleaves_rotary=True,
)
