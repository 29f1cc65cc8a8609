"""A linear layer with what stands around it: the norm in front, the gate or the residual behind. Knows no model.

Which kernel computes it, and how, is a function of the shape and the number of rows, read from the device's table
("linear": {"plain 6144x4096": [...]}, N x K, each entry for up to `rows` rows); without an entry:

- one row: `gemv`, norm and all in one launch;
- 2 to 64 rows: `gemm_skinny`, K split until the device is full;
- more: the library (cuBLAS) with norm and activation kernels of their own.

fp32, and everything on CPU, takes the plain composition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch.nn import functional

from . import runtime
from .activation import silu_and_mul
from .gemm import DETERMINISTIC_TILES, GemmTiles, can_tile, gemm
from .gemm_skinny import SkinnyTiles, gemm_skinny
from .gemv import GemvTiles, gemv
from .rmsnorm import rms_norm

Tiles = GemvTiles | SkinnyTiles | GemmTiles
_KERNELS: dict[str, Any] = {"gemv": GemvTiles, "skinny": SkinnyTiles, "tiled": GemmTiles}


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, deterministic: bool = False
) -> torch.Tensor:
    """Return x W^T + b [M, N], a fresh tensor, for `x` [M, K] and `weight` [N, K].

    `deterministic`, here and below: a row's bits depend on that row alone, not on the others or their number; 16-bit
    types on CUDA, N and K multiples of 16.
    """
    if not _has_kernels(x):
        return functional.linear(x, weight, bias)
    return apply(choose("plain", x, weight, deterministic=deterministic), x, weight, bias)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return rms_norm(x) W^T + b [M, N] for `x` [M, K], `norm_weight` [K] and `weight` [N, K]."""
    if not _has_kernels(x):
        return functional.linear(rms_norm(x, norm_weight, eps), weight, bias)
    tiles = choose("plain", x, weight, deterministic=deterministic)
    return apply(tiles, x, weight, bias, norm_weight=norm_weight, eps=eps)


def norm_gated_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return silu(gate) * up [M, N / 2] of rms_norm(x) W^T + b; rows 2 i and 2 i + 1 of `weight` are gate and up."""
    if not _has_kernels(x):
        return silu_and_mul(functional.linear(rms_norm(x, norm_weight, eps), weight, bias), interleaved=True)
    tiles = choose("gated", x, weight, deterministic=deterministic)
    return apply(tiles, x, weight, bias, norm_weight=norm_weight, eps=eps, gated=True)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """residual [M, N] += x W^T + b, in place, for `x` [M, K] and `weight` [N, K]."""
    if not _has_kernels(x):
        residual.add_(functional.linear(x, weight, bias))
    else:
        apply(choose("add", x, weight, deterministic=deterministic), x, weight, bias, residual=residual)


def _has_kernels(x: torch.Tensor) -> bool:
    return x.element_size() == 2 and runtime.use_triton(x)


def apply(
    tiles: Tiles | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer by one given kernel, None for the library; 16-bit types on the device. Specification: `gemv_reference`.

    What a kernel has not fused is rounded to x's type in between: the normalized x except in `gemv`, and with the
    library the gate and up.
    """
    if isinstance(tiles, GemvTiles):
        return gemv(x, weight, bias, tiles=tiles, norm_weight=norm_weight, eps=eps, gated=gated, residual=residual)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if isinstance(tiles, SkinnyTiles):
        return gemm_skinny(x, weight, bias, tiles=tiles, gated=gated, residual=residual)
    if isinstance(tiles, GemmTiles):
        return gemm(x, weight, bias, tiles=tiles, gated=gated, residual=residual)
    if residual is not None:
        if bias is not None:
            residual.add_(bias)
        return torch.addmm(residual, x, weight.t(), out=residual)
    out = functional.linear(x, weight, bias)
    return silu_and_mul(out, interleaved=True) if gated else out


@dataclass(frozen=True)
class Plan:
    """What a layer of one shape takes: `tiles[i]` (None: the library) up to `rows[i]` rows, the last for all above."""

    rows: tuple[int, ...]
    tiles: tuple[Tiles | None, ...]

    def tiles_for(self, num_rows: int) -> Tiles | None:
        return self.tiles[bisect_left(self.rows, num_rows)]


def choose(kind: str, x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool) -> Tiles | None:
    """The kernel for this call, None for the library. `kind`: plain, gated or add."""
    num_rows, k_size = x.shape
    if num_rows == 0:
        return None
    if deterministic:
        return DETERMINISTIC_TILES
    tiles = plan(kind, weight.shape[0], k_size, x.device).tiles_for(num_rows)
    return None if isinstance(tiles, GemmTiles) and not can_tile(x, weight.shape[0]) else tiles


@cache
def plan(kind: str, n_size: int, k_size: int, device: torch.device) -> Plan:
    """What layers of a kind and shape take on a device: its table's entry, or the default."""
    entries = runtime.tuned_table("linear", device).get(f"{kind} {n_size}x{k_size}")
    if entries is None:
        return default_plan(n_size, k_size, runtime.num_multiprocessors(device))
    return parse_plan(entries)


def parse_plan(entries: Sequence[Mapping[str, Any]]) -> Plan:
    """A plan from its JSON form: {"rows": up to how many, "kernel": name, and its tiles}, the last without `rows`."""
    tiles: list[Tiles | None] = []
    for entry in entries:
        sizes = {name: size for name, size in entry.items() if name not in ("rows", "kernel")}
        tiles.append(None if entry["kernel"] == "library" else _KERNELS[entry["kernel"]](**sizes))
    return Plan(tuple(entry["rows"] for entry in entries[:-1]), tuple(tiles))


def kernel_name(tiles: Tiles | None) -> str:
    """The kernel that takes these tiles, as the tables call it."""
    return next((name for name, kind in _KERNELS.items() if isinstance(tiles, kind)), "library")


def default_plan(n_size: int, k_size: int, multiprocessors: int) -> Plan:
    """For shapes without a table: what was best or near it on most of the shapes that were measured on an H200."""
    blocks = triton.cdiv(n_size, 64)
    splits = 1
    while 4 * blocks * splits < 3 * multiprocessors and k_size >= 1024 * splits:
        splits *= 2
    skinny = SkinnyTiles(block_n=64, block_k=128, num_warps=4, num_stages=4, splits=splits)
    # At 64 rows four stages would not leave room for a second program on a multiprocessor.
    wider = SkinnyTiles(block_n=64, block_k=128, num_warps=4, num_stages=3, splits=splits)
    row = GemvTiles(8, 512, 4) if n_size >= 5120 else GemvTiles(4, 512, 4)
    return Plan((1, 32, 64), (row, skinny, wider, None))
