"""Models' shapes that tests of several parts use."""

from __future__ import annotations

from manta.engine.model_shape import ModelShape

LLAMA_8B = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
)
