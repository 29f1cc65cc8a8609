"""P21: a damaged checkpoint never becomes a ready server, and the message names the file; harmless oddities serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from manta.engine.errors import CheckpointError
from tests.replicas.edge.local_server import local_server, write_byte_model
from tests.replicas.edge.sharded_files import INDEX, SHARDS, config_of, cut, damaged, drop, save_in_two


def weights(folder: Path) -> dict[str, torch.Tensor]:
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
    return {name: torch.from_numpy(rng.normal(0, 0.1, shape).astype(np.float32)) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_model(tmp_path_factory.mktemp("clean"))
    save_in_two(weights(folder), folder)
    return folder


def remove_weights(folder: Path) -> None:
    for shard in SHARDS:
        (folder / shard).unlink()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), SHARDS[1]),
        (partial(cut, 4096), SHARDS[1]),
        (lambda folder: (folder / SHARDS[0]).write_bytes(b""), SHARDS[0]),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (remove_weights, "safetensors"),
        (partial(drop, "model.norm.weight"), "model.norm.weight"),
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
