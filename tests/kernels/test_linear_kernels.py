"""The three products behind a linear layer, each with every fused piece, against plain torch in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.gemm import DETERMINISTIC_TILES, GemmTiles, can_tile, gemm
from manta.kernels.gemm_skinny import SkinnyTiles, gemm_skinny
from manta.kernels.gemv import GemvTiles, gemv, gemv_reference

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float16, torch.bfloat16]
gpu = pytest.mark.gpu


@dataclass(frozen=True)
class Inputs:
    """x [M, K] whose row stride is not K, weight [N, K] with results of order one."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    norm_weight: torch.Tensor
    residual: torch.Tensor

    @classmethod
    def random(cls, rows: int, n_size: int, k_size: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        return cls(
            draw(rows, k_size + 32).to(dtype)[:, :k_size],
            (draw(n_size, k_size) * k_size**-0.5).to(dtype),
            draw(n_size).to(dtype),
            draw(k_size).to(dtype),
            draw(rows, n_size + 16).to(dtype)[:, :n_size],
        )


FUSED = ["plain", "bias", "gated", "gated-bias", "add", "add-bias"]


def check(kernel: Callable[..., torch.Tensor], inputs: Inputs, fused: str, **options: Any) -> None:
    """One call against the reference; a residual is added to in place, and only where it should be."""
    bias = inputs.bias if "bias" in fused else None
    gated = fused.startswith("gated")
    dtype = inputs.x.dtype
    norm = {name: options[name] for name in ("norm_weight", "eps") if name in options}
    residual = expected_residual = None
    wide = torch.full((inputs.residual.shape[0] + 2, inputs.residual.shape[1] + 16), 7.0, device=inputs.x.device)
    wide = wide.to(dtype)
    if fused.startswith("add"):
        residual = wide[:-2, : inputs.residual.shape[1]]
        residual.copy_(inputs.residual)
        expected_residual = inputs.residual.clone()
    expected = gemv_reference(inputs.x, inputs.weight, bias, gated=gated, residual=expected_residual, **norm)
    actual = kernel(inputs.x, inputs.weight, bias, gated=gated, residual=residual, **options)
    assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if residual is not None:
        assert actual is residual
        assert bool((wide[-2:] == 7.0).all())
        assert bool((wide[:, residual.shape[1] :] == 7.0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("n_size", "k_size", "tiles"),
    [
        (70, 112, GemvTiles(4, 64, 1)),
        (34, 256, GemvTiles(8, 128, 1)),
        (6, 1040, GemvTiles(2, 512, 2)),
        pytest.param(6144, 4096, GemvTiles(8, 512, 4), marks=gpu),
        pytest.param(8192, 1024, GemvTiles(2, 512, 2), marks=gpu),
        pytest.param(4096, 14336, GemvTiles(2, 1024, 4), marks=gpu),
    ],
)
def test_gemv(
    n_size: int, k_size: int, tiles: GemvTiles, norm: bool, fused: str, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = Inputs.random(1, n_size, k_size, dtype, device)
    options: dict[str, Any] = {"norm_weight": inputs.norm_weight, "eps": 0.1} if norm else {}
    check(gemv, inputs, fused, tiles=tiles, **options)


def test_gemv_of_an_odd_number_of_rows(device: torch.device) -> None:
    inputs = Inputs.random(1, 37, 80, torch.bfloat16, device)
    for fused in ("plain", "bias", "add"):
        check(gemv, inputs, fused, tiles=GemvTiles(4, 32, 1))


SKINNY = [
    # rows, N, K, tiles
    (2, 70, 112, SkinnyTiles(64, 64, 4, 3, 1)),
    (17, 130, 336, SkinnyTiles(64, 64, 4, 3, 3)),
    (5, 64, 80, SkinnyTiles(64, 64, 4, 3, 8)),
    (48, 70, 256, SkinnyTiles(64, 128, 4, 3, 2)),
    pytest.param(2, 6144, 4096, SkinnyTiles(64, 128, 4, 4, 2), marks=gpu),
    pytest.param(64, 4096, 14336, SkinnyTiles(64, 128, 4, 3, 4), marks=gpu),
    pytest.param(100, 28672, 4096, SkinnyTiles(64, 128, 4, 3, 1), marks=gpu),
    pytest.param(200, 1280, 8192, SkinnyTiles(128, 64, 8, 3, 4), marks=gpu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(("rows", "n_size", "k_size", "tiles"), SKINNY)
def test_gemm_skinny(
    rows: int, n_size: int, k_size: int, tiles: SkinnyTiles, fused: str, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = Inputs.random(rows, n_size, k_size, dtype, device)
    check(gemm_skinny, inputs, fused, tiles=tiles)
    check(gemm_skinny, inputs, fused, tiles=tiles)  # the arrival counters are zero again


def test_gemm_skinny_of_an_odd_number_of_columns(device: torch.device) -> None:
    inputs = Inputs.random(3, 67, 144, torch.bfloat16, device)
    for fused in ("plain", "bias", "add"):
        check(gemm_skinny, inputs, fused, tiles=SkinnyTiles(64, 64, 4, 3, 2))


TILED = [
    # rows, N, K, tiles
    (70, 144, 80, GemmTiles(64, 64, 64, 4, 3)),
    (3, 80, 208, GemmTiles(64, 64, 64, 4, 3, splits=2)),
    (150, 160, 144, GemmTiles(64, 128, 64, 4, 3, subtiles=2)),
    (65, 96, 336, GemmTiles(64, 64, 64, 4, 3, splits=3, subtiles=2)),
    pytest.param(300, 6160, 4096, GemmTiles(128, 256, 64, 8, 3, subtiles=2), marks=gpu),
    pytest.param(1000, 4096, 4096, GemmTiles(128, 256, 64, 8, 3, subtiles=2), marks=gpu),
    pytest.param(256, 4096, 14336, GemmTiles(64, 128, 128, 4, 4), marks=gpu),
    pytest.param(100, 8192, 3584, GemmTiles(64, 128, 64, 4, 4, splits=4, programs=2), marks=gpu),
    pytest.param(333, 28672, 4096, GemmTiles(256, 128, 64, 8, 3, subtiles=2), marks=gpu),
    pytest.param(700, 28672, 4096, DETERMINISTIC_TILES, marks=gpu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(("rows", "n_size", "k_size", "tiles"), TILED)
def test_gemm(
    rows: int, n_size: int, k_size: int, tiles: GemmTiles, fused: str, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = Inputs.random(rows, n_size, k_size, dtype, device)
    check(gemm, inputs, fused, tiles=tiles)
    check(gemm, inputs, fused, tiles=tiles)


def test_what_can_be_tiled(device: torch.device) -> None:
    x = torch.zeros(4, 64, device=device, dtype=torch.bfloat16)
    assert can_tile(x, 128)
    assert not can_tile(x, 120), "half a tile of a gated result would not end at 16 bytes"
    assert not can_tile(x[:, :60], 128)
    assert not can_tile(x.flatten()[1:241].view(4, 60)[:, :56], 128), "neither base nor rows at 16 bytes"
    assert can_tile(x[:1], 128)


@pytest.mark.parametrize("splits", [2, 4])
def test_split_sums_do_not_depend_on_the_run(splits: int, device: torch.device) -> None:
    rows, n_size, k_size = (33, 4096, 4096) if device.type == "cuda" else (17, 70, 512)
    inputs = Inputs.random(rows, n_size, k_size, torch.bfloat16, device)
    tiles = SkinnyTiles(64, 128, 4, 3, splits)
    first = gemm_skinny(inputs.x, inputs.weight, tiles=tiles)
    for _ in range(20 if device.type == "cuda" else 2):
        assert_close(gemm_skinny(inputs.x, inputs.weight, tiles=tiles), first, rtol=0, atol=0)


@gpu
def test_split_sums_in_replayed_graphs(device: torch.device) -> None:
    """Two graphs whose replays are not in step count their arrivals without being cleared in between."""
    tiles = SkinnyTiles(64, 128, 4, 3, 4)
    inputs = Inputs.random(16, 4096, 4096, torch.bfloat16, device)
    expected = gemm_skinny(inputs.x, inputs.weight, tiles=tiles)
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(gemm_skinny(inputs.x, inputs.weight, tiles=tiles))
        graphs.append(graph)
    for index in (0, 1, 1, 0, 0, 0, 1):
        outs[index].fill_(torch.nan)
        graphs[index].replay()
        assert_close(outs[index], expected, rtol=0, atol=0)
