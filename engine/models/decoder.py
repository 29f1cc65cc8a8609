"""A decoder-only transformer put together from layers. Knows a step as tensors: no requests, no files, no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from manta.engine.layers.attention import Attention, AttentionBatch, HeadNorms, LastRows, LayerCache
from manta.engine.layers.embedding import Embedding, VocabParallelEmbedding
from manta.engine.layers.linear import Linear, RowParallelLinear, VocabParallelHead
from manta.engine.layers.mlp import GatedMlp
from manta.engine.layers.norm import RmsNorm
from manta.engine.layers.quantized_linear import QuantizedLinear, QuantizedRowParallelLinear
from manta.engine.layers.rope import build_cos_sin
from manta.engine.model_shape import ModelShape
from manta.engine.parallel.groups import TensorGroup
from manta.engine.parallel.layout import ShardLayout
from manta.engine.quant.kernel_form import KernelForm
from manta.engine.quant.weight import QuantizedWeight
from manta.engine.weights.parameters import LayerParameters, Parameters
from manta.kernels.attention_decode import DecodeWorkspace


@dataclass(frozen=True)
class DecoderLayer:
    """Both blocks add to the residual stream and normalize what they read of it."""

    attention: Attention
    mlp: GatedMlp


class Decoder:
    """Pre-norm decoder with rotary embedding, grouped-query attention and a gated feed-forward block, or a shard of it:
    some layers, with or without the embedding and the head, and of each layer the heads and columns of one rank."""

    def __init__(
        self,
        shape: ModelShape,
        parameters: Parameters,
        *,
        max_position: int,
        workspace: DecodeWorkspace | None = None,
        deterministic: bool = False,
        layout: ShardLayout | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        """Takes the parameters over: on CPU they are packed layer by layer, and the plain ones released.

        `shape` is that of the whole model, `layout` the part that `parameters` hold (None: all), `group` the ranks
        that share its layers (None: no other).
        """
        self.shape = shape
        self.layout = ShardLayout.whole(shape) if layout is None else layout
        build = _Builder(shape, self.layout, group, workspace=workspace, deterministic=deterministic)
        self.embedding = None if parameters.embedding is None else build.embedding(parameters.embedding)
        self.final_norm = None if parameters.final_norm is None else RmsNorm(parameters.final_norm, shape.rms_norm_eps)
        self.head = None
        if self.layout.has_head:
            # With tied embeddings the head is the same memory until it is packed.
            weight = parameters.embedding if parameters.head is None else parameters.head
            assert weight is not None, "a stage with a head has its weight or the embedding"
            self.head = build.head(weight)
            parameters.head = None
            self.head.pack()
        self.layers = [build.layer(parameters, index) for index in range(len(self.layout.layers))]
        device = self.layers[0].mlp.norm.weight.device
        self.cos_sin = build_cos_sin(shape.rope, shape.head_dim, max_position, device)

    def forward(
        self,
        inputs: torch.Tensor,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        *,
        last: LastRows | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The residual stream behind the last layer here: [tokens, hidden], or [rows, hidden] of the `last` rows alone.

        `inputs` are token ids [tokens] int64 on the first stage; on the others the residual stream that the stage
        before returned, which is taken over and changed. All ranks of a stage call it with the same. `on_layer` is
        called when a layer's cache has been written, or on CUDA when that has been launched.
        """
        return self.finish(*self.begin(inputs, batch, caches, on_layer=on_layer), batch, caches[-1], last=last)

    def begin(
        self,
        inputs: torch.Tensor,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        *,
        on_layer: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` until the last layer here attends: the residual stream before it [tokens, hidden], and its queries
        [tokens, heads, head_dim]. All caches are written, but for the last where the rows' kernel `turns`."""
        residual = inputs if self.embedding is None else self.embedding(inputs)
        q = residual
        for layer, cache in zip(self.layers, caches, strict=True):
            q = layer.attention.queries(residual, batch, cache, self.cos_sin)
            if on_layer is not None:
                on_layer()
            if layer is not self.layers[-1]:
                layer.attention.add_to(residual, q, batch, cache, self.cos_sin)
                layer.mlp(residual)
        return residual, q

    def finish(
        self,
        residual: torch.Tensor,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        *,
        last: LastRows | None = None,
    ) -> torch.Tensor:
        """The rest of `forward`, from what `begin` returned, which is taken over; `cache` is the last layer's."""
        if last is not None:
            if not len(last.places):
                return residual[:0]
            residual, q = residual.index_select(0, last.places), q.index_select(0, last.places)
        layer = self.layers[-1]
        layer.attention.add_to(residual, q, batch if last is None else last, cache, self.cos_sin)
        layer.mlp(residual)
        return residual

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm and the head: [rows, hidden] -> [rows, vocab] in the model's dtype, a fresh tensor.

        On the last stage only, and there called by all its ranks; the first of them, which samples, gets the logits,
        the others their own part of the vocabulary.
        """
        assert self.head is not None, "only the last stage has logits"
        assert self.final_norm is not None
        return self.head.after_norm(residual, self.final_norm)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self.layers[0].mlp.norm.weight.dtype

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights as they are held now (a tied head counts once, unless it was packed)."""
        tensors = [] if self.embedding is None else [self.embedding.weight]
        linears = []
        if self.head is not None and self.final_norm is not None:
            tensors.append(self.final_norm.weight)
            if self.embedding is None or self.head.weight is not self.embedding.weight:
                linears.append(self.head)
        for layer in self.layers:
            tensors += [layer.attention.norm.weight, layer.mlp.norm.weight]
            if (norms := layer.attention.head_norms) is not None:
                tensors += [norms.q_norm.weight, norms.k_norm.weight]
            linears += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
        plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return plain + sum(linear.num_bytes for linear in linears)


class _Builder:
    """Layers of one rank from its parameters: those that talk to other ranks where there are some, plain ones else."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ShardLayout,
        group: TensorGroup | None,
        *,
        workspace: DecodeWorkspace | None,
        deterministic: bool,
    ) -> None:
        self._shape = shape
        self._layout = layout
        self._group = group
        self._workspace = workspace
        self._deterministic = deterministic

    def embedding(self, weight: torch.Tensor) -> Embedding:
        if self._group is None:
            return Embedding(weight)
        return VocabParallelEmbedding(weight, first_id=self._layout.vocab.start, group=self._group)

    def head(self, weight: torch.Tensor) -> Linear:
        if self._group is None:
            return Linear(weight, deterministic=self._deterministic)
        sizes = self._layout.vocab_sizes
        return VocabParallelHead(weight, group=self._group, sizes=sizes, deterministic=self._deterministic)

    def layer(self, parameters: Parameters, index: int) -> DecoderLayer:
        weights, eps = parameters.take_layer(index), self._shape.rms_norm_eps
        attention = Attention(
            RmsNorm(weights.input_norm, eps),
            self._rows(weights.qkv, weights.qkv_bias),
            self._columns(weights.output, weights.output_bias),
            num_heads=len(self._layout.heads),
            num_kv_heads=len(self._layout.kv_heads),
            head_dim=self._shape.head_dim,
            head_norms=_head_norms(weights, eps),
            workspace=self._workspace,
            deterministic=self._deterministic,
        )
        mlp = GatedMlp(
            RmsNorm(weights.post_norm, eps),
            self._rows(weights.gate_up, weights.gate_up_bias),
            self._columns(weights.down, weights.down_bias),
            interleaved=parameters.interleaved,
        )
        return DecoderLayer(attention, mlp)

    def _rows(self, weight: torch.Tensor | QuantizedWeight | KernelForm, bias: torch.Tensor | None) -> Linear:
        """All input features, this rank's output features."""
        if not isinstance(weight, torch.Tensor):
            return QuantizedLinear(weight, bias, deterministic=self._deterministic)
        layer = Linear(weight, bias, deterministic=self._deterministic)
        layer.pack()
        return layer

    def _columns(self, weight: torch.Tensor | QuantizedWeight | KernelForm, bias: torch.Tensor | None) -> Linear:
        """This rank's input features; the sum over ranks is the layer's output."""
        if self._group is None:
            return self._rows(weight, bias)
        if not isinstance(weight, torch.Tensor):
            return QuantizedRowParallelLinear(weight, bias, group=self._group, deterministic=self._deterministic)
        layer = RowParallelLinear(weight, bias, group=self._group, deterministic=self._deterministic)
        layer.pack()
        return layer


def _head_norms(weights: LayerParameters, eps: float) -> HeadNorms | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return HeadNorms(RmsNorm(weights.q_norm, eps), RmsNorm(weights.k_norm, eps))
