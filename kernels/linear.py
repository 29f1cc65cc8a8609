"""A linear layer with what stands around it: the norm in front, the gate or the residual behind. Knows no model.

Which kernel computes it, and how, is a function of the shape and the number of rows, read from the device's table
("linear": {"plain 6144x4096": [...]}, N x K, each entry for up to `rows` rows); without an entry:

- one row: `gemv`, norm and all in one launch;
- 2 to 64 rows: `gemm_skinny`, K split until the device is full;
- more: the library (cuBLAS) with norm and activation kernels of their own.

A table may also bound the rows of one launch: more are computed piece by piece, so that what programs share stays in
the L2 cache.

fp32, and everything on CPU, takes the plain composition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

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
T = TypeVar("T")
_KERNELS: dict[str, Any] = {"gemv": GemvTiles, "skinny": SkinnyTiles, "tiled": GemmTiles}
_PIECE_MULTIPLE = 128
"""Rows: a tile's."""


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, deterministic: bool = False
) -> torch.Tensor:
    """Return x W^T + b [M, N], a fresh tensor, for `x` [M, K] and `weight` [N, K].

    `deterministic`, here and below: a row's bits depend on that row alone, not on the others or their number; 16-bit
    types on CUDA, N and K multiples of 16.
    """
    if not _has_kernels(x):
        return functional.linear(x, weight, bias)
    return _by_pieces("plain", x, weight, bias, deterministic=deterministic)


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
    return _by_pieces("plain", x, weight, bias, norm_weight=norm_weight, eps=eps, deterministic=deterministic)


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
    return _by_pieces("gated", x, weight, bias, norm_weight=norm_weight, eps=eps, deterministic=deterministic)


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
        _by_pieces("add", x, weight, bias, residual=residual, deterministic=deterministic)


def _by_pieces(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    deterministic: bool,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, (n_size, k_size) = x.shape[0], weight.shape
    around: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "gated": kind == "gated"}
    most = plan(kind, n_size, k_size, x.device).piece
    if most is None or num_rows <= most:
        tiles = choose(kind, x, weight, deterministic=deterministic)
        return apply(tiles, x, weight, bias, residual=residual, **around)
    out = residual
    if out is None:
        out = torch.empty((num_rows, n_size // 2 if kind == "gated" else n_size), dtype=x.dtype, device=x.device)
    size = triton.cdiv(triton.cdiv(num_rows, triton.cdiv(num_rows, most)), _PIECE_MULTIPLE) * _PIECE_MULTIPLE
    for begin in range(0, num_rows, size):
        part = slice(begin, begin + size)
        tiles = choose(kind, x[part], weight, deterministic=deterministic)
        own = None if residual is None else residual[part]
        apply(tiles, x[part], weight, bias, residual=own, out=out[part], **around)
    return out


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer by one given kernel, None for the library; 16-bit types on the device. Specification: `gemv_reference`.

    `out` [M, N], or half as wide when `gated`: where the result goes; with `residual` it goes there. Only the kernels
    of many rows take it.
    What a kernel has not fused is rounded to x's type in between: the normalized x except in `gemv`, and with the
    library the gate and up.
    """
    assert out is None or not isinstance(tiles, GemvTiles | SkinnyTiles)
    if isinstance(tiles, GemvTiles):
        return gemv(x, weight, bias, tiles=tiles, norm_weight=norm_weight, eps=eps, gated=gated, residual=residual)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if isinstance(tiles, SkinnyTiles):
        return gemm_skinny(x, weight, bias, tiles=tiles, gated=gated, residual=residual)
    if isinstance(tiles, GemmTiles):
        return gemm(x, weight, bias, tiles=tiles, gated=gated, residual=residual, out=out)
    if residual is not None:
        if bias is not None:
            residual.add_(bias)
        return torch.addmm(residual, x, weight.t(), out=residual)
    if gated:
        return silu_and_mul(functional.linear(x, weight, bias), interleaved=True, out=out)
    if out is None:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@dataclass(frozen=True)
class Plan(Generic[T]):
    """What a layer of one shape takes: `tiles[i]` (None: the library) up to `rows[i]` rows, the last for all above."""

    rows: tuple[int, ...]
    tiles: tuple[T | None, ...]
    piece: int | None = None
    """Most rows of one launch."""

    def tiles_for(self, num_rows: int) -> T | None:
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
def plan(kind: str, n_size: int, k_size: int, device: torch.device) -> Plan[Tiles]:
    """What layers of a kind and shape take on a device: its table's entry, or the default."""
    entries = runtime.tuned_table("linear", device).get(f"{kind} {n_size}x{k_size}")
    if entries is None:
        return default_plan(n_size, k_size, runtime.num_multiprocessors(device))
    return parse_plan(entries)


def parse_plan(entries: Sequence[Mapping[str, Any]], kernels: Mapping[str, Any] = _KERNELS) -> Plan[Any]:
    """A plan from its JSON form: {"rows": up to how many, "kernel": name, and its tiles}, the last without `rows`, but
    possibly with `piece`. `kernels`: the class of the tiles by name, other than "library"."""
    tiles: list[Any] = []
    for entry in entries:
        sizes = {name: size for name, size in entry.items() if name not in ("rows", "kernel", "piece")}
        tiles.append(None if entry["kernel"] == "library" else kernels[entry["kernel"]](**sizes))
    piece = entries[-1].get("piece")
    assert piece is None or piece % _PIECE_MULTIPLE == 0
    return Plan(tuple(entry["rows"] for entry in entries[:-1]), tuple(tiles), piece)


def kernel_name(tiles: object, kernels: Mapping[str, Any] = _KERNELS) -> str:
    """The kernel that takes these tiles, as the tables call it."""
    return next((name for name, kind in kernels.items() if isinstance(tiles, kind)), "library")


def default_plan(n_size: int, k_size: int, multiprocessors: int) -> Plan[Tiles]:
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
