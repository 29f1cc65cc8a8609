"""A rank's parameters as fused tensors, and which slice of them each tensor of a checkpoint fills.

qkv = [q; k; v] and gate_up = [gate; up], rows stacked; on CUDA gate_up holds the rows of gate and up in turns, so that
one tile of a product has both. Knows no file format and no tensor names but our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.engine.model_shape import ModelShape
from manta.engine.models.family import Parameter
from manta.engine.parallel.layout import ShardLayout
from manta.engine.quant.kernel_form import KernelForm
from manta.engine.quant.weight import QuantizedWeight


@dataclass(frozen=True)
class LayerParameters:
    """One layer. Weights [out, in], biases [out]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor | QuantizedWeight | KernelForm
    output: torch.Tensor | QuantizedWeight | KernelForm
    post_norm: torch.Tensor
    gate_up: torch.Tensor | QuantizedWeight | KernelForm
    down: torch.Tensor | QuantizedWeight | KernelForm
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass
class Parameters:
    """Those of one rank. What its layout leaves out is None; so is `head` where the embedding serves as one."""

    embedding: torch.Tensor | None
    head: torch.Tensor | None
    final_norm: torch.Tensor | None
    layers: list[LayerParameters | None]
    first_layer: int
    """Number of the first of `layers` in the whole model."""
    interleaved: bool
    """Whether gate_up holds row i of gate at 2 i and of up at 2 i + 1."""
    notes: tuple[str, ...] = ()
    """Sentences for the operator: what is quantized, and what has no kernel."""

    def take_layer(self, index: int) -> LayerParameters:
        """Hand over the layer at `index` of `layers`; it is no longer held here. Once a layer."""
        layer, self.layers[index] = self.layers[index], None
        assert layer is not None, f"layer {index} was taken before"
        return layer


def allocate_parameters(
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: ShardLayout | None = None,
    has_plain_linears: bool = True,
) -> Parameters:
    """Those of a rank (None: the only one), uninitialised. Without `has_plain_linears`, weights of the layers' products
    take no memory: they are on torch's meta device, to be replaced."""
    layout = ShardLayout.whole(shape) if layout is None else layout

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def product(*size: int) -> torch.Tensor:
        return empty(*size) if has_plain_linears else torch.empty(size, dtype=dtype, device="meta")

    hidden, inter = shape.hidden_size, len(layout.intermediate)
    q_size, kv_size = len(layout.heads) * shape.head_dim, len(layout.kv_heads) * shape.head_dim
    # Products that are summed over ranks get their bias on one of them.
    adds_bias = layout.is_first_part
    layers: list[LayerParameters | None] = [
        LayerParameters(
            input_norm=empty(hidden),
            qkv=product(q_size + 2 * kv_size, hidden),
            output=product(hidden, q_size),
            post_norm=empty(hidden),
            gate_up=product(2 * inter, hidden),
            down=product(hidden, inter),
            qkv_bias=empty(q_size + 2 * kv_size) if shape.attention_bias else None,
            output_bias=empty(hidden) if shape.output_bias and adds_bias else None,
            gate_up_bias=empty(2 * inter) if shape.mlp_bias else None,
            down_bias=empty(hidden) if shape.mlp_bias and adds_bias else None,
            q_norm=empty(shape.head_dim) if shape.qk_norm else None,
            k_norm=empty(shape.head_dim) if shape.qk_norm else None,
        )
        for _ in layout.layers
    ]
    has_own_head = layout.has_head and not (shape.tie_word_embeddings and layout.has_embedding)
    return Parameters(
        embedding=empty(len(layout.vocab), hidden) if layout.has_embedding else None,
        head=empty(len(layout.vocab), hidden) if has_own_head else None,
        final_norm=empty(hidden) if layout.has_head else None,
        layers=layers,
        first_layer=layout.layers.start,
        interleaved=device.type == "cuda",
    )


def destinations(shape: ModelShape, parameters: Parameters) -> dict[Parameter, torch.Tensor]:
    """What each tensor of a checkpoint, or its slice, fills, in the order of the layers."""
    views: dict[Parameter, torch.Tensor] = {}
    if parameters.embedding is not None:
        views[Parameter("embedding", None, "weight")] = parameters.embedding
    for index, layer in enumerate(parameters.layers, start=parameters.first_layer):
        if layer is not None:
            views |= _layer_destinations(shape, index, layer, interleaved=parameters.interleaved)
    if parameters.final_norm is not None:
        views[Parameter("final_norm", None, "weight")] = parameters.final_norm
    if parameters.head is not None:
        # A stage of its own has its own copy of a tied embedding.
        views[Parameter("embedding" if shape.tie_word_embeddings else "head", None, "weight")] = parameters.head
    return views


def _layer_destinations(
    shape: ModelShape, index: int, layer: LayerParameters, *, interleaved: bool
) -> dict[Parameter, torch.Tensor]:
    weights = layer.qkv, layer.output, layer.gate_up, layer.down
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    assert len(plain) == len(weights), "quantized weights have no views"
    q_size = plain[1].shape[1]
    kv_size = (plain[0].shape[0] - q_size) // 2
    views = {
        Parameter("input_norm", index, "weight"): layer.input_norm,
        Parameter("post_norm", index, "weight"): layer.post_norm,
    }
    for part, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
        if norm is not None:
            views[Parameter(part, index, "weight")] = norm
    fused = (
        ("weight", *plain),
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
