"""Rotary tables against transformers' functions, and the kinds of scaling by their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from manta.engine.layers.rope import attention_factor, build_cos_sin, inverse_frequencies
from manta.engine.model_shape import RopeScaling

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}

CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("linear", 10_000.0, {"factor": 2.5}),
    ("llama3", 500_000.0, LLAMA3),
    ("llama3", 500_000.0, {**LLAMA3, "factor": 32.0}),
    ("yarn", 10_000.0, YARN),
    ("yarn", 1_000_000.0, {**YARN, "attention_factor": 1.25}),
    ("yarn", 10_000.0, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", 10_000.0, {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
]


def scaling(kind: Any, theta: float, options: dict[str, Any]) -> RopeScaling:
    ours = {name: value for name, value in options.items() if name != "original_max_position_embeddings"}
    return RopeScaling(
        theta=theta, kind=kind, original_max_position=options.get("original_max_position_embeddings"), **ours
    )


@pytest.mark.parametrize(("kind", "theta", "options"), CASES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(kind: str, theta: float, options: dict[str, Any], head_dim: int):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=int(options.get("original_max_position_embeddings", 4096) * options["factor"]),
        rope_parameters={"rope_type": kind, "rope_theta": theta, **options},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    rope = scaling(kind, theta, options)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(expected_factor, rel=1e-6)


def test_the_table_holds_cosines_then_sines():
    rope = RopeScaling(theta=100.0)
    table = build_cos_sin(rope, 8, 50, torch.device("cpu"))
    assert table.shape == (50, 8)
    assert table.dtype == torch.float32
    for position, index in ((0, 0), (7, 1), (49, 3)):
        angle = position * 100.0 ** (-2 * index / 8)
        assert float(table[position, index]) == pytest.approx(math.cos(angle), abs=1e-5)
        assert float(table[position, 4 + index]) == pytest.approx(math.sin(angle), abs=1e-5)


def test_the_attention_factor_multiplies_the_table():
    plain = RopeScaling(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.0)
    scaled = RopeScaling(kind="yarn", factor=4.0, original_max_position=64)
    device = torch.device("cpu")
    expected = build_cos_sin(plain, 32, 20, device) * (0.1 * math.log(4.0) + 1.0)
    torch.testing.assert_close(build_cos_sin(scaled, 32, 20, device), expected)


def test_a_partial_rotation_has_fewer_frequencies():
    assert inverse_frequencies(RopeScaling(partial_rotary_factor=0.5), 64).shape == (16,)
