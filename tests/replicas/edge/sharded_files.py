"""Checkpoints in two shards and what may befall them, for the cases P20 and P21. Knows no model and no server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from manta.engine.config import EngineConfig

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig.build(
        str(folder), device="cpu", dtype="float32", served_model_name="m", max_model_len=128, cpu_cache_gib=0.05
    )


def save_in_two(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Half of the tensors a shard, by their names, and the index."""
    names = sorted(tensors)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, own in halves.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    weight_map = {name: shard for shard, own in halves.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def damaged(clean: Path, tmp_path: Path, edit: Callable[[Path], object]) -> Path:
    """An edited copy."""
    folder = tmp_path / "copy"
    shutil.copytree(clean, folder)
    edit(folder)
    return folder


def drop(name: str, folder: Path) -> None:
    """Take a tensor out of its shard and out of the index."""
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(index))
    tensors = load_file(folder / shard)
    del tensors[name]
    save_file(tensors, folder / shard)


def cut(num_bytes: int, folder: Path) -> None:
    """Take the end off the second shard."""
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-num_bytes])
