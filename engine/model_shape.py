"""The shape of a decoder: every number that weights, cache, step time and memory follow from. Torch-free.

Built from a Hugging Face `config.json` or from GGUF metadata; knows no file formats of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """Rotary embedding, with the scaling named by `kind`.

    llama3: `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position`.
    yarn (Peng et al. 2023, https://arxiv.org/abs/2309.00071): `factor`, `original_max_position`, `beta_fast`,
    `beta_slow`, `attention_factor` (None: 0.1 ln(factor) + 1), `mscale`, `mscale_all_dim`.
    """

    theta: float = 10_000.0
    kind: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are in elements, before any split over devices."""

    architecture: str
    """A Hugging Face architecture name, such as LlamaForCausalLM."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases of the q, k and v projections, and of the output projection when `output_bias`."""
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each query and key head is normalized before it is rotated, with weights that all heads share."""
    dtype: str = "bfloat16"
    """The checkpoint's own dtype: bfloat16, float16 or float32."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Weights of embedding, layers and head (a tied head is counted once); biases left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embedding = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = self.hidden_size * (2 * self.num_layers + 1)
        return self.num_layers * (attention + mlp) + embedding + norms

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
