"""The linear layers that the engine calls: every kernel behind them, their plans, and rows that ignore the batch."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from manta.kernels import linear, runtime
from manta.kernels.gemm import GemmTiles
from manta.kernels.gemm_skinny import SkinnyTiles
from manta.kernels.gemv import GemvTiles, gemv_reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 8e-4, torch.bfloat16: 6e-3}
"""Of a whole result."""
EPS = 1e-5
gpu = pytest.mark.gpu

Layer = Callable[..., torch.Tensor]
"""x, weight, bias, norm weight, residual (left as it was), deterministic -> result."""


def by_linear(x, weight, bias, norm_weight, residual, deterministic):
    return linear.linear(x, weight, bias, deterministic=deterministic)


def by_norm_linear(x, weight, bias, norm_weight, residual, deterministic):
    return linear.norm_linear(x, norm_weight, EPS, weight, bias, deterministic=deterministic)


def by_norm_gated_linear(x, weight, bias, norm_weight, residual, deterministic):
    return linear.norm_gated_linear(x, norm_weight, EPS, weight, bias, deterministic=deterministic)


def by_linear_add(x, weight, bias, norm_weight, residual, deterministic):
    total = residual.clone()
    assert linear.linear_add(x, weight, total, bias, deterministic=deterministic) is None
    return total


LAYERS = [by_linear, by_norm_linear, by_norm_gated_linear, by_linear_add]


def draw(
    rows: int, n_size: int, k_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with a row stride, weight, bias, norm weight, residual."""
    return (
        torch.randn(rows, k_size + 32, device=device).to(dtype)[:, :k_size],
        (torch.randn(n_size, k_size, device=device) * k_size**-0.5).to(dtype),
        torch.randn(n_size, device=device).to(dtype),
        torch.randn(k_size, device=device).to(dtype),
        torch.randn(rows, n_size, device=device).to(dtype),
    )


def expected_of(
    layer: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    norm = {"norm_weight": norm_weight, "eps": EPS} if "norm" in layer.__name__ else {}
    total = residual.clone() if layer is by_linear_add else None
    return gemv_reference(x, weight, bias, gated=layer is by_norm_gated_linear, residual=total, **norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size"),
    [
        (1, 70, 112),
        (2, 70, 112),
        (40, 96, 1040),
        (65, 96, 80),
        *(pytest.param(rows, 6144, 4096, marks=gpu) for rows in (1, 2, 33, 64, 100, 256, 700)),
        *(pytest.param(rows, 4096, 14336, marks=gpu) for rows in (1, 8, 48, 100, 256, 700)),
        *(pytest.param(rows, 28672, 4096, marks=gpu) for rows in (1, 4, 33, 64, 100, 256, 4100)),
        pytest.param(1, 1280, 8192, marks=gpu),
        pytest.param(5, 8192, 3584, marks=gpu),
    ],
)
def test_layers(
    rows: int, n_size: int, k_size: int, layer: Layer, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias, norm_weight, residual = draw(rows, n_size, k_size, dtype, device)
    some_bias = bias if has_bias else None
    expected = expected_of(layer, x, weight, some_bias, norm_weight, residual)
    actual = layer(x, weight, some_bias, norm_weight, residual, False)
    # With the library also the normalized x, gate and up, or residual and bias are rounded: of a few million elements
    # the worst is then up to 1.5 times as far off.
    tolerance = (2 if rows > 64 else 1) * TOLERANCE[dtype]
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    difference = (actual.float() - expected.float()).norm()
    assert difference <= RELATIVE_ERROR[dtype] * expected.float().norm()


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_no_rows(layer: Layer, device: torch.device) -> None:
    x, weight, _, norm_weight, residual = draw(0, 64, 128, torch.bfloat16, device)
    for deterministic in (False, True):
        width = 32 if layer is by_norm_gated_linear else 64
        assert layer(x, weight, None, norm_weight, residual, deterministic).shape == (0, width)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("counts", "n_size", "k_size"),
    [
        ((1, 2, 17, 140), 160, 208),
        *(
            pytest.param((1, 2, 17, 64, 300, 1000), *size, marks=gpu)
            for size in ((6144, 4096), (4096, 14336), (28672, 4096), (1280, 8192))
        ),
    ],
)
def test_deterministic_rows_do_not_depend_on_the_batch(
    counts: tuple[int, ...], n_size: int, k_size: int, layer: Layer, device: torch.device
) -> None:
    x, weight, _, norm_weight, residual = draw(max(counts), n_size, k_size, torch.bfloat16, device)
    whole = layer(x, weight, None, norm_weight, residual, True)
    expected = expected_of(layer, x, weight, None, norm_weight, residual)
    assert_close(whole, expected, rtol=2e-2, atol=2e-2)
    for count in counts:
        for first in (0, max(counts) - count):  # other rows of the tile, other neighbours
            part = slice(first, first + count)
            some = layer(x[part], weight, None, norm_weight, residual[part], True)
            assert_close(some, whole[part], rtol=0, atol=0)


def test_operands_that_the_tma_unit_refuses_take_the_library(device: torch.device) -> None:
    x, weight, _, norm_weight, residual = draw(70, 72, 84, torch.bfloat16, device)
    plan = linear.Plan((), (GemmTiles(64, 64, 64, 4, 3),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "plan", lambda *_: plan)
        assert linear.choose("plain", x, weight, deterministic=False) is None
        actual = linear.norm_linear(x, norm_weight, EPS, weight)
    expected = expected_of(by_norm_linear, x, weight, None, norm_weight, residual)
    assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_a_plan_is_read_from_its_json_form() -> None:
    text = """[
        {"rows": 1, "kernel": "gemv", "block_n": 8, "block_k": 512, "num_warps": 4},
        {"rows": 64, "kernel": "skinny", "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4, "splits": 2},
        {"rows": 512, "kernel": "library"},
        {"kernel": "tiled", "block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3}
    ]"""
    plan = linear.parse_plan(json.loads(text))
    assert plan.tiles_for(1) == GemvTiles(8, 512, 4)
    assert plan.tiles_for(2) == plan.tiles_for(64) == SkinnyTiles(64, 128, 4, 4, 2)
    assert plan.tiles_for(65) is plan.tiles_for(512) is None
    assert plan.tiles_for(513) == plan.tiles_for(100_000) == GemmTiles(128, 256, 64, 8, 3)


def test_default_plans_fill_the_device() -> None:
    small, large = linear.default_plan(1280, 8192, 132), linear.default_plan(28672, 4096, 132)
    assert small.tiles_for(8) == SkinnyTiles(64, 128, 4, 4, 8)
    assert large.tiles_for(8) == SkinnyTiles(64, 128, 4, 4, 1)
    assert small.tiles_for(65) is large.tiles_for(65) is None
    assert linear.default_plan(64, 512, 132).tiles_for(8) == SkinnyTiles(64, 128, 4, 4, 1), "K is short"


def test_shipped_plans_are_whole() -> None:
    tables = runtime.tuned_tables("NVIDIA H200")["linear"]
    for kind, size in (("plain", "6144x4096"), ("add", "4096x4096"), ("gated", "28672x4096"), ("add", "4096x14336")):
        plan = linear.parse_plan(tables[f"{kind} {size}"])
        assert isinstance(plan.tiles_for(1), GemvTiles)
    for entries in tables.values():
        plan = linear.parse_plan(entries)
        assert list(plan.rows) == sorted(set(plan.rows))
        assert "rows" not in entries[-1]
        assert not [t for t, rows in zip(plan.tiles, plan.rows, strict=False) if isinstance(t, GemvTiles) and rows > 1]
        assert not [
            t for t, rows in zip(plan.tiles, plan.rows, strict=False) if isinstance(t, SkinnyTiles) and rows > 256
        ]
        assert not isinstance(plan.tiles[-1], GemvTiles | SkinnyTiles)


@pytest.mark.parametrize("kernel", ["library", "tiled"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_many_rows_are_computed_piece_by_piece(
    layer: Layer, has_bias: bool, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = GemmTiles(128, 64, 64, 4, 2) if kernel == "tiled" else None
    seen: list[int] = []
    apply = linear.apply

    def noted(tiles, x, *others, **options):
        seen.append(len(x))
        return apply(tiles, x, *others, **options)

    monkeypatch.setattr(linear, "apply", noted)
    monkeypatch.setattr(linear, "plan", lambda *_: linear.Plan((), (tiles,), piece=256))
    x, weight, bias, norm_weight, residual = draw(500, 96, 64, torch.bfloat16, device)
    some_bias = bias if has_bias else None
    actual = layer(x, weight, some_bias, norm_weight, residual, False)
    expected = expected_of(layer, x, weight, some_bias, norm_weight, residual)
    assert seen == [256, 244]
    assert_close(actual, expected, rtol=4e-2, atol=4e-2)
