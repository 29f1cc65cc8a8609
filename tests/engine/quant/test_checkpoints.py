"""Quantized checkpoints of every format stand for their dequantized weights; whatever contradicts itself is named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from manta.engine.errors import CheckpointError, ConfigError
from manta.engine.model_source import ModelSource, load_shape
from manta.engine.models.family import Parameter
from manta.engine.models.llama import LLAMA
from manta.engine.parallel.layout import ShardLayout
from manta.engine.quant.checkpoints import checkpoint_reader
from manta.engine.weights.slices import slices
from tests.engine.parallel.shards import generate
from tests.engine.quant import packers
from tests.engine.quant.packers import Packer, ct_config, describe, save_packed

PROMPTS = [[5, 6, 7] * 9, [1, 2] * 20]


class Case(NamedTuple):
    name: str
    packer: Packer
    config: dict[str, Any]
    quantizes_x: bool = False


def gptq_case(bits: int, group: int, act_order: bool, symmetric: bool, version: str = "gptq") -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    packer = partial(
        packers.gptq,
        bits=bits,
        group=group,
        act_order=act_order,
        symmetric=symmetric,
        shift=1 if version == "gptq" else 0,
    )
    return Case(
        f"gptq {bits} {group} {act_order} {symmetric} {version}", packer, {**config, "checkpoint_format": version}
    )


def ct_case(bits: int, group: int, symmetric: bool, act_order: bool = False) -> Case:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    if group != -1:
        weights |= {"strategy": "group", "group_size": group, "actorder": "group" if act_order else None}
    packer = partial(packers.ct_packed, bits=bits, group=group, symmetric=symmetric, act_order=act_order)
    return Case(f"ct {bits} {group} {symmetric} {act_order}", packer, ct_config("pack-quantized", weights))


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}
FP8 = {"quant_method": "fp8"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
STATIC = {**FP8, "activation_scheme": "static"}

GPTQ = [gptq_case(*values) for values in itertools.product((4, 8), (32, 128, -1), (False, True), (False, True))]
OTHERS = [
    gptq_case(4, 32, False, False, "gptq_v2"),
    *(
        Case(f"awq {group}", partial(packers.awq, group=group), {"quant_method": "awq", "bits": 4, "group_size": group})
        for group in (32, 128, -1)
    ),
    *(ct_case(bits, group, symmetric) for bits in (4, 8) for group in (32, -1) for symmetric in (True, False)),
    ct_case(4, 32, True, act_order=True),
    Case("fp8 tensor", partial(packers.fp8, scale_shape="tensor"), {**FP8, "activation_scheme": "dynamic"}, True),
    Case("fp8 static", partial(packers.fp8, scale_shape="tensor", static=True), STATIC, True),
    Case("fp8 block", partial(packers.fp8, scale_shape="block", name="weight_scale_inv"), BLOCKS, True),
    Case("fbgemm", partial(packers.fp8, scale_shape="row"), {"quant_method": "fbgemm_fp8"}, True),
    Case(
        "ct fp8",
        partial(packers.fp8, scale_shape="row"),
        ct_config("float-quantized", {**FP8_WEIGHTS, "strategy": "channel"}, {**DYNAMIC, "type": "float"}),
        True,
    ),
    Case(
        "ct fp8 block",
        partial(packers.fp8, scale_shape="block"),
        ct_config("float-quantized", {**FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]}, DYNAMIC),
        True,
    ),
    Case(
        "ct w8a8",
        packers.int8,
        ct_config("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {**DYNAMIC, "type": "int"}),
        True,
    ),
    Case(
        "bnb int8",
        partial(packers.int8, name="SCB", unit=127.0),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        True,
    ),
    *(
        Case(
            f"bnb nf4 {nested}",
            partial(packers.bnb4, nested=nested),
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        )
        for nested in (False, True)
    ),
    *(
        Case(
            kind,
            partial(packers.fp4, kind=kind),
            ct_config(
                f"{kind}-pack-quantized",
                {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size},
            ),
        )
        for kind, strategy, size in (("nvfp4", "tensor_group", 16), ("mxfp4", "group", 32))
    ),
]


def source_of(folder: Path) -> ModelSource:
    return ModelSource("tiny", "safetensors", folder, None)


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [*GPTQ, *OTHERS], ids=name_of)
def test_packed_products_stand_for_their_dequantized_weights(tmp_path: Path, case: Case):
    packed, plain = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)
    source = source_of(packed)
    shape = load_shape(source)
    reader = checkpoint_reader(source, LLAMA, json.loads((packed / "config.json").read_text())["quantization_config"])
    expected = load_file(plain / "model.safetensors")
    slice_of = slices(shape, ShardLayout.whole(shape))
    for part in ("q", "k", "v", "output", "gate", "up", "down"):
        parameter = Parameter(part, 0, "weight")
        found = reader.read(parameter, slice_of(parameter))
        name = LLAMA.hugging_face_name(parameter)
        torch.testing.assert_close(found.dequantize(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert found.num_bytes < 0.8 * 2 * expected[name].numel()


ENGINES = [
    *(gptq_case(4, group, act_order, True) for group in (32, 128, -1) for act_order in (False, True)),
    gptq_case(8, 32, True, False),
    *(
        case
        for case in OTHERS
        if case.name in ("awq 32", "ct 4 32 False False", "fp8 block", "ct w8a8", "bnb nf4 True")
    ),
]


@pytest.mark.parametrize("case", ENGINES, ids=name_of)
def test_a_packed_model_gives_the_dequantized_one_s_tokens_on_one_rank_and_two(tmp_path: Path, case: Case):
    biases = {"attention_bias": True, "mlp_bias": True} if "True" in case.name else {}
    packed, plain = save_packed(tmp_path, case.packer, case.config, **biases)
    shape = load_shape(source_of(packed))
    expected = generate(shape, PROMPTS, 8, source=source_of(plain))
    bound = 0.3 if case.quantizes_x else 2e-2  # activations in 8 bits change logits
    alone = generate(shape, PROMPTS, 8, source=source_of(packed))
    for found in (alone, generate(shape, PROMPTS, 8, source=source_of(packed), tp_size=2)):
        if case.quantizes_x:
            assert found.token_ids == alone.token_ids
            torch.testing.assert_close(found.logprobs, alone.logprobs, rtol=0, atol=5e-3)
            torch.testing.assert_close(found.logprobs[:, 0, 1:], expected.logprobs[:, 0, 1:], rtol=0, atol=bound)
        else:
            assert found.token_ids == expected.token_ids
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=bound)


def test_a_quantized_checkpoint_can_be_dequantized_when_it_is_loaded(tmp_path: Path):
    case = gptq_case(4, 32, True, False)
    packed, plain = save_packed(tmp_path, case.packer, case.config)
    shape = load_shape(source_of(packed))
    expected = generate(shape, PROMPTS, 8, source=source_of(plain))
    found = generate(shape, PROMPTS, 8, source=source_of(packed), quantization="plain")
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-3)


def refusal(folder: Path, **overrides: Any) -> str:
    source = source_of(folder)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        generate(load_shape(source), PROMPTS, 2, source=source, **overrides)
    return str(caught.value)


GPTQ_CONFIG = gptq_case(4, 32, True, True).config
CT_CONFIG = ct_case(4, 32, True).config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**GPTQ_CONFIG, "bits": 3}, "bits = 3"),
        ({**GPTQ_CONFIG, "group_size": 0}, "group_size = 0"),
        ({**GPTQ_CONFIG, "group_size": 64}, "qzeros"),
        ({**GPTQ_CONFIG, "desc_act": False}, "g_idx"),
        ({**GPTQ_CONFIG, "lm_head": True}, "lm_head"),
        ({**GPTQ_CONFIG, "rotation": "hadamard"}, "rotation"),
        ({**GPTQ_CONFIG, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ_CONFIG, "quant_method": "aqlm"}, "aqlm"),
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({**BLOCKS, "activation_scheme": "static"}, "activation_scheme"),
        ({**BLOCKS, "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": True}, "load_in_4bit"),
        ({**CT_CONFIG, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**CT_CONFIG, "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}, "num_bits|type"),
        ({**CT_CONFIG, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_unknown_or_contradicts_itself_is_refused_by_name(tmp_path: Path, config: dict[str, Any], named: str):
    case = gptq_case(4, 32, True, True)
    packed, _ = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)
    describe(packed, config)
    assert any(name in refusal(packed) for name in named.split("|"))


@pytest.mark.parametrize("suffix", ["scales", "qzeros", "g_idx", "qweight"])
def test_a_missing_tensor_is_named(tmp_path: Path, suffix: str):
    case = gptq_case(4, 32, True, True)
    packed, _ = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)
    change_tensors(packed, lambda tensors: tensors.pop(f"model.layers.0.mlp.up_proj.{suffix}"))
    assert f"model.layers.0.mlp.up_proj.{suffix}" in refusal(packed)


@pytest.mark.parametrize(
    "case", [case for case in OTHERS if case.name in ("fp8 tensor", "fp8 block", "ct w8a8", "bnb int8")], ids=name_of
)
def test_missing_scales_are_named(tmp_path: Path, case: Case):
    packed, _ = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)
    names = [
        name for name in load_file(packed / "model.safetensors") if "down_proj" in name and "scale" in name.lower()
    ]
    names = names or ["model.layers.0.mlp.down_proj.SCB"]
    change_tensors(packed, lambda tensors: tensors.pop(names[0]))
    assert names[0] in refusal(packed)


@pytest.mark.parametrize("damage", ["missing", "short", "empty"])
def test_a_damaged_shard_of_a_quantized_checkpoint_is_named(tmp_path: Path, damage: str):
    case = gptq_case(4, 32, False, True)
    packed, _ = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)
    names = shard_in_two(packed)
    file = packed / names[1]
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-40] if damage == "short" else b"")
    assert names[1] in refusal(packed)


def test_a_scheme_for_a_quantized_checkpoint_is_refused(tmp_path: Path):
    case = gptq_case(4, 32, False, True)
    packed, _ = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)
    assert "quantization.weights = 'int8'" in refusal(packed, quantization="int8")


def test_a_quantized_head_is_refused_by_name(tmp_path: Path):
    case = next(case for case in OTHERS if case.name == "fp8 tensor")
    packed, _ = save_packed(tmp_path, case.packer, case.config, num_hidden_layers=1)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    change_tensors(packed, change)
    assert "lm_head.weight is of type F8_E4M3" in refusal(packed)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def shard_in_two(folder: Path) -> list[str]:
    """The names of two files that hold what one did, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[place % 2] for place, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files
