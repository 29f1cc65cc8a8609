"""Which products the Hopper kernel for blocks of scales takes, and its configuration. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass

from manta.kernels import runtime

from .layout import Format, QuantizedWeight


@dataclass(frozen=True)
class BlockTiles:
    """Tiles of 128 rows and `block_n` columns, 64 or 128, and steps of 128 over K, `num_stages` of them in flight."""

    num_stages: int
    block_n: int = 128
    splits: int = 1
    """Programs that share a tile's K, one or two."""


def takes_blocks(weight: QuantizedWeight) -> bool:
    """Whether the kernel takes this weight: FP8 whose blocks of 128 x 128 share a scale (or even rows one and odd rows
    another), on a GPU of compute capability 9.0, which alone has its instructions."""
    has_blocks = weight.format is Format.FP8 and weight.group == 128 < weight.in_features
    fits = weight.in_features % 128 == 0 and weight.out_features % 128 == 0 and weight.uniform_rows % 128 == 0
    on_hopper = runtime.has_inline_ptx(weight.weight) and runtime.capability(weight.weight.device) == 90
    return has_blocks and fits and on_hopper and weight.weight.data_ptr() % 16 == 0
