"""Rows of 8 bits against plain torch, and what their scales promise."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized.layout import FP8_DTYPE, Format
from manta.kernels.quantized.quantize import (
    QuantizedRows,
    largest,
    quantize_rows,
    quantize_rows_reference,
    silu_and_mul_quantize,
    silu_and_mul_quantize_reference,
)

FORMATS = [Format.INT8, Format.FP8]
gpu = pytest.mark.gpu


def assert_same(actual: QuantizedRows, expected: QuantizedRows, format: Format) -> None:
    """Equal but for numbers that lie on the edge between two codes."""
    assert_close(actual.scales, expected.scales, rtol=1e-5, atol=0)
    wide, expected_wide = actual.dequantize(), expected.dequantize()
    step = 1 / 127 if format is Format.INT8 else 2**-3
    bound = expected_wide.abs().amax() * step if format is Format.INT8 else expected_wide.abs() * step + 1e-3
    assert bool(((wide - expected_wide).abs() <= 1.01 * bound).all())
    assert float(torch.isclose(wide, expected_wide, rtol=1e-4, atol=1e-6).float().mean()) > 0.98


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "dim", "group"),
    [
        (3, 576, None),
        (2, 384, 128),
        (1, 1000, None),
        pytest.param(64, 4096, None, marks=gpu),
        pytest.param(2048, 14336, 128, marks=gpu),
    ],
)
def test_rows_are_quantized(
    rows: int, dim: int, group: int | None, dtype: torch.dtype, has_norm: bool, format: Format, device: torch.device
) -> None:
    x = (3 * torch.randn(rows, dim + 16, device=device)).to(dtype)[:, :dim]
    norm_weight = torch.randn(dim, device=device).to(dtype) if has_norm else None
    actual = quantize_rows(x, format, group, norm_weight=norm_weight, eps=1e-5)
    expected = quantize_rows_reference(x, format, group, norm_weight=norm_weight, eps=1e-5)
    assert actual.values.dtype == (torch.int8 if format is Format.INT8 else FP8_DTYPE)
    assert_same(actual, expected, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group", [None, 64])
def test_gated_rows_are_quantized(group: int | None, format: Format, device: torch.device) -> None:
    gate_up = torch.randn(3, 2 * 192, device=device).to(torch.bfloat16)
    actual = silu_and_mul_quantize(gate_up, format, group)
    assert_same(actual, silu_and_mul_quantize_reference(gate_up, format, group), format)


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_element_takes_the_largest_code(format: Format, device: torch.device) -> None:
    x = torch.randn(4, 256, device=device) * torch.tensor([1e-3, 1.0, 1e4, 1e20], device=device)[:, None]
    quantized = quantize_rows(x, format)
    assert_close(quantized.values.float().abs().amax(1), torch.full((4,), largest(format), device=device))
    bound = x.abs().amax(1, keepdim=True) * (0.5 / 127 if format is Format.INT8 else 0.5 / 8)
    assert bool(((quantized.dequantize() - x).abs() <= 1.001 * bound).all())


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_stay_zero(format: Format, device: torch.device) -> None:
    quantized = quantize_rows(torch.zeros(2, 128, device=device), format)
    assert bool((quantized.dequantize() == 0).all())
    assert bool((quantized.scales > 0).all())


def test_no_rows_are_quantized_to_none(device: torch.device) -> None:
    quantized = quantize_rows(torch.zeros(0, 256, device=device), Format.FP8, 128)
    assert quantized.values.shape == (0, 256)
    assert quantized.scales.shape == (2, 0)
