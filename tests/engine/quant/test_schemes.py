"""Every scheme: its error, its bytes, its cuts and stacks, and a whole model, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manta.deploy.config import load_config, parse_overrides
from manta.engine.config import EngineConfig, QuantizationConfig
from manta.engine.errors import ConfigError
from manta.engine.layers.norm import RmsNorm
from manta.engine.layers.quantized_linear import QuantizedLinear
from manta.engine.quant.kernel_form import kernel_form
from manta.engine.quant.schemes import SCHEMES, Scheme
from manta.engine.quant.weight import PlainWeight, StackedWeight, stack
from manta.kernels.quantized import layout
from manta.kernels.quantized import linear as kernels
from tests.engine.parallel.shards import generate, random_shape

CHOICES: list[dict[str, Any]] = [
    *({"weights": "int4", "group_size": size} for size in (32, 64, 128, "row")),
    *({"weights": name, "symmetric": False} for name in ("int4", "int8")),
    *({"weights": name} for name in SCHEMES if name != "int4"),
]
ERRORS = {"int8": 0.01, "int4": 0.13, "w8a8": 0.01, "llm_int8": 0.01, "nf4": 0.12, "mxfp4": 0.16, "nvfp4": 0.13}
"""Of weights, relative; fp8 has 3 bits behind its point: 0.03."""


def name_of(choice: dict[str, Any]) -> str:
    return " ".join(str(value) for value in choice.values())


def scheme_of(choice: dict[str, Any]) -> Scheme:
    config = QuantizationConfig(**choice)
    return SCHEMES[config.weights](config)


def random_weight(num_rows: int = 96, num_columns: int = 208, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_a_weight_has_the_scheme_s_error_and_bytes(choice: dict[str, Any]):
    scheme, plain = scheme_of(choice), random_weight()
    weight = scheme.create(plain)
    assert weight.shape == plain.shape
    assert error(weight.dequantize(), plain) < ERRORS.get(choice["weights"], 0.03)
    assert weight.num_bytes == scheme.num_bytes(*plain.shape)


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_a_product_is_that_of_the_dequantized_weight(choice: dict[str, Any]):
    weight = scheme_of(choice).create(random_weight())
    x = torch.randn(5, 208, generator=torch.Generator().manual_seed(1))
    expected = x @ weight.dequantize().t()
    quantizes_x = choice["weights"] in ("fp8", "fp8_tensor", "fp8_block", "w8a8", "llm_int8")
    assert error(weight.apply(x), expected) < (0.04 if quantizes_x else 1e-6)


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_parts_of_a_weight_are_parts_of_what_it_stands_for(choice: dict[str, Any]):
    weight = scheme_of(choice).create(random_weight())
    whole = weight.dequantize()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight.rows(slice(10, 33)).dequantize(), whole[10:33])
    assert torch.equal(weight.rows(order).dequantize(), whole[order])
    for part in (range(128), range(128, 208), range(7, 77)):  # at groups, and across them
        assert torch.equal(weight.columns(part).dequantize(), whole[:, part.start : part.stop])
    assert torch.equal(weight.columns(range(7, 77)).columns(range(3, 50)).dequantize(), whole[:, 10:57])


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_stacked_weights_are_one(choice: dict[str, Any]):
    parts = [scheme_of(choice).create(random_weight(rows, seed=rows)) for rows in (32, 48)]
    found = stack(parts)
    assert not isinstance(found, StackedWeight)
    assert torch.equal(found.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_weights_of_different_kinds_stand_in_one_stack():
    parts = [scheme_of({"weights": "int4"}).create(random_weight(32)), PlainWeight(random_weight(48, seed=2))]
    found = stack(parts)
    x = torch.randn(3, 208, generator=torch.Generator().manual_seed(1))
    order = torch.arange(80).flip(0)
    torch.testing.assert_close(found.rows(order).apply(x), (x @ found.dequantize().t())[:, order])
    assert found.num_bytes == sum(part.num_bytes for part in parts)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "w8a8", "llm_int8"])
def test_ranks_with_parts_of_a_token_quantize_it_as_one_would(name: str):
    x = torch.randn(4, 208, generator=torch.Generator().manual_seed(3))
    weight = scheme_of({"weights": name}).create(random_weight())
    largest: list[torch.Tensor] = []

    def keep(own: torch.Tensor) -> None:
        largest.append(own.clone())

    def put(own: torch.Tensor) -> None:
        own.copy_(largest[0])

    expected = weight.apply(x, keep)
    parts = (range(100), range(100, 208))
    found = torch.stack([weight.columns(part).apply(x[:, part.start : part.stop], put) for part in parts]).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


KERNEL_CHOICES = [choice for choice in CHOICES if choice["weights"] not in ("llm_int8", "nf4", "mxfp4", "nvfp4")]


@pytest.mark.parametrize("choice", KERNEL_CHOICES, ids=name_of)
def test_the_kernels_layout_stands_for_the_same_weight(choice: dict[str, Any]):
    weight = scheme_of(choice).create(random_weight(num_columns=256))
    form = kernel_form(weight)
    assert form is not None
    torch.testing.assert_close(layout.dequantize(form.weight), weight.dequantize(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("choice", KERNEL_CHOICES, ids=name_of)
def test_the_kernels_specification_gives_the_same_product(choice: dict[str, Any]):
    weight = scheme_of(choice).create(random_weight(num_columns=256))
    form = kernel_form(weight)
    assert form is not None
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    found = kernels.linear(x, form.weight, activations=form.activations)
    torch.testing.assert_close(found, weight.apply(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llm_int8", "nf4", "mxfp4", "nvfp4"])
def test_what_has_no_kernel_says_so(name: str):
    assert kernel_form(scheme_of({"weights": name}).create(random_weight())) is None


SHAPE = random_shape(q=6, kv=3, hidden_size=96, intermediate_size=272)
PROMPTS = [[5, 6, 7] * 9, [1, 2] * 20]


@pytest.mark.parametrize("choice", [{"weights": name} for name in SCHEMES], ids=name_of)
def test_a_quantized_model_over_ranks_gives_the_tokens_of_one(choice: dict[str, Any]):
    overrides = {f"quantization.{name}": value for name, value in choice.items()}
    alone = generate(SHAPE, PROMPTS, 12, **overrides)
    plain = generate(SHAPE, PROMPTS, 12)
    assert not torch.equal(alone.logprobs, plain.logprobs)
    for tp_size in (2, 3):
        gang = generate(SHAPE, PROMPTS, 12, tp_size=tp_size, **overrides)
        assert gang.token_ids == alone.token_ids
        torch.testing.assert_close(gang.logprobs, alone.logprobs, rtol=0, atol=5e-3)


def test_a_scheme_alone_sets_the_weights():
    config = EngineConfig.build("random", quantization="int4", **{"quantization.group_size": "64"})
    assert (config.quantization.weights, config.quantization.group_size) == ("int4", 64)
    deployed = load_config(None, parse_overrides(["quantization=fp8", "kv_cache=int8"]))
    assert (deployed.engine.quantization.weights, deployed.engine.quantization.kv_cache) == ("fp8", "int8")


@pytest.mark.parametrize(("name", "value"), [("quantization", "int3"), ("quantization.group_size", 48)])
def test_what_no_scheme_is_called_is_refused_by_name(name: str, value: object):
    with pytest.raises(ConfigError, match=str(value)):
        EngineConfig.build("random", **{name: value})


@pytest.mark.parametrize("choice", [{"weights": name} for name in ("int4", "int8", "fp8", "w8a8")], ids=name_of)
def test_a_linear_in_the_kernels_form_is_the_logical_one(choice: dict[str, Any]):
    """Alone, behind a norm, gated, and with a residual, as the decoder calls it."""
    weight = scheme_of(choice).create(random_weight(num_columns=256))
    form = kernel_form(weight)
    assert form is not None
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    bias, norm = torch.linspace(-1, 1, 96), RmsNorm(torch.linspace(0.5, 1.5, 256), 1e-5)
    logical, kernel = QuantizedLinear(weight, bias), QuantizedLinear(form, bias)
    assert abs(kernel.num_bytes - logical.num_bytes) < 64
    close = {"rtol": 5e-3, "atol": 2e-3}
    torch.testing.assert_close(kernel(x), logical(x), **close)
    torch.testing.assert_close(kernel.after_norm(x, norm), logical.after_norm(x, norm), **close)
    torch.testing.assert_close(kernel.gated_after_norm(x, norm), logical.gated_after_norm(x, norm), **close)
    sums = torch.ones(5, 96), torch.ones(5, 96)
    kernel.add_to(sums[0], x)
    logical.add_to(sums[1], x)
    torch.testing.assert_close(*sums, **close)
