"""What devices can do: bytes and operations a second, memory, links, as far as programs reach them. Torch-free, pure.

Knows no model. Figures of data sheets are multiplied by the share of them that programs reach: measured on the H200
(its read bandwidth and its 8192^3 product in bf16), taken over for its relatives, from published figures elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Of weights, activations and KV entries by the name of their type."""


@dataclass(frozen=True)
class Link:
    """A way between two devices, in one direction."""

    bytes_per_s: float
    latency_s: float
    """Of one exchange, however small it is."""

    def seconds(self, num_bytes: float) -> float:
        """For so many bytes in one piece; 0 for none."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


NVLINK_4 = Link(360e9, 8e-6)
"""450 GB/s in each direction, of which a ring reaches about 0.8."""


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device as they can be reached: bytes/s, FLOP/s (16-bit matrix products), bytes."""

    name: str
    memory_bandwidth: float
    matrix_flops: float
    memory_bytes: float
    step_overhead_s: float = 300e-6
    """Kernel boundaries and host time that no overlap hides."""
    matrix_flops_8bit: float = 0.0
    """FLOP/s of 8-bit matrix products (FP8; INT8 on the A100). 0: the device has none that are faster."""
    link: Link = NVLINK_4
    """From one device of a node to another."""
    has_fp8: bool = True
    """Whether its 8-bit products take FP8 numbers; otherwise INT8 only."""

    def flops_of(self, activation_bits: int) -> float:
        """FLOP/s of matrix products whose factors have so many bits."""
        return self.matrix_flops_8bit if activation_bits <= 8 and self.matrix_flops_8bit else self.matrix_flops


HARDWARE = {
    # Read bandwidth and 8192^3 bf16 product as measured on the device; 8 bits: 0.8 of the data sheet.
    "h200": Hardware("h200", 4.53e12, 792e12, 140e9, matrix_flops_8bit=1583e12),
    # Data-sheet figures times the share that the measured device reaches (0.94 of bandwidth, 0.8 of matrix rate).
    "h100": Hardware("h100", 3.15e12, 790e12, 80e9, matrix_flops_8bit=1583e12),
    "a100": Hardware("a100", 1.9e12, 250e12, 80e9, matrix_flops_8bit=500e12, link=Link(240e9, 10e-6), has_fp8=False),
    "l40s": Hardware("l40s", 0.81e12, 290e12, 48e9, matrix_flops_8bit=586e12, link=Link(25e9, 25e-6)),
    "b200": Hardware("b200", 7.5e12, 1800e12, 180e9, matrix_flops_8bit=3600e12, link=Link(720e9, 8e-6)),
    # Data sheet: 5.3 TB/s, 1,307 and 2,615 TFLOP/s, 448 GB/s. Published measurements reach about 0.8 and 0.5 of them.
    "mi300x": Hardware("mi300x", 4.3e12, 650e12, 192e9, matrix_flops_8bit=1150e12, link=Link(310e9, 12e-6)),
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


def all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds until `num_ranks` devices of one node have the sum of their `num_bytes`; 0 for a single one.

    Every byte passes a device's link 2 (n - 1) / n times, as in a ring (Patarasuk and Yuan 2009).
    """
    if num_ranks == 1 or not num_bytes:
        return 0.0
    return link.seconds(num_bytes * 2 * (num_ranks - 1) / num_ranks)
