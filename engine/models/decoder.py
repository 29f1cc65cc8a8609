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
    """Attention and feed-forward, each behind a norm."""

    input_norm: RmsNorm
    attention: Attention
    post_norm: RmsNorm
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
    ) -> None:
        """Takes the parameters over: on CPU they are packed layer by layer, and the plain ones released."""
        self.shape = shape
        self.embedding = Embedding(parameters.embedding)
        self.final_norm = RmsNorm(parameters.final_norm, shape.rms_norm_eps)
        self.head = self.embedding.as_head() if parameters.head is None else Linear(parameters.head)
        parameters.head = None
        self.head.pack()
        self.layers = [_take_layer(shape, parameters, index, workspace) for index in range(shape.num_layers)]
        self.cos_sin = build_cos_sin(shape.rope, shape.head_dim, max_position, parameters.embedding.device)

    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the final norm, from `token_ids` [tokens] int64."""
        residual = self.embedding(token_ids)
        branch = None
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer.input_norm(residual) if branch is None else layer.input_norm(branch, residual)
            hidden = layer.attention(hidden, batch, cache, self.cos_sin)
            branch = layer.mlp(layer.post_norm(hidden, residual))
        assert branch is not None, "a decoder has at least one layer"
        return self.final_norm(branch, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] in the model's dtype, a fresh tensor."""
        return self.head(hidden)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights as they are held now (a tied head counts once, unless it was packed)."""
        tensors = [self.embedding.weight, self.final_norm.weight]
        linears = [] if self.head.weight is self.embedding.weight else [self.head]
        for layer in self.layers:
            tensors += [layer.input_norm.weight, layer.post_norm.weight]
            linears += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
        plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return plain + sum(linear.num_bytes for linear in linears)


def _take_layer(
    shape: ModelShape, parameters: Parameters, index: int, workspace: DecodeWorkspace | None
) -> DecoderLayer:
    weights = parameters.take_layer(index)
    attention = Attention(
        Linear(weights.qkv, weights.qkv_bias),
        Linear(weights.output, weights.output_bias),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        workspace=workspace,
    )
    mlp = GatedMlp(Linear(weights.gate_up, weights.gate_up_bias), Linear(weights.down, weights.down_bias))
    for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
        linear.pack()
    return DecoderLayer(
        RmsNorm(weights.input_norm, shape.rms_norm_eps),
        attention,
        RmsNorm(weights.post_norm, shape.rms_norm_eps),
        mlp,
    )
