"""P21: a damaged checkpoint never becomes a ready server, and the message names the file; harmless oddities serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from manta.engine.config import EngineConfig
from manta.engine.errors import CheckpointError
from tests.replicas.edge.local_server import local_server, write_byte_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig.build(
        str(folder), device="cpu", dtype="float32", served_model_name="m", max_model_len=128, cpu_cache_gib=0.05
    )


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Random weights of the byte model, its head tied to its embedding."""
    config = json.loads((folder / "config.json").read_text())
    dim, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_dim = dim // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (dim,), at + "post_attention_layernorm.weight": (dim,)}
        shapes |= {at + f"self_attn.{name}_proj.weight": (dim, dim) for name in "qo"}
        shapes |= {at + f"self_attn.{name}_proj.weight": (kv_dim, dim) for name in "kv"}
        shapes |= {at + f"mlp.{name}_proj.weight": (inner, dim) for name in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (dim, inner)
    rng = np.random.default_rng(21)
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_model(tmp_path_factory.mktemp("clean"))
    tensors = weights(folder)
    names = sorted(tensors)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, own in halves.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    weight_map = {name: shard for shard, own in halves.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def damaged(clean: Path, tmp_path: Path, edit: Callable[[Path], object]) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(clean, folder)
    edit(folder)
    return folder


def drop_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    tensors = load_file(folder / shard)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / shard)


def cut(folder: Path) -> None:
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-4096])


def remove_weights(folder: Path) -> None:
    for shard in SHARDS:
        (folder / shard).unlink()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), SHARDS[1]),
        (cut, SHARDS[1]),
        (lambda folder: (folder / SHARDS[0]).write_bytes(b""), SHARDS[0]),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (remove_weights, "safetensors"),
        (drop_tensor, "model.norm.weight"),
    ],
    ids=["missing", "short", "empty", "no config", "no weights", "a tensor is nowhere"],
)
def test_p21_damage_is_refused_by_name(clean: Path, tmp_path: Path, edit: Callable[[Path], object], named: str) -> None:
    folder = damaged(clean, tmp_path, edit)
    with pytest.raises(CheckpointError) as refused, local_server(config_of(folder)):
        pass
    assert named in str(refused.value)


def test_p21_harmless_oddities_serve_the_same_answers(clean: Path, tmp_path: Path) -> None:
    def answer(folder: Path) -> str:
        with local_server(config_of(folder)) as local:
            return local.server.text("The same?", max_tokens=12, temperature=0, ignore_eos=True)

    wanted = answer(clean)
    stray = damaged(clean, tmp_path / "stray", lambda folder: save_file(weights(folder), folder / "extra.safetensors"))
    assert answer(stray) == wanted
    single = damaged(clean, tmp_path / "single", remove_weights)
    (single / INDEX).unlink()
    save_file(weights(single), single / "model.safetensors")
    assert answer(single) == wanted
