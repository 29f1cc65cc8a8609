"""Products of two 8-bit operands, with every fused piece, against dequantized operands in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from manta.kernels import runtime
from manta.kernels.gemm import GemmTiles
from manta.kernels.quantized.block_gemm_plan import BlockTiles, takes_blocks
from manta.kernels.quantized.eight_bit import (
    SwappedTiles,
    can_multiply,
    eight_bit_reference,
    row_group,
    swapped_product,
    tiled_product,
)
from manta.kernels.quantized.layout import Format, QuantizedWeight
from manta.kernels.quantized.quantize import quantize_rows_reference
from tests.kernels.quantized.inputs import Inputs, random_weight

gpu = pytest.mark.gpu
FUSED = ["plain", "bias", "gated", "gated-bias", "add", "add-bias"]
FORMATS = [(Format.INT8, 0), (Format.FP8, 0), (Format.FP8, 128)]


def check(
    product: Callable[..., torch.Tensor], rows: int, weight: QuantizedWeight, fused: str, dtype: torch.dtype, tiles: Any
) -> None:
    inputs = Inputs.random(rows, weight, dtype)
    quantized = quantize_rows_reference(inputs.x, weight.format, row_group(weight))
    bias = inputs.bias if "bias" in fused else None
    gated = fused.startswith("gated")
    residual = inputs.residual.clone() if fused.startswith("add") else None
    expected_residual = None if residual is None else residual.clone()
    expected = eight_bit_reference(quantized, weight, bias, dtype=dtype, gated=gated, residual=expected_residual)
    actual = product(quantized, weight, bias, dtype=dtype, tiles=tiles, gated=gated, residual=residual)
    assert actual.dtype == dtype
    tolerance = 2e-3 if dtype == torch.float16 else 1e-2
    allowed_error = 2.5e-3
    if weight.format is Format.FP8 and weight.group >= weight.in_features and weight.weight.is_cuda:
        tolerance, allowed_error = 5e-2, 6e-3  # what the tensor core's sums lose, see `swapped_product`
    elif weight.format is Format.FP8 and weight.weight.is_cuda:
        tolerance = max(tolerance, 5e-3)  # they lose it of each 128 elements, too
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < allowed_error
    assert residual is None or actual is residual


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size", "tiles"),
    [
        (3, 70, 256, SwappedTiles(64, 16, 128, 4, 3)),
        (20, 66, 384, SwappedTiles(64, 16, 128, 4, 3, splits=2)),
        (20, 66, 1024, SwappedTiles(64, 32, 128, 4, 3, splits=2, unroll=2)),
        (3, 66, 640, SwappedTiles(64, 16, 128, 4, 3, splits=2, unroll=2)),
        pytest.param(1, 6144, 4096, SwappedTiles(64, 16, 256, 4, 4, splits=2), marks=gpu),
        pytest.param(16, 4096, 14336, SwappedTiles(64, 16, 256, 4, 3, splits=4), marks=gpu),
        pytest.param(64, 28672, 4096, SwappedTiles(64, 64, 128, 4, 3), marks=gpu),
        pytest.param(50, 4096, 14336, SwappedTiles(64, 64, 128, 8, 3, splits=4, unroll=2), marks=gpu),
    ],
)
def test_few_rows(
    rows: int, n_size: int, k_size: int, tiles: SwappedTiles, format: Format, group: int, fused: str,
    device: torch.device,
) -> None:  # fmt: skip
    check(
        swapped_product,
        rows,
        random_weight(format, n_size, k_size, group or k_size, device),
        fused,
        torch.bfloat16,
        tiles,
    )


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("format", [Format.INT8, Format.FP8])
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size", "tiles"),
    [
        (3, 96, 272, SwappedTiles(64, 16, 128, 4, 3, tma=True)),
        (20, 64, 384, SwappedTiles(64, 16, 128, 4, 3, splits=2, tma=True)),
        pytest.param(1, 28672, 4096, SwappedTiles(128, 16, 256, 4, 3, tma=True), marks=gpu),
        pytest.param(64, 4096, 14336, SwappedTiles(64, 64, 256, 4, 3, splits=4, tma=True), marks=gpu),
    ],
)
def test_few_rows_by_tma(
    rows: int, n_size: int, k_size: int, tiles: SwappedTiles, format: Format, fused: str, device: torch.device
) -> None:
    check(swapped_product, rows, random_weight(format, n_size, k_size, k_size, device), fused, torch.bfloat16, tiles)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size", "tiles"),
    [
        (70, 96, 256, GemmTiles(64, 64, 128, 4, 3)),
        (33, 160, 128, GemmTiles(64, 128, 64, 4, 3, subtiles=2)),
        pytest.param(300, 6144, 4096, GemmTiles(128, 128, 128, 8, 4), marks=gpu),
        pytest.param(1000, 4096, 14336, GemmTiles(128, 128, 128, 8, 3), marks=gpu),
    ],
)
def test_many_rows(
    rows: int, n_size: int, k_size: int, tiles: GemmTiles, format: Format, group: int, fused: str,
    device: torch.device,
) -> None:  # fmt: skip
    check(
        tiled_product,
        rows,
        random_weight(format, n_size, k_size, group or k_size, device),
        fused,
        torch.bfloat16,
        tiles,
    )


@pytest.mark.parametrize("format", [Format.INT8, Format.FP8])
def test_rows_that_end_within_a_step(format: Format, device: torch.device) -> None:
    weight = random_weight(format, 66, 208, 208, device)
    check(swapped_product, 3, weight, "plain", torch.float16, SwappedTiles(64, 16, 128, 4, 3, splits=2))


@pytest.mark.parametrize("fused", ["plain", "gated"])
def test_scales_that_blocks_of_rows_share(fused: str, device: torch.device) -> None:
    weight = random_weight(Format.FP8, 256, 256, 128, device)
    even_and_odd = weight.scales.view(2, 2, 64, 2)[:, :, :1].expand(2, 2, 64, 2)
    weight = replace(weight, scales=even_and_odd.reshape(2, 256), uniform_rows=128)
    check(tiled_product, 70, weight, fused, torch.bfloat16, GemmTiles(64, 128, 128, 4, 3))


def weight_in_blocks(n_size: int, k_size: int, device: torch.device) -> QuantizedWeight:
    """In each block of 128 x 128 the even rows share a scale and the odd ones another."""
    weight = random_weight(Format.FP8, n_size, k_size, 128, device)
    of_blocks = weight.scales.view(-1, n_size // 128, 64, 2)[:, :, :1].expand(-1, -1, 64, -1)
    return replace(weight, scales=of_blocks.reshape(-1, n_size), uniform_rows=128)


def block_product(*args: Any, **kwargs: Any) -> torch.Tensor:
    from manta.kernels.quantized.block_gemm_hopper import block_product as product

    return product(*args, **kwargs)


BLOCK_TILES = [BlockTiles(6), BlockTiles(5), BlockTiles(2), BlockTiles(8, 64), BlockTiles(6, 64, 2)]


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the kernel's instructions exist on Hopper GPUs alone")
    return device


@gpu
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(
    ("tiles", "dtype"),
    [
        (BLOCK_TILES[0], torch.bfloat16),
        (BLOCK_TILES[1], torch.bfloat16),
        (BLOCK_TILES[0], torch.float16),
        (BLOCK_TILES[3], torch.bfloat16),
        (BlockTiles(3, 64), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size"),
    [
        (1, 256, 256),
        (70, 384, 384),  # blocks of K that fill no turn of the loop
        (129, 256, 640),
        (129, 6144, 4096),
        (1000, 4096, 14336),
        (1000, 1152, 896),
        (2048, 6144, 4096),
        (2048, 28672, 1024),
    ],
)
def test_products_of_blocks(
    rows: int, n_size: int, k_size: int, tiles: BlockTiles, dtype: torch.dtype, fused: str, hopper: torch.device
) -> None:
    check(block_product, rows, weight_in_blocks(n_size, k_size, hopper), fused, dtype, tiles)


@gpu
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(
    ("tiles", "dtype"), [(BLOCK_TILES[4], torch.bfloat16), (BlockTiles(4, 128, 2), torch.float16)], ids=str
)
@pytest.mark.parametrize(
    ("rows", "n_size", "k_size"),
    [
        (1, 256, 256),
        (70, 384, 384),  # halves that differ
        (128, 4096, 14336),
        (256, 6144, 4096),  # programs have several halves
        (300, 1152, 896),
    ],
)
def test_products_of_blocks_whose_k_two_programs_share(
    rows: int, n_size: int, k_size: int, tiles: BlockTiles, dtype: torch.dtype, fused: str, hopper: torch.device
) -> None:
    check(block_product, rows, weight_in_blocks(n_size, k_size, hopper), fused, dtype, tiles)


@gpu
@pytest.mark.parametrize("tiles", BLOCK_TILES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_other_rows(tiles: BlockTiles, hopper: torch.device) -> None:
    weight = weight_in_blocks(6144, 4096, hopper)
    rows = quantize_rows_reference(torch.randn(1000, 4096, device=hopper), Format.FP8, 128)
    few = rows._replace(values=rows.values[:129], scales=rows.scales[:, :129].contiguous())
    expected = block_product(rows, weight, dtype=torch.bfloat16, tiles=tiles)[:129]
    for _ in range(20):
        assert torch.equal(block_product(few, weight, dtype=torch.bfloat16, tiles=tiles), expected)


@gpu
@pytest.mark.parametrize("tiles", [BLOCK_TILES[0], *BLOCK_TILES[3:]], ids=str)
def test_rows_behind_the_residuals_end_stay_as_they_were(tiles: BlockTiles, hopper: torch.device) -> None:
    weight = weight_in_blocks(256, 512, hopper)
    rows = quantize_rows_reference(torch.randn(129, 512, device=hopper), Format.FP8, 128)
    memory = torch.full((256, 512), 7.0, dtype=torch.bfloat16, device=hopper)
    block_product(rows, weight, dtype=torch.bfloat16, tiles=tiles, residual=memory[:129, :256])
    assert bool((memory[129:] == 7.0).all())
    assert bool((memory[:, 256:] == 7.0).all())
    assert not bool((memory[:129, :256] == 7.0).all())


def test_blocks_are_for_hopper_and_shared_scales(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_in_blocks(256, 256, device)
    monkeypatch.setattr(runtime, "has_inline_ptx", lambda _: True)
    monkeypatch.setattr(runtime, "capability", lambda _: 90)
    assert takes_blocks(weight)
    assert not takes_blocks(replace(weight, uniform_rows=1))
    assert not takes_blocks(random_weight(Format.FP8, 256, 256, 256, device))
    monkeypatch.setattr(runtime, "capability", lambda _: 100)
    assert not takes_blocks(weight)


def test_int8_sums_are_exact(device: torch.device) -> None:
    weight = random_weight(Format.INT8, 64, 512, 512, device)
    rows = quantize_rows_reference(torch.randn(4, 512, device=device), Format.INT8)
    expected = (rows.values.double() @ weight.weight.double().t()).float() * weight.scales * rows.scales.t()
    actual = swapped_product(rows, weight, dtype=torch.float32, tiles=SwappedTiles(64, 16, 128, 4, 3))
    assert_close(actual, expected, rtol=1e-6, atol=0)


def test_what_can_be_multiplied(device: torch.device) -> None:
    assert can_multiply(random_weight(Format.INT8, 16, 256, 256, device))
    assert can_multiply(random_weight(Format.FP8, 16, 256, 128, device))
    assert not can_multiply(random_weight(Format.FP8, 16, 200, 128, device)), "the last group is short"
    assert not can_multiply(random_weight(Format.INT8, 16, 256, 128, device))
    assert not can_multiply(random_weight(Format.INT8, 16, 256, 256, device, zeros=True))
    assert not can_multiply(random_weight(Format.INT4, 16, 256, 256, device))
