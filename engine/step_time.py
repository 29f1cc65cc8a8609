"""How long a step takes, from the hardware's peaks and the model's shape. One model for router, simulator and planner.

A roofline (Williams et al. 2009): weights are read once a step, the KV cache once per decode, and either the memory
or the matrix units are the limit. Torch-free; corrected by a measured profile where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .errors import ConfigError
from .model_shape import ModelShape
from .plan import StepPlan
from .step_profile import StepPoint, StepProfile, Surface, find_profile

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device as they can be reached: bytes/s, FLOP/s (16-bit matrix products), bytes."""

    name: str
    memory_bandwidth: float
    matrix_flops: float
    memory_bytes: float
    step_overhead_s: float = 300e-6
    """Kernel boundaries and host time that no overlap hides."""


HARDWARE = {
    # Read bandwidth and 8192^3 bf16 product as measured on the device.
    "h200": Hardware("h200", 4.53e12, 792e12, 140e9),
    # Data-sheet figures times the share that the measured device reaches (0.94 of bandwidth, 0.8 of matrix rate).
    "h100": Hardware("h100", 3.15e12, 790e12, 80e9),
    "a100": Hardware("a100", 1.9e12, 250e12, 80e9),
}


def hardware_named(name: str) -> Hardware:
    """Raises ConfigError for a name that is not in the table."""
    try:
        return HARDWARE[name]
    except KeyError:
        known = ", ".join(sorted(HARDWARE))
        raise ConfigError(f"device: no figures for {name!r}; known are {known}", field="device") from None


def hardware_of(device: str) -> Hardware | None:
    """Peaks of a device by its full name (`NVIDIA H200`, `sim:h200`); None for one without figures."""
    words = device.lower().replace(":", " ").replace("-", " ").split()
    return next((hardware for name, hardware in HARDWARE.items() if name in words), None)


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
    ) -> None:
        size = BYTES_PER_ELEMENT[dtype]
        head = shape.vocab_size * shape.hidden_size
        layers = shape.num_parameters - head * (1 if shape.tie_word_embeddings else 2)
        self._hardware = hardware
        self._layer_bytes, self._head_bytes = layers * size, head * size
        self._flops_per_token, self._flops_per_logits_row = 2.0 * layers, 2.0 * head
        self._kv_bytes_per_token = shape.kv_elements_per_token * size
        self._flops_per_pair = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim
        self._decode = self._prefill = None
        if profile is not None:
            self._decode = Surface(
                ((p.num_decode_seqs, p.num_decode_context_tokens, p.seconds) for p in profile.decode),
                seconds_per_work=self._kv_bytes_per_token / hardware.memory_bandwidth,
                seconds_of_x=lambda num_seqs: self._layers_s(num_seqs) + self._head_s(num_seqs),
            )
            self._prefill = Surface(
                ((p.num_prefill_tokens, p.num_prefill_pairs, p.seconds) for p in profile.prefill),
                seconds_per_work=self._flops_per_pair / hardware.matrix_flops,
                seconds_of_x=self._layers_s,
            )

    @classmethod
    def known(
        cls, shape: ModelShape, hardware: Hardware, *, dtype: str = "bfloat16", profile_folders: Iterable[Path] = ()
    ) -> Self:
        """Corrected by the profile of this model on this hardware, if there is one. Raises ConfigError."""
        profile = find_profile(shape, dtype=dtype, gpu=hardware.name, folders=profile_folders)
        return cls(shape, hardware, dtype=dtype, profile=profile)

    @property
    def is_measured(self) -> bool:
        return self._decode is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads (of the embedding only single rows are read)."""
        return self._layer_bytes + self._head_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self._kv_bytes_per_token

    def predict(self, step: StepShape) -> float:
        """Seconds for one step; 0 for an empty one."""
        num_decodes, context = step.num_decode_seqs, step.num_decode_context_tokens
        if not step.num_prefill_tokens and not num_decodes:
            return 0.0
        if self._decode is None or self._prefill is None:
            return self._hardware.step_overhead_s + self.floor(step)
        if not step.num_prefill_tokens:
            return self._decode.at(num_decodes, context)
        seconds = self._prefill.at(step.num_prefill_tokens + num_decodes, step.num_prefill_pairs)
        if num_decodes:
            seconds += self._decode.at(num_decodes, context) - self._decode.at(num_decodes, 0)
            seconds += self._head_s(num_decodes + 1) - self._head_s(1)
        return seconds

    def floor(self, step: StepShape) -> float:
        """Seconds that the step's bytes and operations take at the device's peaks, product after product.

        Weights and KV entries are read once, every product is bound by bytes or by operations, nothing else costs
        anything: no engine that runs the step as one batch is faster.
        """
        num_tokens = step.num_prefill_tokens + step.num_decode_seqs
        if not num_tokens:
            return 0.0
        num_logits_rows = step.num_decode_seqs + (1 if step.num_prefill_tokens else 0)
        return (
            self._layers_s(num_tokens)
            + self._head_s(num_logits_rows)
            + self._kv_bytes_per_token * step.num_decode_context_tokens / self._hardware.memory_bandwidth
            + self._flops_per_pair * step.num_prefill_pairs / self._hardware.matrix_flops
        )

    def _layers_s(self, num_tokens: float) -> float:
        hardware = self._hardware
        return max(
            self._layer_bytes / hardware.memory_bandwidth, self._flops_per_token * num_tokens / hardware.matrix_flops
        )

    def _head_s(self, num_rows: float) -> float:
        hardware = self._hardware
        return max(
            self._head_bytes / hardware.memory_bandwidth, self._flops_per_logits_row * num_rows / hardware.matrix_flops
        )
