"""Qwen3's dense models: Llama's decoder with a norm of each query and key head."""

from __future__ import annotations

from .family import Family
from .llama import LLAMA

QWEN3 = Family(
    hugging_face={
        **LLAMA.hugging_face,
        "q_norm": "model.layers.{layer}.self_attn.q_norm",
        "k_norm": "model.layers.{layer}.self_attn.k_norm",
    },
    gguf={**LLAMA.gguf, "q_norm": "blk.{layer}.attn_q_norm", "k_norm": "blk.{layer}.attn_k_norm"},
)
