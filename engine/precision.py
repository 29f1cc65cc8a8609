"""Number formats of a served model: what an element takes and at which rate it is multiplied. Torch-free, pure.

Knows no kernel: that a format is here says what it would cost, not that the engine runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .hardware import Hardware

SCALE_BITS_OF_GROUP = 16 / 128
"""A 16-bit scale for each 128 elements."""


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
    "int8": Precision("int8", 8.0, 8),
    "int4": Precision("int4", 4.0 + SCALE_BITS_OF_GROUP, 16),
}
"""bf16 stands for whatever 16-bit type the checkpoint has. Channel scales of 8-bit formats are too few to count."""

KV_DTYPES = {"bf16": None, "fp8": "fp8"}
"""Types of KV entries; None: the checkpoint's own."""


def precision_named(name: str) -> Precision:
    """Raises ConfigError for a name that is not in the table."""
    if name not in PRECISIONS:
        raise ConfigError(f"weights: {name!r} is unknown; known are {', '.join(PRECISIONS)}", field="weights")
    return PRECISIONS[name]


def kv_dtype_named(name: str) -> str | None:
    """As StepTimeModel takes it. Raises ConfigError for a name that is not in the table."""
    if name not in KV_DTYPES:
        raise ConfigError(f"kv: {name!r} is unknown; known are {', '.join(KV_DTYPES)}", field="kv")
    return KV_DTYPES[name]
