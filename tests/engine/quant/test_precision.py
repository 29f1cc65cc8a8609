"""Bytes by which a quantized model is planned are those that schemes say, and kernels hold."""

from __future__ import annotations

import pytest
import torch

from manta.engine.config import QuantizationConfig
from manta.engine.precision import PRECISIONS, precision_of
from manta.engine.quant.kernel_form import kernel_form
from manta.engine.quant.schemes import SCHEMES

QUANTIZED = [name for name in PRECISIONS if name != "bf16"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_planned_bits_are_those_of_the_scheme(name: str):
    config = QuantizationConfig(weights=name)  # type: ignore[arg-type]
    precision = precision_of(config)
    assert precision is not None
    for rows, columns in ((6144, 4096), (28672, 4096), (4096, 14336)):
        planned = rows * columns * (precision.weight_bits or 0) / 8
        assert SCHEMES[name](config).num_bytes(rows, columns) == pytest.approx(planned, rel=0.04)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("symmetric", [True, False])
def test_planned_bits_are_those_that_kernels_read(name: str, symmetric: bool):
    config = QuantizationConfig(weights=name, symmetric=symmetric)  # type: ignore[arg-type]
    precision, form = precision_of(config), kernel_form(SCHEMES[name](config).create(torch.randn(256, 2048)))
    assert precision is not None
    assert form is not None
    assert form.weight.num_bytes == pytest.approx(256 * 2048 * (precision.weight_bits or 0) / 8, rel=0.005)
    assert (form.activations is not None) == (precision.activation_bits == 8)


@pytest.mark.parametrize("size", [32, 64, 128, "row"])
def test_groups_of_int4_have_their_scales(size: int | str):
    precision = precision_of(QuantizationConfig(weights="int4", group_size=size))  # type: ignore[arg-type]
    assert precision is not None
    assert precision.weight_bits == 4 + (0 if size == "row" else 16 / int(size))


def test_schemes_without_kernels_have_no_step_times():
    assert precision_of(QuantizationConfig(weights="nf4")) is None
    assert precision_of(QuantizationConfig(weights="keep")) is None
