"""A decoder's parameters as fused tensors, and which slice of them each tensor of a checkpoint fills.

qkv = [q; k; v] and gate_up = [gate; up], rows stacked; on CUDA gate_up holds the rows of gate and up in turns, so that
one tile of a product has both. Knows no file format and no tensor names but our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.engine.model_shape import ModelShape
from manta.engine.models.family import Parameter


@dataclass(frozen=True)
class LayerParameters:
    """One layer. Weights [out, in], biases [out]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass
class Parameters:
    """All of them. `head` is None when the embeddings are tied."""

    embedding: torch.Tensor
    head: torch.Tensor | None
    final_norm: torch.Tensor
    layers: list[LayerParameters | None]
    interleaved: bool
    """Whether gate_up holds row i of gate at 2 i and of up at 2 i + 1."""

    def take_layer(self, index: int) -> LayerParameters:
        """Hand a layer over; it is no longer held here. Once a layer."""
        layer, self.layers[index] = self.layers[index], None
        assert layer is not None, f"layer {index} was taken before"
        return layer


def allocate_parameters(shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Uninitialised."""

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    hidden, inter = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layers: list[LayerParameters | None] = [
        LayerParameters(
            input_norm=empty(hidden),
            qkv=empty(q_size + 2 * kv_size, hidden),
            output=empty(hidden, q_size),
            post_norm=empty(hidden),
            gate_up=empty(2 * inter, hidden),
            down=empty(hidden, inter),
            qkv_bias=empty(q_size + 2 * kv_size) if shape.attention_bias else None,
            output_bias=empty(hidden) if shape.output_bias else None,
            gate_up_bias=empty(2 * inter) if shape.mlp_bias else None,
            down_bias=empty(hidden) if shape.mlp_bias else None,
        )
        for _ in range(shape.num_layers)
    ]
    return Parameters(
        embedding=empty(shape.vocab_size, hidden),
        head=None if shape.tie_word_embeddings else empty(shape.vocab_size, hidden),
        final_norm=empty(hidden),
        layers=layers,
        interleaved=device.type == "cuda",
    )


def destinations(shape: ModelShape, parameters: Parameters) -> dict[Parameter, torch.Tensor]:
    """The slice that each tensor of a checkpoint fills, in the order of the layers."""
    views = {Parameter("embedding", None, "weight"): parameters.embedding}
    for index, layer in enumerate(parameters.layers):
        if layer is not None:
            views |= _layer_destinations(shape, index, layer, interleaved=parameters.interleaved)
    views[Parameter("final_norm", None, "weight")] = parameters.final_norm
    if parameters.head is not None:
        views[Parameter("head", None, "weight")] = parameters.head
    return views


def _layer_destinations(
    shape: ModelShape, index: int, layer: LayerParameters, *, interleaved: bool
) -> dict[Parameter, torch.Tensor]:
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    views = {
        Parameter("input_norm", index, "weight"): layer.input_norm,
        Parameter("post_norm", index, "weight"): layer.post_norm,
    }
    fused = (
        ("weight", layer.qkv, layer.output, layer.gate_up, layer.down),
        ("bias", layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias),
    )
    for kind, qkv, output, gate_up, down in fused:
        if qkv is not None:
            for part, view in zip("qkv", qkv.split((q_size, kv_size, kv_size)), strict=True):
                views[Parameter(part, index, kind)] = view
        if output is not None:
            views[Parameter("output", index, kind)] = output
        if gate_up is not None:
            gate, up = (gate_up[0::2], gate_up[1::2]) if interleaved else gate_up.chunk(2)
            views[Parameter("gate", index, kind)], views[Parameter("up", index, kind)] = gate, up
        if down is not None:
            views[Parameter("down", index, kind)] = down
    return views
