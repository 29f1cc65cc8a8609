"""16-bit activations times quantized weights, with every fused piece, against dequantized weights in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized.layout import Format
from manta.kernels.quantized.weight_only import WeightOnlyTiles, weight_only_product, weight_only_reference
from tests.kernels.quantized.inputs import Inputs, random_weight

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
gpu = pytest.mark.gpu
SMALL = WeightOnlyTiles(64, 16, 64, 4, 3)


def check(inputs: Inputs, tiles: WeightOnlyTiles, fused: str = "plain") -> None:
    bias = inputs.bias if "bias" in fused else None
    gated = fused.startswith("gated")
    residual = inputs.residual.clone() if fused.startswith("add") else None
    expected_residual = None if residual is None else residual.clone()
    expected = weight_only_reference(inputs.x, inputs.weight, bias, gated=gated, residual=expected_residual)
    actual = weight_only_product(inputs.x, inputs.weight, bias, tiles=tiles, gated=gated, residual=residual)
    tolerance = TOLERANCE[inputs.x.dtype]
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert residual is None or actual is residual


FORMATS = [(Format.INT4, 128), (Format.INT4, 32), (Format.INT8, 0), (Format.FP8, 0), (Format.FP8, 128)]
SHAPES = [
    # format, group (0: the row), rows, N, K, tiles
    (Format.INT4, 128, 3, 70, 512, SMALL),
    (Format.INT4, 128, 5, 70, 768, replace(SMALL, splits=3)),
    (Format.INT4, 64, 17, 66, 256, SMALL),
    (Format.INT4, 32, 3, 66, 256, SMALL),
    (Format.INT4, 0, 2, 70, 336, replace(SMALL, splits=2)),
    (Format.INT4, 64, 2, 34, 192, SMALL),
    (Format.INT4, 16, 2, 34, 192, SMALL),
    (Format.INT4, 128, 11, 34, 576, replace(SMALL, block_k=128, splits=2)),
    (Format.INT4, 0, 11, 34, 576, replace(SMALL, block_k=128)),
    (Format.INT8, 0, 3, 70, 208, SMALL),
    (Format.INT8, 128, 18, 130, 512, replace(SMALL, splits=2)),
    (Format.INT8, 32, 3, 66, 96, SMALL),
    (Format.FP8, 0, 3, 70, 208, SMALL),
    (Format.FP8, 128, 33, 66, 336, replace(SMALL, block_k=128, block_m=32, splits=2)),
    *(
        pytest.param(format, group, rows, n_size, k_size, tiles, marks=gpu)
        for format, group in FORMATS
        for rows, n_size, k_size, tiles in (
            (1, 6144, 4096, WeightOnlyTiles(64, 8, 128, 4, 3, 4)),
            (8, 28672, 4096, WeightOnlyTiles(64, 8, 128, 4, 3, 1)),
            (16, 4096, 14336, WeightOnlyTiles(64, 16, 128, 4, 3, 8)),
            (16, 28672, 4096, WeightOnlyTiles(64, 16, 128, 4, 4, 1)),
            (30, 4096, 14336, WeightOnlyTiles(64, 32, 128, 4, 3, 4)),
            (16, 4096, 4096, WeightOnlyTiles(32, 16, 128, 2, 3, 2)),
            (64, 4096, 4096, WeightOnlyTiles(128, 64, 128, 8, 3, 2)),
            (64, 4096, 4096, WeightOnlyTiles(64, 64, 128, 4, 3, 2)),
            (200, 4096, 4096, WeightOnlyTiles(128, 128, 64, 8, 2, 1)),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("inline_ptx", [True, False])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("format", "group", "rows", "n_size", "k_size", "tiles"), SHAPES)
def test_products(
    format: Format,
    group: int,
    rows: int,
    n_size: int,
    k_size: int,
    tiles: WeightOnlyTiles,
    dtype: torch.dtype,
    zeros: bool,
    inline_ptx: bool,
    device: torch.device,
) -> None:
    if (zeros and format is Format.FP8) or (inline_ptx and device.type != "cuda"):
        pytest.skip("no such weight, or no assembly here")
    weight = random_weight(format, n_size, k_size, group or k_size, device, zeros=zeros)
    check(Inputs.random(rows, weight, dtype), replace(tiles, inline_ptx=inline_ptx))


@pytest.mark.parametrize("fused", ["bias", "gated", "gated-bias", "add", "add-bias"])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", [4, 20])
def test_what_stands_around_a_product(rows: int, splits: int, fused: str, device: torch.device) -> None:
    weight = random_weight(Format.INT4, 70, 512, 128, device)
    check(Inputs.random(rows, weight, torch.bfloat16), replace(SMALL, splits=splits), fused)


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16], ids=str)
def test_scales_and_zero_points_of_16_bits(scales: torch.dtype, device: torch.device) -> None:
    weight = random_weight(Format.INT4, 66, 256, 64, device, zeros=True, scales=scales)
    check(Inputs.random(3, weight, torch.bfloat16), SMALL)
