"""Number formats of a served model: what an element takes and at which rate it is multiplied. Torch-free, pure.

Knows no kernel: that a format is here says what it would cost. Names are those of `quantization.weights`; planner,
simulated device, step times and the cache's own layout take their bytes from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import QuantizationConfig
from .errors import ConfigError
from .hardware import Hardware

GROUP_SCALE_BITS = 16
"""A scale in fp16 for each group of int4; so is its zero point, where it has one."""
KV_SCALE_BYTES = 4
"""Of each token and head, beside keys and beside values in 8 bits."""


@dataclass(frozen=True)
class Precision:
    """Of the linear layers' weights and of what they are multiplied with."""

    name: str
    weight_bits: float | None
    """Of an element with its share of the scales; None: the checkpoint's own."""
    activation_bits: int
    is_fp8: bool = False

    def misfit(self, hardware: Hardware) -> str | None:
        """Why the hardware gains nothing from it; None: it does, or nothing is asked of it."""
        if self.is_fp8 and not hardware.has_fp8:
            return f"{hardware.name} multiplies no FP8 numbers"
        if self.activation_bits == 8 and not hardware.matrix_flops_8bit:
            return f"{hardware.name} has no faster 8-bit products"
        return None


PRECISIONS = {
    "bf16": Precision("bf16", None, 16),
    "fp8": Precision("fp8", 8.0, 8, is_fp8=True),
    "int8": Precision("int8", 8.0, 16),
    "int4": Precision("int4", 4.0 + GROUP_SCALE_BITS / 128, 16),
    "w8a8": Precision("w8a8", 8.0, 8),
    "fp8_tensor": Precision("fp8_tensor", 8.0, 8, is_fp8=True),
    "fp8_block": Precision("fp8_block", 8.0 + 32 / 128, 8, is_fp8=True),
}
"""bf16 stands for whatever 16-bit type the checkpoint has. Scales of rows are too few to count; those of blocks are
held for each row. int8 and int4 are of weights alone."""

KV_DTYPES = {"bf16": None, "fp8": "fp8", "int8": "int8"}
"""Types of KV entries; None: the checkpoint's own."""


def precision_named(name: str) -> Precision:
    """Raises ConfigError for a name that is not in the table."""
    if name not in PRECISIONS:
        raise ConfigError(f"weights: {name!r} is unknown; known are {', '.join(PRECISIONS)}", field="weights")
    return PRECISIONS[name]


def precision_of(config: QuantizationConfig) -> Precision | None:
    """What an engine configured so holds and multiplies, of a plain checkpoint. None: a scheme without kernels, whose
    products are dequantized for each step at a cost that nothing here knows."""
    if config.weights in ("auto", "plain"):
        return PRECISIONS["bf16"]
    if config.weights != "int4":
        return PRECISIONS.get(config.weights)
    per_group = GROUP_SCALE_BITS if config.symmetric else 2 * GROUP_SCALE_BITS
    return Precision("int4", 4.0 + (0.0 if config.group_size == "row" else per_group / config.group_size), 16)


def kv_head_bytes(head_dim: int, element_bytes: int) -> int:
    """Of a token's keys, or values, of one head."""
    return head_dim * element_bytes + (KV_SCALE_BYTES if element_bytes == 1 else 0)


def kv_dtype_named(name: str) -> str | None:
    """As StepTimeModel takes it. Raises ConfigError for a name that is not in the table."""
    if name not in KV_DTYPES:
        raise ConfigError(f"kv: {name!r} is unknown; known are {', '.join(KV_DTYPES)}", field="kv")
    return KV_DTYPES[name]
