"""One row of 16 bits times quantized weights, with norm, gate and residual, against dequantized weights in fp32."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized.gemv import QuantizedGemvTiles, quantized_gemv, quantized_gemv_reference
from manta.kernels.quantized.layout import Format, QuantizedWeight
from tests.kernels.quantized.inputs import Inputs, random_weight

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
gpu = pytest.mark.gpu
SMALL = QuantizedGemvTiles(4, 2, 4)
SHAPES = [
    # format, group (0: the row), N, K, tiles
    (Format.INT4, 128, 70, 512, SMALL),
    (Format.INT4, 32, 34, 256, SMALL),
    (Format.INT4, 64, 34, 192, SMALL),
    (Format.INT4, 0, 70, 336, SMALL),
    (Format.INT8, 0, 70, 208, SMALL),
    (Format.INT8, 32, 66, 96, SMALL),
    (Format.INT8, 128, 34, 512, SMALL),
    (Format.FP8, 0, 70, 208, SMALL),
    (Format.FP8, 128, 66, 336, SMALL),
    *(
        pytest.param(format, group, n_size, k_size, tiles, marks=gpu)
        for format, group in ((Format.INT4, 128), (Format.INT8, 0), (Format.FP8, 0), (Format.FP8, 128))
        for n_size, k_size, tiles in (
            (6144, 4096, QuantizedGemvTiles(2, 16, 4)),
            (4096, 14336, QuantizedGemvTiles(8, 8, 8)),
            (28672, 4096, QuantizedGemvTiles(4, 8, 2)),
        )
    ),
]  # fmt: skip


def check(weight: QuantizedWeight, dtype: torch.dtype, tiles: QuantizedGemvTiles, fused: str) -> None:
    inputs = Inputs.random(1, weight, dtype)
    around = {
        "bias": inputs.bias if "bias" in fused else None,
        "norm_weight": inputs.norm_weight if "norm" in fused else None,
        "eps": 1e-5,
        "gated": "gated" in fused,
    }
    residual = inputs.residual.clone() if "add" in fused else None
    expected = quantized_gemv_reference(
        inputs.x, weight, residual=None if residual is None else residual.clone(), **around
    )
    actual = quantized_gemv(inputs.x, weight, tiles=tiles, residual=residual, **around)
    tolerance = TOLERANCE[dtype]
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert residual is None or actual is residual


@pytest.mark.parametrize("inline_ptx", [True, False])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("format", "group", "n_size", "k_size", "tiles"), SHAPES)
def test_products(
    format: Format,
    group: int,
    n_size: int,
    k_size: int,
    tiles: QuantizedGemvTiles,
    dtype: torch.dtype,
    zeros: bool,
    inline_ptx: bool,
    device: torch.device,
) -> None:
    if (zeros and format is Format.FP8) or (inline_ptx and device.type != "cuda"):
        pytest.skip("no such weight, or no assembly here")
    weight = random_weight(format, n_size, k_size, group or k_size, device, zeros=zeros)
    check(weight, dtype, QuantizedGemvTiles(tiles.block_n, tiles.pieces, tiles.num_warps, inline_ptx), "plain")


@pytest.mark.parametrize("fused", ["bias", "norm", "norm-gated", "norm-gated-bias", "add", "add-bias"])
@pytest.mark.parametrize(("format", "group"), [(Format.INT4, 128), (Format.INT8, 0), (Format.FP8, 0)])
def test_what_stands_around_a_product(format: Format, group: int, fused: str, device: torch.device) -> None:
    check(random_weight(format, 70, 512, group or 512, device), torch.bfloat16, SMALL, fused)
