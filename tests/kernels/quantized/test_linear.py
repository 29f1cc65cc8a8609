"""Layers with quantized weights as the engine calls them: every scheme and every kernel behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from manta.kernels import runtime
from manta.kernels.gemm import GemmTiles
from manta.kernels.linear import Plan
from manta.kernels.quantized import linear as quantized
from manta.kernels.quantized.block_gemm_plan import BlockTiles
from manta.kernels.quantized.dequantize import dequantized, dequantized_reference
from manta.kernels.quantized.eight_bit import SwappedTiles
from manta.kernels.quantized.layout import Format, QuantizedWeight
from manta.kernels.quantized.library import library_takes, scale_sums
from manta.kernels.quantized.quantize import quantize_rows_reference
from manta.kernels.quantized.weight_only import WeightOnlyTiles
from tests.kernels.quantized.inputs import Inputs, ordered, random_weight

EPS = 1e-5
gpu = pytest.mark.gpu
SCHEMES = [
    # format, activations, group (0: the row)
    (Format.INT4, None, 128),
    (Format.INT8, None, 0),
    (Format.FP8, None, 128),
    (Format.INT8, Format.INT8, 0),
    (Format.FP8, Format.FP8, 0),
    (Format.FP8, Format.FP8, 128),
]
Layer = Callable[..., torch.Tensor]


def plain(inputs: Inputs, **options: Any) -> torch.Tensor:
    return quantized.linear(inputs.x, inputs.weight, inputs.bias, **options)


def norm(inputs: Inputs, **options: Any) -> torch.Tensor:
    return quantized.norm_linear(inputs.x, inputs.norm_weight, EPS, inputs.weight, inputs.bias, **options)


def norm_gated(inputs: Inputs, **options: Any) -> torch.Tensor:
    return quantized.norm_gated_linear(inputs.x, inputs.norm_weight, EPS, inputs.weight, inputs.bias, **options)


def add(inputs: Inputs, **options: Any) -> torch.Tensor:
    total = inputs.residual.clone()
    assert quantized.linear_add(inputs.x, inputs.weight, total, inputs.bias, **options) is None
    return total


KINDS: dict[Layer, str] = {plain: "plain", norm: "plain", norm_gated: "gated", add: "add"}
LAYERS = list(KINDS)


def expected_of(layer: Layer, inputs: Inputs, activations: Format | None) -> torch.Tensor:
    options: dict[str, Any] = {"norm_weight": inputs.norm_weight, "eps": EPS} if "norm" in layer.__name__ else {}
    residual = inputs.residual.clone() if layer is add else None
    return quantized.linear_reference(
        inputs.x,
        inputs.weight,
        inputs.bias,
        activations=activations,
        gated=layer is norm_gated,
        residual=residual,
        **options,
    )


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert bool(actual.isfinite().all())
    difference = (actual.float() - expected.float()).norm()
    assert difference <= 6e-3 * expected.float().norm()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("format", "activations", "group"), SCHEMES)
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size"),
    [
        (1, 96, 256),
        (65, 64, 128),
        *(pytest.param(rows, 6144, 4096, marks=gpu) for rows in (1, 2, 8, 17, 64, 100, 700)),
        *(pytest.param(rows, 4096, 14336, marks=gpu) for rows in (1, 16, 300)),
    ],
)
def test_layers(
    rows: int, n_size: int, k_size: int, format: Format, activations: Format | None, group: int, layer: Layer,
    deterministic: bool, device: torch.device,
) -> None:  # fmt: skip
    weight = random_weight(format, n_size, k_size, group or k_size, device)
    inputs = Inputs.random(rows, weight, torch.bfloat16)
    takes_library = rows > 64 and not deterministic and library_takes(rows, weight, torch.bfloat16)
    if device.type == "cpu" and takes_library and activations is Format.FP8:
        pytest.skip("the library's FP8 product needs a GPU")
    actual = layer(inputs, activations=activations, deterministic=deterministic)
    tiles = quantized.choose(KINDS[layer], inputs.x, weight, activations, deterministic=deterministic)
    skips_rounding = isinstance(tiles, WeightOnlyTiles)
    assert_near(actual, expected_of(layer, inputs, None if skips_rounding else activations))


PLANS: list[tuple[Format, Format | None, Any]] = [
    (Format.FP8, Format.FP8, WeightOnlyTiles(64, 16, 64, 4, 3)),
    (Format.FP8, Format.FP8, SwappedTiles(64, 16, 128, 4, 3, splits=2)),
    (Format.FP8, Format.FP8, GemmTiles(64, 64, 128, 4, 3)),
    (Format.INT8, Format.INT8, GemmTiles(64, 64, 128, 4, 3)),
    (Format.INT8, None, WeightOnlyTiles(64, 32, 64, 4, 3, splits=2)),
    (Format.INT4, None, None),
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("format", "activations", "tiles"), PLANS)
def test_tables_choose_the_kernel(
    format: Format,
    activations: Format | None,
    tiles: Any,
    layer: Layer,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    apply = quantized.apply

    def noted(tiles: Any, *others: Any, **options: Any) -> torch.Tensor:
        seen.append(tiles)
        return apply(tiles, *others, **options)

    monkeypatch.setattr(quantized, "apply", noted)
    monkeypatch.setattr(quantized, "plan", lambda *_: Plan((), (tiles,)))
    inputs = Inputs.random(20, random_weight(format, 96, 256, 256, device), torch.bfloat16)
    actual = layer(inputs, activations=activations)
    assert seen == [tiles]
    skips_rounding = isinstance(tiles, WeightOnlyTiles)
    assert_near(actual, expected_of(layer, inputs, None if skips_rounding else activations))


def test_tables_of_blocks_are_for_weights_in_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "plan", lambda *_: Plan((), (BlockTiles(6),)))
    monkeypatch.setattr(runtime, "has_inline_ptx", lambda _: True)
    monkeypatch.setattr(runtime, "capability", lambda _: 90)
    weight = random_weight(Format.FP8, 256, 256, 128, device)
    x = torch.zeros(200, 256, dtype=torch.bfloat16, device=device)
    in_blocks = replace(weight, scales=torch.ones_like(weight.scales), uniform_rows=128)
    assert quantized.choose("plain", x, in_blocks, Format.FP8, deterministic=False) == BlockTiles(6)
    assert isinstance(quantized.choose("plain", x, weight, Format.FP8, deterministic=False), GemmTiles)
    monkeypatch.setattr(runtime, "capability", lambda _: 100)
    assert isinstance(quantized.choose("plain", x, in_blocks, Format.FP8, deterministic=False), GemmTiles)


@pytest.mark.parametrize(("format", "activations", "group"), SCHEMES)
def test_columns_in_another_order(format: Format, activations: Format | None, group: int, device: torch.device) -> None:
    if group and activations:
        pytest.skip("groups of rows cannot be shuffled")
    weight = ordered(random_weight(format, 64, 256, group or 256, device))
    inputs = Inputs.random(3, weight, torch.bfloat16)
    assert_near(norm(inputs, activations=activations), expected_of(norm, inputs, activations))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("counts", [(1, 20), pytest.param((1, 2, 17, 64, 300), marks=gpu)])
def test_deterministic_rows_do_not_depend_on_the_batch(
    counts: tuple[int, ...], layer: Layer, device: torch.device
) -> None:
    for format, activations, group in SCHEMES:
        weight = random_weight(format, 64, 128, group or 128, device)
        inputs = Inputs.random(max(counts), weight, torch.bfloat16)
        whole = layer(inputs, activations=activations, deterministic=True)
        for count in counts:
            some = Inputs(inputs.x[-count:], weight, inputs.bias, inputs.norm_weight, inputs.residual[-count:])
            assert_close(layer(some, activations=activations, deterministic=True), whole[-count:], rtol=0, atol=0)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("format", "group", "n_size", "k_size"),
    [(Format.INT4, 32, 20, 256), (Format.INT4, 0, 5, 100), (Format.INT8, 128, 20, 256), (Format.FP8, 0, 20, 144)],
)
def test_weights_are_written_out(
    format: Format, group: int, n_size: int, k_size: int, zeros: bool, device: torch.device
) -> None:
    weight = random_weight(format, n_size, k_size, group or k_size, device, zeros=zeros)
    for dtype in (torch.bfloat16, torch.float32):
        actual = dequantized(weight, dtype)
        assert_close(actual, dequantized_reference(weight, dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_what_stands_behind_an_int8_product_of_the_library(gated: bool, device: torch.device) -> None:
    weight = random_weight(Format.INT8, 96, 64, 64, device)
    inputs = Inputs.random(5, weight, torch.bfloat16)
    rows = quantize_rows_reference(inputs.x, Format.INT8)
    sums = (rows.values.double() @ weight.weight.double().t()).int()
    residual = None if gated else inputs.residual.clone()
    actual = scale_sums(sums, rows, weight, inputs.bias, dtype=torch.bfloat16, gated=gated, residual=residual)
    wanted = None if gated else inputs.residual.clone()
    expected = quantized.linear_reference(
        inputs.x, weight, inputs.bias, activations=Format.INT8, gated=gated, residual=wanted
    )
    assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_no_rows(device: torch.device) -> None:
    inputs = Inputs.random(0, random_weight(Format.INT4, 64, 128, 128, device), torch.bfloat16)
    assert norm_gated(inputs).shape == (0, 32)
    assert add(inputs).shape == (0, 64)


def test_activations_that_the_weight_cannot_meet_are_refused(device: torch.device) -> None:
    weights: list[tuple[QuantizedWeight, Format]] = [
        (random_weight(Format.INT4, 64, 128, 128, device), Format.INT8),
        (random_weight(Format.FP8, 64, 128, 128, device), Format.INT8),
        (random_weight(Format.INT8, 64, 128, 32, device), Format.INT8),
    ]
    for weight, activations in weights:
        with pytest.raises(ValueError, match="cannot meet"):
            plain(Inputs.random(2, weight, torch.bfloat16), activations=activations)


def test_default_plans_fill_the_device() -> None:
    assert quantized.default_plan("linear_w4a16", 6144, 4096).tiles_for(1) == WeightOnlyTiles(64, 8, 128, 4, 3, 4)
    assert quantized.default_plan("linear_w4a16", 28672, 4096).tiles_for(20) == WeightOnlyTiles(64, 32, 128, 4, 3, 1)
    assert quantized.default_plan("linear_fp8", 4096, 14336).tiles_for(16) == SwappedTiles(64, 16, 256, 4, 4, 4)
    assert quantized.default_plan("linear_fp8", 4096, 14336).tiles_for(65) is None
