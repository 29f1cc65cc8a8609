"""P20 and P21 for quantized checkpoints through the API: packed weights answer as those that they stand for, and a
damaged file never becomes a ready server. Every packing and tensor parallelism: tests/engine/quant."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from manta.engine.config import EngineConfig
from manta.engine.errors import CheckpointError
from tests.engine.quant import packers
from tests.engine.quant.packers import save_packed
from tests.replicas.edge.local_server import local_server, write_byte_model

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SCALES = "model.layers.1.mlp.down_proj.scales"


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig.build(
        str(folder), device="cpu", dtype="float32", served_model_name="m", max_model_len=128, cpu_cache_gib=0.05
    )


def gptq_folders(folder: Path, *, bits: int, group: int, act_order: bool, symmetric: bool) -> tuple[Path, Path]:
    """(packed, dequantized) checkpoints of a byte model with biases, as P20 describes them."""
    numbers: dict[str, Any] = {"bits": bits, "group": group, "act_order": act_order, "symmetric": symmetric}
    described = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    vocab_size = json.loads((write_byte_model(folder / "bytes") / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "attention_bias": True, "mlp_bias": True}
    folders = save_packed(folder, partial(packers.gptq, **numbers), described, **sizes)
    for target in folders:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / "bytes" / name, target)
    return folders


def answer(folder: Path) -> tuple[list[int], list[float]]:
    """Greedy tokens over HTTP and their log-probabilities."""
    with local_server(config_of(folder)) as local:
        fields = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        (choice,) = local.server.complete("Packed or plain?", **fields)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize(
    ("bits", "group", "act_order", "symmetric"),
    [
        (4, 32, True, True),
        (4, 32, False, False),
        (4, 128, True, False),
        (4, -1, True, True),
        (4, -1, False, False),
        (8, 32, True, False),
        (8, -1, False, True),
    ],
)
def test_p20_a_packed_model_answers_as_its_dequantized_weights(
    tmp_path: Path, bits: int, group: int, act_order: bool, symmetric: bool
) -> None:
    packed, plain = gptq_folders(tmp_path, bits=bits, group=group, act_order=act_order, symmetric=symmetric)
    token_ids, logprobs = answer(packed)
    expected_ids, expected_logprobs = answer(plain)
    assert token_ids == expected_ids
    assert logprobs == pytest.approx(expected_logprobs, abs=2e-2)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ checkpoint in two shards."""
    folder, _ = gptq_folders(tmp_path_factory.mktemp("clean"), bits=4, group=32, act_order=True, symmetric=False)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, own in halves.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    weight_map = {name: shard for shard, own in halves.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def damaged(clean: Path, tmp_path: Path, edit: Callable[[Path], object]) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(clean, folder)
    edit(folder)
    return folder


def drop_scales(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"].pop(SCALES)
    (folder / INDEX).write_text(json.dumps(index))
    tensors = load_file(folder / shard)
    del tensors[SCALES]
    save_file(tensors, folder / shard)


def cut(folder: Path) -> None:
    shard = folder / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), SHARDS[1]),
        (cut, SHARDS[1]),
        (lambda folder: (folder / SHARDS[0]).write_bytes(b""), SHARDS[0]),
        (drop_scales, SCALES),
    ],
    ids=["missing", "short", "empty", "scales are nowhere"],
)
def test_p21_a_damaged_quantized_checkpoint_is_refused_by_name(
    clean: Path, tmp_path: Path, edit: Callable[[Path], object], named: str
) -> None:
    folder = damaged(clean, tmp_path, edit)
    with pytest.raises(CheckpointError) as refused, local_server(config_of(folder)):
        pass
    assert named in str(refused.value)


def test_p21_a_stray_file_beside_quantized_shards_changes_no_answer(clean: Path, tmp_path: Path) -> None:
    def add(folder: Path) -> None:
        tensors = load_file(folder / SHARDS[1])
        save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, folder / "extra.safetensors")

    assert answer(damaged(clean, tmp_path, add)) == answer(clean)
