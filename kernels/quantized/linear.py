"""A linear layer with a quantized weight and what stands around it: norm in front, gate or residual behind.

Which kernel computes it is read from the device's table of the scheme ("linear_w4a16": {"plain 6144x4096 g128": [...]},
as `kernels/linear` keeps its own); without an entry:

- 16-bit activations: `weight_only_product` up to 64 rows, then the weight dequantized and a 16-bit product;
- 8-bit activations: `swapped_product` up to 64 rows, then the library where it has such a product, else
  `tiled_product`; of `block_product`, for Hopper and FP8 in blocks, tables alone know.

A table may choose the weight-only product for 8-bit activations too where that is faster, which skips their rounding.
fp32, and everything on CPU, takes the reference. Knows no model and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

from manta.kernels import linear as dense
from manta.kernels import runtime
from manta.kernels.gemm import GemmTiles, can_tile
from manta.kernels.gemv import gemv_reference
from manta.kernels.linear import Plan, parse_plan
from manta.kernels.rmsnorm import rms_norm

from .block_gemm_plan import BlockTiles, takes_blocks
from .dequantize import dequantized
from .eight_bit import SwappedTiles, can_multiply, row_group, swapped_product, tiled_product
from .layout import Format, QuantizedWeight, dequantize
from .library import library_product, library_takes
from .quantize import quantize_rows, quantize_rows_reference
from .weight_only import WeightOnlyTiles, weight_only_product

Tiles = WeightOnlyTiles | SwappedTiles | GemmTiles | BlockTiles
KERNELS: dict[str, Any] = {
    "weight_only": WeightOnlyTiles,
    "swapped": SwappedTiles,
    "tiled": GemmTiles,
    "blocks": BlockTiles,
}
DETERMINISTIC_WEIGHT_ONLY = WeightOnlyTiles(64, 16, 128, 4, 3)
DETERMINISTIC_EIGHT_BIT = SwappedTiles(64, 64, 128, 4, 4)
"""The one configuration for one row as for thousands: a row's bits depend on that row alone."""
_TILED = GemmTiles(128, 128, 128, num_warps=8, num_stages=4)
_TILED_MANY_SCALES = GemmTiles(64, 128, 128, num_warps=4, num_stages=5)
"""A scale a column and group: they need the registers of a larger tile."""


def linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activations: Format | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return x W^T + b [M, N], a fresh tensor, for `x` [M, K].

    `activations`, here and below: None leaves x in its type; INT8 or FP8 (the weight's own format) quantizes its rows,
    each scaled to its largest element, or in groups where the weight has groups. `deterministic`: a row's bits depend
    on that row alone. Raises ValueError for activations that this weight cannot meet.
    """
    return _layer("plain", x, weight, bias, activations, deterministic)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activations: Format | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return rms_norm(x) W^T + b [M, N] for `x` [M, K] and `norm_weight` [K]."""
    return _layer("plain", x, weight, bias, activations, deterministic, norm_weight=norm_weight, eps=eps)


def norm_gated_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activations: Format | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return silu(gate) * up [M, N / 2] of rms_norm(x) W^T + b; rows 2 i and 2 i + 1 of `weight` are gate and up."""
    return _layer("gated", x, weight, bias, activations, deterministic, norm_weight=norm_weight, eps=eps)


def linear_add(
    x: torch.Tensor,
    weight: QuantizedWeight,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activations: Format | None = None,
    deterministic: bool = False,
) -> None:
    """residual [M, N] += x W^T + b, in place, for `x` [M, K]."""
    _layer("add", x, weight, bias, activations, deterministic, residual=residual)


def linear_reference(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activations: Format | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification of all of the above, fp32 inside."""
    if activations is None:
        around: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps}
        return gemv_reference(x, dequantize(weight), bias, gated=gated, residual=residual, **around)
    rows = quantize_rows_reference(x, activations, row_group(weight), norm_weight=norm_weight, eps=eps)
    out = gemv_reference(rows.dequantize(), dequantize(weight), bias, gated=gated, residual=residual)
    return out if residual is not None else out.to(x.dtype)


def _layer(
    kind: str,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    activations: Format | None,
    deterministic: bool,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if activations is not None and (activations is not weight.format or not can_multiply(weight)):
        raise ValueError(f"{activations} activations cannot meet an {weight.format} weight in groups of {weight.group}")
    around: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "gated": kind == "gated", "residual": residual}
    if x.element_size() != 2 or not runtime.use_triton(x):
        return linear_reference(x, weight, bias, activations=activations, **around)
    if x.shape[0] == 0:
        width = weight.out_features // (2 if kind == "gated" else 1)
        return x.new_empty((0, width)) if residual is None else residual
    tiles = choose(kind, x, weight, activations, deterministic=deterministic)
    return apply(tiles, x, weight, bias, activations=activations, **around)


def apply(
    tiles: Tiles | None,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activations: Format | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer by one given kernel, None for the library; 16-bit `x` on the device.

    What a kernel has not fused is rounded to x's type in between: the normalized x, unless its rows are quantized.
    """
    behind: dict[str, Any] = {"gated": gated, "residual": residual}
    if isinstance(tiles, WeightOnlyTiles) or activations is None:
        assert tiles is None or isinstance(tiles, WeightOnlyTiles)
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, eps)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if tiles is not None:
            return weight_only_product(x, weight, bias, tiles=tiles, **behind)
        wide = dequantized(weight, x.dtype)
        kind = "gated" if gated else "plain" if residual is None else "add"
        return dense.apply(dense.choose(kind, x, wide, deterministic=False), x, wide, bias, **behind)
    rows = quantize_rows(x, activations, row_group(weight), norm_weight=norm_weight, eps=eps)
    if weight.order is not None:
        rows = rows._replace(values=rows.values.index_select(1, weight.order))
    if tiles is None:
        return library_product(rows, weight, bias, dtype=x.dtype, **behind)
    return eight_bit_product(tiles)(rows, weight, bias, dtype=x.dtype, tiles=tiles, **behind)


def eight_bit_product(tiles: SwappedTiles | GemmTiles | BlockTiles) -> Callable[..., torch.Tensor]:
    """The product of quantized rows that takes these tiles; all have the arguments of `swapped_product`."""
    if isinstance(tiles, SwappedTiles):
        return swapped_product
    return tiled_product if isinstance(tiles, GemmTiles) else _block_product()


@cache
def _block_product() -> Callable[..., torch.Tensor]:
    """Imported at its first use: Gluon takes time to import, and only Hopper GPUs need it."""
    from .block_gemm_hopper import block_product

    return block_product


def choose(
    kind: str, x: torch.Tensor, weight: QuantizedWeight, activations: Format | None, *, deterministic: bool
) -> Tiles | None:
    """The kernel for this call, None for the library. `kind`: plain, gated or add."""
    if deterministic:
        return DETERMINISTIC_WEIGHT_ONLY if activations is None else DETERMINISTIC_EIGHT_BIT
    group = weight.group if weight.group < weight.in_features else None
    scheme = scheme_name(weight.format, activations, group)
    tiles = plan(scheme, kind, weight.out_features, weight.in_features, group, x.device).tiles_for(x.shape[0])
    if activations is None:
        return tiles
    is_left = tiles is None and not library_takes(x.shape[0], weight, x.dtype)
    if is_left or (isinstance(tiles, BlockTiles) and not takes_blocks(weight)):
        tiles = _TILED if group is None or weight.uniform_rows % _TILED.block_n == 0 else _TILED_MANY_SCALES
    if isinstance(tiles, GemmTiles) and not _can_tile(weight):
        tiles = DETERMINISTIC_EIGHT_BIT
    return tiles


def _can_tile(weight: QuantizedWeight) -> bool:
    """Rows of x are fresh, so only the weight's sizes and the device matter."""
    return can_tile(weight.weight, weight.out_features)


def scheme_name(format: Format, activations: Format | None, group: int | None) -> str:
    """The operation's name in the tables."""
    if activations is None:
        return {Format.INT4: "linear_w4a16", Format.INT8: "linear_w8a16", Format.FP8: "linear_fp8_a16"}[format]
    return "linear_w8a8" if format is Format.INT8 else "linear_fp8" if group is None else "linear_fp8_block"


def shape_key(kind: str, n_size: int, k_size: int, group: int | None) -> str:
    """A layer's name in a table."""
    return f"{kind} {n_size}x{k_size}" + ("" if group is None else f" g{group}")


@cache
def plan(scheme: str, kind: str, n_size: int, k_size: int, group: int | None, device: torch.device) -> Plan[Any]:
    """What layers of a scheme, kind and shape take on a device: its table's entry, or the default."""
    entries = runtime.tuned_table(scheme, device).get(shape_key(kind, n_size, k_size, group))
    if entries is None:
        return default_plan(scheme, n_size, k_size)
    return parse_plan(entries, KERNELS)


def default_plan(scheme: str, n_size: int, k_size: int) -> Plan[Any]:
    """For shapes without a table: what trial kernels liked on an H200; None above 64 rows."""
    blocks = triton.cdiv(n_size, 64)
    splits = 1
    while blocks * splits < 256 and k_size >= 2048 * splits:
        splits *= 2
    if scheme in ("linear_w4a16", "linear_w8a16", "linear_fp8_a16"):
        few = [WeightOnlyTiles(64, rows, 128, 4, 3, splits) for rows in (8, 16, 32, 64)]
        return Plan((8, 16, 32, 64), (*few, None))
    some = [SwappedTiles(64, rows, 256 if rows == 16 else 128, 4, 4, splits) for rows in (16, 32, 64)]
    return Plan((16, 32, 64), (*some, None))
