"""One decoder layer on whole texts, in fp32 and without a cache, and what its products are given on the way.

Knows a layer as plain tensors by part ("q", "gate", "input_norm" ...); no file, no scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from manta.engine.model_shape import ModelShape
from manta.engine.models.family import Parameter
from manta.kernels.rmsnorm import rms_norm_reference
from manta.kernels.rope import rope_reference

LayerTensors = dict[tuple[str, str], torch.Tensor]
"""(part, "weight" or "bias") -> tensor, fp32."""

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""Products that are given the same input, in the order in which they run."""


@dataclass
class InputStats:
    """Sums over all tokens of what a group of products is given."""

    second_moments: torch.Tensor
    """[in, in]: X^T R X, half the Hessian of the squared error of an output; R has each token's importance."""
    sum_abs: torch.Tensor
    max_abs: torch.Tensor
    num_tokens: int = 0

    @classmethod
    def empty(cls, num_columns: int) -> InputStats:
        return cls(torch.zeros(num_columns, num_columns), torch.zeros(num_columns), torch.zeros(num_columns))

    def add(self, x: torch.Tensor, importance: torch.Tensor) -> None:
        """`x` [tokens, in], `importance` [tokens]."""
        self.second_moments.addmm_(x.t() * importance, x)
        magnitudes = x.abs()
        self.sum_abs += magnitudes.sum(0)
        torch.maximum(self.max_abs, magnitudes.amax(0), out=self.max_abs)
        self.num_tokens += x.shape[0]


Watch = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Told a group's name, its input [tokens, in] and how much each token matters [tokens]: for qkv by the attention that
other tokens pay to it, else alike."""


def run_layer(
    tensors: Mapping[tuple[str, str], torch.Tensor],
    hidden: torch.Tensor,
    shape: ModelShape,
    cos_sin: torch.Tensor,
    watch: Watch | None = None,
) -> torch.Tensor:
    """The residual stream [tokens, hidden] behind the layer, for that of one text before it."""

    def product(part: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, tensors[part, "weight"], tensors.get((part, "bias")))

    def norm(part: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, tensors[part, "weight"], shape.rms_norm_eps)

    num_tokens = hidden.shape[0]
    alike = torch.ones(num_tokens)
    x = norm("input_norm", hidden)
    q, k, v = (product(part, x).view(num_tokens, -1, shape.head_dim) for part in "qkv")
    if shape.qk_norm:
        q = norm("q_norm", q.reshape(-1, shape.head_dim)).view(q.shape)
        k = norm("k_norm", k.reshape(-1, shape.head_dim)).view(k.shape)
    rope_reference(q, k, torch.arange(num_tokens), cos_sin)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True)
    attended = attended[0].transpose(0, 1).reshape(num_tokens, -1)
    if watch is not None:
        watch("qkv", x, 1.0 + attention_received(heads[0][0], heads[1][0]))
        watch("output", attended, alike)
    hidden = hidden + product("output", attended)
    x = norm("post_norm", hidden)
    if watch is not None:
        watch("gate_up", x, alike)
    x = functional.silu(product("gate", x)) * product("up", x)
    if watch is not None:
        watch("down", x, alike)
    return hidden + product("down", x)


def attention_received(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[tokens]: what all tokens together pay to each, the mean over heads, of `q` [heads, tokens, dim] and `k` [KV
    heads, tokens, dim]; their sum is the number of tokens.

    A text's first token gets most of it and is unlike all others: where its key counts as little as any other token's,
    roundings that are made for the many destroy it (importance of tokens as in RSQ, https://arxiv.org/abs/2503.01820).
    """
    num_heads, num_tokens, head_dim = q.shape
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    received = torch.zeros(num_tokens)
    for head in range(num_heads):
        scores = q[head] @ k[head * k.shape[0] // num_heads].t() / head_dim**0.5
        received += scores.masked_fill(is_later, float("-inf")).softmax(-1).sum(0)
    return received / num_heads


def layer_parameters(shape: ModelShape, index: int) -> list[Parameter]:
    """All tensors of a layer."""
    found = [Parameter(part, index, "weight") for part in ("input_norm", "post_norm")]
    if shape.qk_norm:
        found += [Parameter(part, index, "weight") for part in ("q_norm", "k_norm")]
    has_bias = {
        **dict.fromkeys("qkv", shape.attention_bias),
        "output": shape.output_bias,
        **dict.fromkeys(("gate", "up", "down"), shape.mlp_bias),
    }
    for parts in GROUPS.values():
        for part in parts:
            found.append(Parameter(part, index, "weight"))
            if has_bias[part]:
                found.append(Parameter(part, index, "bias"))
    return found
