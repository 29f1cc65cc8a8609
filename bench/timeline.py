"""From intervals in which kernels ran to where a step's time went: kernels by name and kind, and idle gaps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .stats import percentile

LONG_GAP_US = 5.0
"""From here on a gap is not the boundary between two kernels of one launch, but a device that waits for its host."""

KINDS = {
    "attention": ("attention", "shared_prefix", "merge_kernel", "flash"),
    "linear": (
        *("gemm", "gemv", "skinny", "weight_only", "swapped_kernel", "tiled_kernel", "block_kernel"),
        *("nvjet", "cutlass", "cublas", "xmma", "splitk"),
    ),
    "quantization": ("quantize", "scale_kernel"),
    "exchange": ("all_reduce", "allreduce", "nccl"),
    "norm": ("norm",),
    "rope and cache": ("rope", "store_kv", "copy_blocks"),
    "activation": ("silu",),
    "sampling": ("argmax", "chunk_kernel", "candidate", "draw_kernel", "round_kernel", "softmax", "topk", "sort"),
    "inputs": ("prepare", "embed", "index", "gather", "scatter"),
    "copy": ("memcpy", "memset", "copy"),
}
"""Kind -> parts of kernel names; the first kind that fits counts."""


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the device. Times in microseconds on one clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Share:
    """Time of all kernels of one name or kind, for each step."""

    name: str
    count_per_step: float
    us_per_step: float
    percent: float
    """Of the kernels' time together, which is more than the busy time where kernels overlap."""


@dataclass(frozen=True)
class Timeline:
    """A stretch of `num_steps` steps, from the first kernel's start to the last one's end."""

    num_steps: int
    wall_us: float
    busy_us: float
    """Time in which at least one kernel ran."""
    gaps_us: tuple[float, ...]
    kinds: tuple[Share, ...]
    kernels: tuple[Share, ...]

    @classmethod
    def of(cls, kernels: Sequence[Kernel], *, num_steps: int) -> Timeline:
        """`kernels` in any order, at least one."""
        gaps = idle_gaps(kernels)
        wall_us = max(kernel.end_us for kernel in kernels) - min(kernel.start_us for kernel in kernels)
        return cls(
            num_steps=num_steps,
            wall_us=wall_us,
            busy_us=wall_us - sum(gaps),
            gaps_us=tuple(gaps),
            kinds=_shares(((kind_of(kernel.name), kernel) for kernel in kernels), num_steps),
            kernels=_shares(((kernel.name, kernel) for kernel in kernels), num_steps),
        )

    @property
    def idle_percent(self) -> float:
        return 100 * sum(self.gaps_us) / self.wall_us

    @property
    def long_gaps_us(self) -> list[float]:
        return [gap for gap in self.gaps_us if gap >= LONG_GAP_US]

    def figures(self, prefix: str) -> dict[str, float]:
        """Times for each step, and shares of the wall time."""
        return {
            f"{prefix}wall_us_per_step": self.wall_us / self.num_steps,
            f"{prefix}busy_us_per_step": self.busy_us / self.num_steps,
            f"{prefix}kernels_per_step": sum(share.count_per_step for share in self.kinds),
            f"{prefix}idle_percent": self.idle_percent,
            f"{prefix}idle_in_long_gaps_percent": 100 * sum(self.long_gaps_us) / self.wall_us,
        }

    def tree(self, *, most_kernels: int = 30) -> dict[str, object]:
        """For JSON, small: shares of the kinds and of the kernels that took longest, the gaps' distribution."""
        return {
            "num_steps": self.num_steps,
            "wall_us": round(self.wall_us, 3),
            "kinds": [_row(share) for share in self.kinds],
            "kernels": [_row(share) for share in self.kernels[:most_kernels]],
            "gaps": {
                "count": len(self.gaps_us),
                **{f"p{p}_us": round(percentile(self.gaps_us, p), 3) for p in (50, 90, 99) if self.gaps_us},
                "longest_us": [round(gap, 3) for gap in sorted(self.gaps_us, reverse=True)[:10]],
                "long_count": len(self.long_gaps_us),
            },
        }


def idle_gaps(kernels: Iterable[Kernel]) -> list[float]:
    """Lengths of the stretches between first start and last end in which no kernel ran, in order, microseconds."""
    gaps: list[float] = []
    busy_until: float | None = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if busy_until is not None and kernel.start_us > busy_until:
            gaps.append(kernel.start_us - busy_until)
        busy_until = kernel.end_us if busy_until is None else max(busy_until, kernel.end_us)
    return gaps


def kind_of(name: str) -> str:
    """What a kernel of this name does; `other` when the name does not say."""
    lowered = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), "other")


def _shares(named: Iterable[tuple[str, Kernel]], num_steps: int) -> tuple[Share, ...]:
    """Longest first."""
    found: dict[str, tuple[int, float]] = {}
    for name, kernel in named:
        count, total_us = found.get(name, (0, 0.0))
        found[name] = (count + 1, total_us + kernel.end_us - kernel.start_us)
    whole_us = sum(total_us for _, total_us in found.values())
    shares = [
        Share(name, count / num_steps, total_us / num_steps, 100 * total_us / whole_us if whole_us else 0.0)
        for name, (count, total_us) in found.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.us_per_step))


def _row(share: Share) -> dict[str, object]:
    return {
        "name": share.name,
        "count_per_step": round(share.count_per_step, 3),
        "us_per_step": round(share.us_per_step, 3),
        "percent": round(share.percent, 2),
    }
