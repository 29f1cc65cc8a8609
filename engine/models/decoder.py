"""A decoder-only transformer put together from layers. Knows a step as tensors: no requests, no files, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manta.engine.layers.attention import Attention, AttentionBatch, LayerCache
from manta.engine.layers.embedding import Embedding
from manta.engine.layers.linear import Linear
from manta.engine.layers.mlp import GatedMlp
from manta.engine.layers.norm import RmsNorm
from manta.engine.layers.rope import build_cos_sin
from manta.engine.model_shape import ModelShape
from manta.engine.weights.parameters import Parameters
from manta.kernels.attention_decode import DecodeWorkspace


@dataclass(frozen=True)
class DecoderLayer:
    """Both blocks add to the residual stream and normalize what they read of it."""

    attention: Attention
    mlp: GatedMlp


class Decoder:
    """Pre-norm decoder with rotary embedding, grouped-query attention and a gated feed-forward block."""

    def __init__(
        self,
        shape: ModelShape,
        parameters: Parameters,
        *,
        max_position: int,
        workspace: DecodeWorkspace | None = None,
        deterministic: bool = False,
    ) -> None:
        """Takes the parameters over: on CPU they are packed layer by layer, and the plain ones released."""
        self.shape = shape
        self.embedding = Embedding(parameters.embedding)
        self.final_norm = RmsNorm(parameters.final_norm, shape.rms_norm_eps)
        # With tied embeddings the head is the same memory until it is packed.
        head = parameters.embedding if parameters.head is None else parameters.head
        self.head = Linear(head, deterministic=deterministic)
        parameters.head = None
        self.head.pack()
        self.layers = [
            _take_layer(shape, parameters, index, workspace, deterministic) for index in range(shape.num_layers)
        ]
        self.cos_sin = build_cos_sin(shape.rope, shape.head_dim, max_position, parameters.embedding.device)

    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The residual stream [tokens, hidden] behind the last layer, from `token_ids` [tokens] int64."""
        residual = self.embedding(token_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.attention(residual, batch, cache, self.cos_sin)
            layer.mlp(residual)
        return residual

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm and the head: [rows, hidden] -> [rows, vocab] in the model's dtype, a fresh tensor."""
        return self.head.after_norm(residual, self.final_norm)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights as they are held now (a tied head counts once, unless it was packed)."""
        tensors = [self.embedding.weight, self.final_norm.weight]
        linears = [] if self.head.weight is self.embedding.weight else [self.head]
        for layer in self.layers:
            tensors += [layer.attention.norm.weight, layer.mlp.norm.weight]
            linears += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
        plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return plain + sum(linear.num_bytes for linear in linears)


def _take_layer(
    shape: ModelShape,
    parameters: Parameters,
    index: int,
    workspace: DecodeWorkspace | None,
    deterministic: bool,
) -> DecoderLayer:
    weights = parameters.take_layer(index)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        layer = Linear(weight, bias, deterministic=deterministic)
        layer.pack()
        return layer

    attention = Attention(
        RmsNorm(weights.input_norm, shape.rms_norm_eps),
        linear(weights.qkv, weights.qkv_bias),
        linear(weights.output, weights.output_bias),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        workspace=workspace,
        deterministic=deterministic,
    )
    mlp = GatedMlp(
        RmsNorm(weights.post_norm, shape.rms_norm_eps),
        linear(weights.gate_up, weights.gate_up_bias),
        linear(weights.down, weights.down_bias),
        interleaved=parameters.interleaved,
    )
    return DecoderLayer(attention, mlp)
