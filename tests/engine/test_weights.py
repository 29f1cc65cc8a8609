"""Loading weights: safetensors, GGUF of many types, random ones; whatever is wrong with files is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from manta.engine.errors import CheckpointError
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource, load_shape
from manta.engine.models.family import Parameter
from manta.engine.models.llama import LLAMA
from manta.engine.weights.load import load_weights
from manta.engine.weights.parameters import destinations
from tests.engine.runners import save_tiny

CPU = torch.device("cpu")
SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=130,
    max_position_embeddings=128,
)


def loaded(source: ModelSource, shape: ModelShape, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Hugging Face name -> tensor."""
    parameters = load_weights(source, shape, dtype=dtype, device=CPU)
    return {LLAMA.hugging_face_name(name): view for name, view in destinations(shape, parameters).items()}


def safetensors(folder: Path) -> ModelSource:
    return ModelSource("tiny", "safetensors", folder, None)


@pytest.mark.parametrize(
    ("config", "max_shard_size"),
    [
        ({}, "5GB"),
        ({}, "60KB"),
        ({"attention_bias": True, "mlp_bias": True}, "60KB"),
        ({"tie_word_embeddings": True}, "5GB"),
    ],
    ids=["one file", "shards", "shards with biases", "tied"],
)
def test_every_tensor_lands_in_its_slice(tmp_path: Path, config: dict[str, Any], max_shard_size: str):
    model = save_tiny(tmp_path, max_shard_size=max_shard_size, **config)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if max_shard_size == "5GB" else 6)
    source = safetensors(tmp_path)
    found = loaded(source, load_shape(source))
    expected = model.state_dict()
    if config.get("tie_word_embeddings"):
        expected.pop("lm_head.weight")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_fused_tensors_stack_their_parts(tmp_path: Path):
    model = save_tiny(tmp_path)
    source = safetensors(tmp_path)
    parameters = load_weights(source, load_shape(source), dtype=torch.bfloat16, device=CPU)
    layer, attention = parameters.take_layer(1), model.model.layers[1].self_attn
    stacked = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(layer.qkv, stacked.bfloat16())
    assert parameters.layers[1] is None
    with pytest.raises(AssertionError, match="taken before"):
        parameters.take_layer(1)


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def remove(folder: Path) -> str:
    file = shard(folder, 2)
    file.unlink()
    return file.name


def cut(folder: Path) -> str:
    file = shard(folder, 3)
    file.write_bytes(file.read_bytes()[:-50])
    return file.name


def empty(folder: Path) -> str:
    file = shard(folder, 0)
    file.write_bytes(b"")
    return file.name


def replace_tensor(folder: Path, change: Callable[[dict[str, torch.Tensor], str], None]) -> str:
    file = shard(folder, 1)
    tensors = load_file(file)
    name = sorted(tensors)[0]
    change(tensors, name)
    save_file(tensors, file)
    return f"{file.name}: tensor {name}"


def drop_from_shard(folder: Path) -> str:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        del tensors[name]

    return replace_tensor(folder, change)


def reshape(folder: Path) -> str:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name] = tensors[name][:-1].clone()

    return replace_tensor(folder, change)


def drop_from_index(folder: Path) -> str:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    file.write_text(json.dumps(index))
    return "model.layers.1.mlp.up_proj.weight"


def break_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    return "model.safetensors.index.json"


@pytest.mark.parametrize("damage", [remove, cut, empty, drop_from_shard, reshape, drop_from_index, break_index])
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], str]):
    save_tiny(tmp_path, max_shard_size="60KB")
    source = safetensors(tmp_path)
    shape = load_shape(source)
    named = damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        loaded(source, shape)
    assert named in str(caught.value)


# ---- GGUF


def random_tensors(seed: int = 0) -> dict[Parameter, np.ndarray]:
    """One array for every parameter of SHAPE, in Hugging Face's order of rows."""
    rng = np.random.default_rng(seed)
    views = destinations(
        SHAPE, load_weights(ModelSource("x", "dummy", Path(), None), SHAPE, dtype=torch.float32, device=CPU)
    )
    return {name: rng.normal(size=tuple(view.shape)).astype(np.float32) for name, view in views.items()}


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as GGUF files of the llama architecture hold them: i and i + dim / 2 of a head side by side."""
    order = np.arange(rows.shape[0]).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return rows[order]


def write_gguf(
    file: Path,
    tensors: dict[Parameter, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    left_out: str | None = None,
) -> None:
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(SHAPE.num_layers)
    for parameter, array in tensors.items():
        heads = {"q": SHAPE.num_heads, "k": SHAPE.num_kv_heads}.get(parameter.part)
        values = array if heads is None else interleaved(array, heads)
        name = LLAMA.gguf_name(parameter)
        if name == left_out:
            continue
        if array.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = [
    (GGMLQuantizationType.F32, 0.0),
    (GGMLQuantizationType.F16, 2e-3),
    (GGMLQuantizationType.BF16, 2e-2),
    (GGMLQuantizationType.Q8_0, 2e-2),
    (GGMLQuantizationType.Q5_1, 0.15),
    (GGMLQuantizationType.Q4_1, 0.3),
    (GGMLQuantizationType.Q4_0, 0.5),
]


@pytest.mark.parametrize(("kind", "tolerance"), KINDS, ids=[kind.name for kind, _ in KINDS])
def test_gguf_tensors_are_dequantized_and_put_in_order(tmp_path: Path, kind: GGMLQuantizationType, tolerance: float):
    tensors = random_tensors()
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tensors, kind)
    found = loaded(ModelSource("tiny", "gguf", file, None), SHAPE)
    assert len(found) == len(tensors)
    for parameter, array in tensors.items():
        difference = np.abs(found[LLAMA.hugging_face_name(parameter)].numpy() - array).max()
        assert difference <= tolerance, parameter
        assert difference > 0 or kind is GGMLQuantizationType.F32 or array.ndim == 1


def test_large_gguf_tensors_come_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = random_tensors()
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tensors)
    monkeypatch.setattr("manta.engine.weights.gguf_file._CHUNK_ELEMENTS", 700)
    found = loaded(ModelSource("tiny", "gguf", file, None), SHAPE)
    for parameter, array in tensors.items():
        np.testing.assert_array_equal(found[LLAMA.hugging_face_name(parameter)].numpy(), array)


def test_what_is_wrong_with_a_gguf_file_is_named(tmp_path: Path):
    file = tmp_path / "tiny.gguf"
    source = ModelSource("tiny", "gguf", file, None)
    tensors = random_tensors()
    write_gguf(file, tensors, left_out="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is missing"):
        loaded(source, SHAPE)
    tensors[Parameter("down", 0, "weight")] = np.zeros((64, 32), dtype=np.float32)
    write_gguf(file, tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight has shape \(64, 32\)"):
        loaded(source, SHAPE)
    write_gguf(file, random_tensors())
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(CheckpointError, match=r"cut short: tensor .* reaches beyond its end"):
        loaded(source, SHAPE)


# ---- random weights


def test_random_weights_follow_from_the_seed_and_have_unit_scale():
    source = ModelSource("random", "dummy", Path(), None)
    views = destinations(SHAPE, load_weights(source, SHAPE, dtype=torch.float32, device=CPU, seed=3))
    again = destinations(SHAPE, load_weights(source, SHAPE, dtype=torch.float32, device=CPU, seed=3))
    other = destinations(SHAPE, load_weights(source, SHAPE, dtype=torch.float32, device=CPU, seed=4))
    for name, view in views.items():
        assert torch.equal(view, again[name])
        if name.part.endswith("norm"):
            assert torch.equal(view, torch.ones_like(view))
            continue
        assert not torch.equal(view, other[name])
        expected = 1.0 if name.part == "embedding" else view.shape[1] ** -0.5
        assert float(view.std()) == pytest.approx(expected, rel=0.1)


def test_an_unknown_architecture_is_refused():
    from dataclasses import replace

    with pytest.raises(CheckpointError, match="'OtherForCausalLM' is not supported"):
        load_weights(
            ModelSource("x", "dummy", Path(), None),
            replace(SHAPE, architecture="OtherForCausalLM"),
            dtype=torch.float32,
            device=CPU,
        )
