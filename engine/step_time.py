"""How long a step takes, from the hardware's peaks and the model's shape. One model for router, simulator and planner.

A roofline (Williams et al. 2009): weights are read once a step, the KV cache once per decode, and either the memory
or the matrix units are the limit; ranks that share a model exchange sums and hidden states on top. Torch-free;
corrected by a measured profile where there is one, or by the shares of the peaks that were reached elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .hardware import (
    BYTES_PER_ELEMENT,
    HARDWARE,
    Hardware,
    Link,
    all_reduce_s,
    hardware_named,
    hardware_of,
)
from .model_shape import ModelShape
from .plan import StepPlan
from .precision import PRECISIONS, Precision, kv_head_bytes
from .step_profile import StepPoint, StepProfile, Surface, find_profile

__all__ = [
    "BYTES_PER_ELEMENT",
    "H200_SHARES",
    "HARDWARE",
    "PEAKS",
    "Hardware",
    "Shares",
    "StepShape",
    "StepTerms",
    "StepTimeModel",
    "hardware_named",
    "hardware_of",
]

ALL_REDUCES_PER_LAYER = 2
"""Behind attention and behind the MLP."""


@dataclass(frozen=True)
class StepShape:
    """What a step computes. Tokens unless named otherwise."""

    num_prefill_tokens: int = 0
    num_decode_seqs: int = 0
    num_decode_context_tokens: int = 0
    """KV-cache tokens that the decodes read, summed over them."""
    num_prefill_pairs: int = 0
    """Query-key pairs of the prefills' attention, summed over their tokens."""

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        prefill = decodes = context = pairs = 0
        for row in plan.rows:
            if row.is_decode:
                decodes += 1
                context += row.start + 1
            else:
                prefill += row.num_tokens
                pairs += row.num_tokens * row.start + row.num_tokens * (row.num_tokens + 1) // 2
        return cls(prefill, decodes, context, pairs)

    @classmethod
    def of_point(cls, point: StepPoint) -> Self:
        return cls(
            point.num_prefill_tokens,
            point.num_decode_seqs,
            point.num_decode_context_tokens,
            point.num_prefill_pairs,
        )


@dataclass(frozen=True)
class Shares:
    """Which part of the peaks an engine reaches, and what a step costs beside."""

    matrices: float = 1.0
    """Of bandwidth or matrix rate, in the linear layers."""
    attention: float = 1.0
    """Of the matrix rate, in the attention of prompts."""
    context: float = 1.0
    """Of the bandwidth, where decodes read the KV cache."""
    overhead_s: float | None = None
    """Of every step; None: the hardware's."""


PEAKS = Shares()
"""Nothing is lost but the hardware's overhead."""
H200_SHARES = Shares(matrices=0.86, attention=0.83, context=0.68, overhead_s=0.2e-3)
"""Fitted to Manta's own figures on an H200 (bench/results/h200/engine-llama8b-bf16.json, `manta bench step-errors`)."""


@dataclass(frozen=True)
class StepTerms:
    """A step's seconds by what they go into. In a step that is split over ranks: until the last rank is done."""

    weights_s: float
    """Products of the layers that are bound by reading weights."""
    compute_s: float
    """Products of the layers that are bound by operations."""
    head_s: float
    attention_s: float
    """Of prompts."""
    context_s: float
    """Reading the KV cache for decodes."""
    communication_s: float
    """All-reduces inside a node, and hops from stage to stage."""
    overhead_s: float

    @property
    def total_s(self) -> float:
        return (
            self.weights_s
            + self.compute_s
            + self.head_s
            + self.attention_s
            + self.context_s
            + self.communication_s
            + self.overhead_s
        )


class StepTimeModel:
    """step time = f(prefill tokens, decode sequences, KV tokens read), seconds.

    With a profile, steps of decodes alone and prefills come from its measured points. In a mixed step all tokens pass
    the matrices together, as so many prefill tokens do; the decodes' attention comes on top.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        *,
        dtype: str = "bfloat16",
        profile: StepProfile | None = None,
        tp: int = 1,
        pp: int = 1,
        weight_bits: float | None = None,
        activation_bits: int = 16,
        kv_dtype: str | None = None,
        shares: Shares = PEAKS,
        stage_link: Link | None = None,
    ) -> None:
        """`tp` ranks of one node share every layer, `pp` groups of them have some layers each. `weight_bits` (of an
        element of a linear layer with its share of the scales) and `kv_dtype` are `dtype`'s unless given; embedding and
        head always are. `stage_link` lies between stages; None: the node's own. A profile is of one rank with `dtype`.
        """
        size = BYTES_PER_ELEMENT[dtype]
        head = shape.vocab_size * shape.hidden_size
        layers = shape.num_parameters - head * (1 if shape.tie_word_embeddings else 2)
        self.tp, self.pp = tp, pp
        self._hardware, self._shares = hardware, shares
        self._num_layers, self._hidden_bytes = shape.num_layers, shape.hidden_size * size
        self._stage_link = hardware.link if stage_link is None else stage_link
        self._layer_bytes = layers * size if weight_bits is None else round(layers * weight_bits / 8)
        self._head_bytes = head * size
        self._embedding_bytes = 0 if shape.tie_word_embeddings else self._head_bytes
        self._flops_per_token, self._flops_per_logits_row = 2.0 * layers, 2.0 * head
        kv_rows = 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
        self._unread_flops = 2.0 * (layers / shape.num_layers - kv_rows)
        self._layer_flops = hardware.flops_of(activation_bits) * tp
        self._bandwidth, self._flops = hardware.memory_bandwidth * tp, hardware.matrix_flops * tp
        head_bytes = kv_head_bytes(shape.head_dim, BYTES_PER_ELEMENT[kv_dtype or dtype])
        self._kv_bytes_per_token = shape.kv_elements_per_token // shape.head_dim * head_bytes
        self._flops_per_pair = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim
        self._overhead_s = hardware.step_overhead_s if shares.overhead_s is None else shares.overhead_s
        self._per_matrices = 1.0 / shares.matrices
        self._pair_s = self._flops_per_pair / self._flops / shares.attention
        self._context_token_s = self._kv_bytes_per_token / self._bandwidth / shares.context
        self._decode = self._prefill = None
        if profile is not None:
            assert tp == pp == 1, "profiles are of one rank"
            self._decode = Surface(
                ((p.num_decode_seqs, p.num_decode_context_tokens, p.seconds) for p in profile.decode),
                seconds_per_work=self._kv_bytes_per_token / hardware.memory_bandwidth,
                seconds_of_x=self._sampling_layers_s,
            )
            self._prefill = Surface(
                ((p.num_prefill_tokens, p.num_prefill_pairs, p.seconds) for p in profile.prefill),
                seconds_per_work=self._flops_per_pair / hardware.matrix_flops,
                seconds_of_x=self._layers_s,
            )

    @classmethod
    def known(
        cls,
        shape: ModelShape,
        hardware: Hardware,
        *,
        dtype: str = "bfloat16",
        profile_folders: Iterable[Path] = (),
        tp: int = 1,
        pp: int = 1,
        precision: Precision = PRECISIONS["bf16"],
        kv_dtype: str | None = None,
    ) -> Self:
        """Corrected by the profile of this model on this hardware, if there is one. Raises ConfigError.

        Profiles are of plain models: what is quantized is predicted from the peaks.
        """
        profile = None
        if tp == pp == 1 and precision.weight_bits is None and kv_dtype is None:
            # Of one rank; what several do is not interpolated from it.
            profile = find_profile(shape, dtype=dtype, gpu=hardware.name, folders=profile_folders)
        return cls(
            shape,
            hardware,
            dtype=dtype,
            profile=profile,
            tp=tp,
            pp=pp,
            weight_bits=precision.weight_bits,
            activation_bits=precision.activation_bits,
            kv_dtype=kv_dtype,
        )

    @property
    def is_measured(self) -> bool:
        return self._decode is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads (of the embedding only single rows are read), over all ranks."""
        return self._layer_bytes + self._head_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights, the embedding among them, over all ranks."""
        return self.weight_bytes + self._embedding_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all ranks."""
        return self._kv_bytes_per_token

    def predict(self, step: StepShape) -> float:
        """Seconds from the begin of one step to its end, through all stages; 0 for an empty one."""
        num_decodes, context = step.num_decode_seqs, step.num_decode_context_tokens
        if not step.num_prefill_tokens and not num_decodes:
            return 0.0
        if self._decode is None or self._prefill is None:
            # As `terms` adds up, without its objects: simulators ask a million times.
            num_tokens = step.num_prefill_tokens + num_decodes
            matrices_s = self._layers_s(num_tokens) + self._head_s(num_decodes + (1 if step.num_prefill_tokens else 0))
            seconds = self._overhead_s + matrices_s * self._per_matrices
            seconds += step.num_prefill_pairs * self._pair_s + context * self._context_token_s
            return seconds if self.tp == self.pp == 1 else seconds + self.communication_s(num_tokens)
        if not step.num_prefill_tokens:
            return self._decode.at(num_decodes, context)
        seconds = self._prefill.at(step.num_prefill_tokens + num_decodes, step.num_prefill_pairs)
        if num_decodes:
            seconds += self._decode.at(num_decodes, context) - self._decode.at(num_decodes, 0)
            seconds += self._head_s(num_decodes + 1) - self._head_s(1)
        return seconds

    def predict_full(self, step: StepShape) -> float:
        """Seconds of a step's work in a pipeline that is full: `pp` parts of the step, one behind the other.

        Each part reads all weights, a stage's at a time, and has its share of tokens, pairs, contexts. A round, after
        which every sequence has a token more, takes `pp` times a stage's time. As `predict` where there is one stage.
        """
        if self.pp == 1:
            return self.predict(step)
        parts = self.pp
        part = StepShape(
            -(-step.num_prefill_tokens // parts),
            -(-step.num_decode_seqs // parts),
            -(-step.num_decode_context_tokens // parts),
            -(-step.num_prefill_pairs // parts),
        )
        return self.predict(part)

    def terms(self, step: StepShape) -> StepTerms:
        """What `predict` says without a profile, term by term."""
        num_tokens = step.num_prefill_tokens + step.num_decode_seqs
        if not num_tokens:
            return StepTerms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        shares = self._shares
        num_logits_rows = step.num_decode_seqs + (1 if step.num_prefill_tokens else 0)
        weights_s, compute_s = (
            self._layer_bytes / self._bandwidth,
            self._flops_per_token * num_tokens / self._layer_flops,
        )
        is_bytes = weights_s >= compute_s
        return StepTerms(
            weights_s=weights_s / shares.matrices if is_bytes else 0.0,
            compute_s=0.0 if is_bytes else compute_s / shares.matrices,
            head_s=self._head_s(num_logits_rows) / shares.matrices,
            attention_s=step.num_prefill_pairs * self._pair_s,
            context_s=step.num_decode_context_tokens * self._context_token_s,
            communication_s=self.communication_s(num_tokens),
            overhead_s=self._overhead_s,
        )

    def communication_s(self, num_tokens: int) -> float:
        """Of a step's exchanges between ranks: two all-reduces a layer, and hidden states from stage to stage."""
        if not num_tokens:
            return 0.0
        num_bytes = num_tokens * self._hidden_bytes
        sums_s = ALL_REDUCES_PER_LAYER * self._num_layers * all_reduce_s(num_bytes, self.tp, self._hardware.link)
        return sums_s + (self.pp - 1) * self._stage_link.seconds(num_bytes / self.tp)

    def floor(self, step: StepShape) -> float:
        """Seconds that the step's bytes and operations take at the device's peaks, product after product.

        Weights and KV entries are read once, every product is bound by bytes or by operations, nothing else costs
        anything; of tokens behind which nothing is sampled the last layer computes keys and values alone. No engine
        that runs the step as one batch is faster.
        """
        num_tokens = step.num_prefill_tokens + step.num_decode_seqs
        if not num_tokens:
            return 0.0
        num_logits_rows = step.num_decode_seqs + (1 if step.num_prefill_tokens else 0)
        flops = self._flops_per_token * num_tokens - self._unread_flops * (num_tokens - num_logits_rows)
        pairs = step.num_prefill_pairs * (1 - 1 / self._num_layers)
        return (
            max(self._layer_bytes / self._bandwidth, flops / self._layer_flops)
            + self._head_s(num_logits_rows)
            + self._kv_bytes_per_token * step.num_decode_context_tokens / self._bandwidth
            + self._flops_per_pair * pairs / self._flops
        )

    def _layers_s(self, num_tokens: float) -> float:
        return max(self._layer_bytes / self._bandwidth, self._flops_per_token * num_tokens / self._layer_flops)

    def _head_s(self, num_rows: float) -> float:
        return max(self._head_bytes / self._bandwidth, self._flops_per_logits_row * num_rows / self._flops)

    def _sampling_layers_s(self, num_tokens: float) -> float:
        return self._layers_s(num_tokens) + self._head_s(num_tokens)
