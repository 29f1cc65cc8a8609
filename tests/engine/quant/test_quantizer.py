"""`manta quantize`: better roundings are better, scales leave the model as it was, what is written is read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from manta.engine.config import ModelConfig
from manta.engine.errors import ConfigError
from manta.engine.layers.rope import build_cos_sin
from manta.engine.model_source import ModelSource, load_shape, resolve_model
from manta.engine.quant.calibrated.gptq import quantize_fp8_gptq, quantize_gptq
from manta.engine.quant.calibrated.layer_pass import InputStats, attention_received, run_layer
from manta.engine.quant.calibrated.quantizer import LayerErrors, quantize_checkpoint
from manta.engine.quant.calibrated.recipe import Recipe, quantize_layer
from manta.engine.quant.calibrated.scales import fold, output_error
from manta.engine.quant.fp8 import Activations, quantize_fp8
from manta.engine.quant.grouped import quantize_grouped
from tests.engine.parallel.shards import generate
from tests.engine.runners import expected_greedy, save_tiny

PROMPTS = [[5, 6, 7] * 9, [1, 2] * 20]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
CPU = torch.device("cpu")


def correlated_inputs(num_tokens: int = 600, num_columns: int = 96) -> torch.Tensor:
    """Some columns are large and many go together, as in models."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(num_columns, num_columns, generator=generator) * 0.4
    mixing += torch.diag(torch.logspace(-1, 1, num_columns)[torch.randperm(num_columns, generator=generator)])
    return torch.randn(num_tokens, num_columns, generator=generator) @ mixing


@pytest.mark.parametrize("order", [{}, {"act_order": True}, {"act_order": True, "keeps_groups": True}], ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"), [(4, 32, True), (4, 64, False), (4, None, True), (8, 32, True)]
)
def test_gptq_leaves_less_error_of_the_output_than_rounding(
    bits: int, group_size: int | None, symmetric: bool, order: dict[str, bool]
):
    x, weight = correlated_inputs(), torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    stats = InputStats.empty(96)
    stats.add(x, torch.ones(len(x)))
    numbers: dict[str, Any] = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    rounded = quantize_grouped(weight, **numbers).dequantize()
    found = quantize_gptq(weight, stats.second_moments, **order, **numbers).dequantize()
    assert output_error(found - weight, stats) < 0.75 * output_error(rounded - weight, stats)


def test_gptq_in_fp8_leaves_less_error_of_the_output_than_rounding():
    x, weight = correlated_inputs(), torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    stats = InputStats.empty(96)
    stats.add(x, torch.ones(len(x)))
    rounded = quantize_fp8(weight, block=(1, 96)).dequantize()
    found = quantize_fp8_gptq(weight, stats.second_moments, Activations.TOKEN)
    assert output_error(found.dequantize() - weight, stats) < 0.5 * output_error(rounded - weight, stats)
    assert found.codes.dtype == torch.float8_e4m3fn
    assert found.activations is Activations.TOKEN


def test_a_token_that_all_attend_to_is_not_rounded_for_the_others():
    """As a text's first token: its input is small and unlike that of the others."""
    generator = torch.Generator().manual_seed(3)
    many = torch.randn(600, 24, generator=generator) @ torch.randn(24, 96, generator=generator)
    x = torch.cat([0.3 * torch.randn(1, 96, generator=generator), many])
    weight = torch.randn(40, 96, generator=generator)
    importance = torch.ones(601)
    importance[0] = 400.0
    stats = InputStats.empty(96)
    stats.add(x, importance)
    found = quantize_gptq(weight, stats.second_moments, bits=4, group_size=32, symmetric=True).dequantize()
    rounded = quantize_grouped(weight, bits=4, group_size=32).dequantize()

    def error(tokens: torch.Tensor, change: torch.Tensor) -> float:
        return float((tokens @ change.t()).norm() / (tokens @ weight.t()).norm())

    assert error(x[:1], found - weight) < error(x[:1], rounded - weight)
    assert error(many, found - weight) < 0.5 * error(many, rounded - weight)


def test_attention_received_is_the_sum_of_what_tokens_pay():
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(4, 9, 8, generator=generator), torch.randn(2, 9, 8, generator=generator)
    values = torch.eye(9)[None, None].expand(1, 2, 9, 9)
    paid = functional.scaled_dot_product_attention(q[None], k[None], values, is_causal=True, enable_gqa=True)[0]
    torch.testing.assert_close(attention_received(q, k), paid.sum(1).mean(0))


def test_keys_and_values_count_by_the_attention_they_get(tmp_path: Path):
    tensors, shape, hidden, cos_sin = tiny_layer(tmp_path)
    seen: dict[str, torch.Tensor] = {}
    run_layer(tensors, hidden, shape, cos_sin, lambda name, _, importance: seen.update({name: importance}))
    assert float(seen["qkv"].sum()) == pytest.approx(2 * len(hidden))
    assert float(seen["qkv"].std()) > 0.1
    assert all(torch.equal(seen[name], torch.ones(len(hidden))) for name in ("output", "gate_up", "down"))


def test_gptq_of_independent_inputs_is_rounding_to_the_nearest():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    found = quantize_gptq(weight, torch.eye(64), bits=4, group_size=32, symmetric=True)
    assert torch.equal(found.dequantize(), quantize_grouped(weight, bits=4, group_size=32).dequantize())


def tiny_layer(folder: Path) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    from manta.engine.quant.calibrated.quantizer import _Job

    save_tiny(folder, attention_bias=True, mlp_bias=True, **SIZES)
    source = ModelSource("tiny", "safetensors", folder, None)
    shape = load_shape(source)
    job = _Job(source, shape, Recipe("rtn"), None, folder / "out", 8.0)
    hidden = torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    return job._plain_layer(1), shape, hidden, build_cos_sin(shape.rope, shape.head_dim, 30, CPU)


@pytest.mark.parametrize("group", ["qkv", "output", "gate_up", "down"])
def test_folded_scales_leave_a_layer_as_it_was(tmp_path: Path, group: str):
    tensors, shape, hidden, cos_sin = tiny_layer(tmp_path)
    expected = run_layer(tensors, hidden, shape, cos_sin)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    seen: dict[str, torch.Tensor] = {}
    run_layer(tensors, hidden, shape, cos_sin, lambda name, x, _: seen.update({name: x.clone()}))
    used = fold(tensors, group, torch.rand(seen[group].shape[1]) + 0.5, shape)
    assert any(not torch.equal(before[name], tensor) for name, tensor in tensors.items())
    found = run_layer(tensors, hidden, shape, cos_sin, lambda name, x, _: seen.update({f"new {name}": x.clone()}))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen[f"new {group}"], seen[group] / used, rtol=1e-3, atol=1e-4)


def test_awq_and_gptq_leave_less_error_in_a_layer_than_rounding(tmp_path: Path):
    errors = {}
    for method in ("rtn", "gptq", "awq"):
        tensors, shape, _, _ = tiny_layer(tmp_path / method)
        stats = {}
        for group, size in (("qkv", 64), ("output", 64), ("gate_up", 64), ("down", 96)):
            stats[group] = InputStats.empty(size)
            stats[group].add(correlated_inputs(num_columns=size), torch.ones(600))
        errors[method] = quantize_layer(Recipe(method, group_size=32), tensors, stats, shape).errors
    for group, error in errors["rtn"].items():
        assert errors["gptq"][group] < 0.9 * error
        assert errors["awq"][group] < 0.98 * error


RECIPES = [
    Recipe("rtn", group_size=32),
    Recipe("rtn", bits=8, group_size=None, symmetric=False),
    Recipe("rtn", group_size=32, target="awq"),
    Recipe("gptq", group_size=32),
    Recipe("gptq", group_size=32, act_order=True),
    Recipe("gptq", group_size=32, act_order=True, target="compressed-tensors"),
    Recipe("gptq", group_size=None, bits=8, symmetric=False),
    Recipe("awq", group_size=32),
    Recipe("awq", group_size=32, symmetric=False, target="gptq"),
    Recipe("smoothquant"),
    Recipe("fp8"),
    Recipe("fp8_gptq"),
    Recipe("fp8_gptq", weight_only=True),
]


def name_of(recipe: Recipe) -> str:
    numbers = (recipe.bits, recipe.group_size, recipe.symmetric, recipe.act_order, recipe.weight_only)
    return " ".join(map(str, (recipe.method, *numbers, recipe.format)))


def texts(num_texts: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 211, (num_texts, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_what_is_written_is_read_again_by_the_engine(tmp_path: Path, recipe: Recipe):
    save_tiny(tmp_path / "plain", **SIZES)
    source = ModelSource("tiny", "safetensors", tmp_path / "plain", None)
    shape, output = load_shape(source), tmp_path / "quantized"
    layers = quantize_checkpoint(source, shape, recipe, texts(), output)
    assert [entry.layer for entry in layers] == [0, 1, 2]
    assert all(0 < error < (0.02 if recipe.bits == 8 else 0.2) for entry in layers for error in entry.errors.values())
    found = resolve_model(ModelConfig(model=str(output)))
    plain = generate(shape, PROMPTS, 4, source=source)
    quantized = generate(load_shape(found), PROMPTS, 4, source=found)
    # The first token's best five; the tiny model is random and its logits are large.
    change = (quantized.logprobs[:, 0, 1:] - plain.logprobs[:, 0, 1:]).abs().mean()
    assert 0 < change < (0.2 if recipe.bits == 8 or recipe.method in ("fp8", "fp8_gptq", "smoothquant") else 1.5)


def test_plain_tensors_keep_their_names_beside_packed_products(tmp_path: Path):
    """And no product has a plain weight beside its packed one: as compressed-tensors says."""
    save_tiny(tmp_path / "plain", **SIZES)
    source = ModelSource("tiny", "safetensors", tmp_path / "plain", None)
    quantize_checkpoint(source, load_shape(source), Recipe("rtn", group_size=32), None, tmp_path / "out")
    names = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.2.mlp.down_proj.weight_packed" in names
    assert "model.layers.2.mlp.down_proj.weight" not in names
    assert {"lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"} <= set(names)


def test_an_output_that_was_broken_off_is_gone_on_with(tmp_path: Path):
    save_tiny(tmp_path / "plain", **SIZES)
    source = ModelSource("tiny", "safetensors", tmp_path / "plain", None)
    shape, recipe = load_shape(source), Recipe("gptq", group_size=32)
    whole = quantize_checkpoint(source, shape, recipe, texts(), tmp_path / "whole")

    def stop(errors: LayerErrors) -> None:
        if errors.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, shape, recipe, texts(), tmp_path / "part", on_layer=stop)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "part").glob("*.safetensors")}
    assert len(kept) == 2
    assert not (tmp_path / "part/config.json").exists()
    found = quantize_checkpoint(source, shape, recipe, texts(), tmp_path / "part")
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
    assert found == whole
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "part" / file.name).read_bytes()


def test_an_output_of_other_work_is_refused(tmp_path: Path):
    save_tiny(tmp_path / "plain", **SIZES)
    source = ModelSource("tiny", "safetensors", tmp_path / "plain", None)
    shape, recipe, output = load_shape(source), Recipe("rtn", group_size=32), tmp_path / "out"
    quantize_checkpoint(source, shape, recipe, None, output)
    with pytest.raises(ConfigError, match="begun with another"):
        quantize_checkpoint(source, shape, replace(recipe, group_size=64), None, output)
    with pytest.raises(ConfigError, match="is not empty"):
        quantize_checkpoint(source, shape, recipe, None, tmp_path / "plain")


def test_memory_is_bounded_by_name(tmp_path: Path):
    save_tiny(tmp_path / "plain", **SIZES)
    source = ModelSource("tiny", "safetensors", tmp_path / "plain", None)
    with pytest.raises(ConfigError, match="memory_gib"):
        quantize_checkpoint(source, load_shape(source), Recipe("gptq"), texts(), tmp_path / "out", memory_gib=1e-4)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": "quip"}, "quip"),
        ({"method": "rtn", "bits": 3}, "bits = 3"),
        ({"method": "rtn", "act_order": True}, "act_order"),
        ({"method": "awq", "group_size": 24}, "group_size = 24"),
        ({"method": "gptq", "bits": 8, "target": "awq"}, "awq holds 4 bits"),
        ({"method": "fp8", "target": "gptq"}, "compressed-tensors"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        Recipe(**values)


def test_the_layer_pass_is_the_model_s_own(tmp_path: Path):
    model = save_tiny(tmp_path, **SIZES)
    from manta.engine.quant.calibrated.quantizer import _Job

    source = ModelSource("tiny", "safetensors", tmp_path, None)
    shape = load_shape(source)
    job = _Job(source, shape, Recipe("rtn"), None, tmp_path / "out", 8.0)
    ids = [5, 6, 7, 9, 3]
    hidden = job._embedded(torch.tensor([ids]))[0]
    cos_sin = build_cos_sin(shape.rope, shape.head_dim, len(ids), CPU)
    for index in range(shape.num_layers):
        hidden = run_layer(job._plain_layer(index), hidden, shape, cos_sin)
    logits = model.lm_head(model.model.norm(hidden))
    assert int(logits[-1].argmax()) == expected_greedy(model, ids, 1)[0]
