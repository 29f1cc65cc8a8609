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

from manta.engine.errors import CheckpointError
from tests.engine.quant import packers
from tests.engine.quant.packers import save_packed
from tests.replicas.edge.local_server import local_server, write_byte_model
from tests.replicas.edge.sharded_files import SHARDS, config_of, cut, damaged, drop, save_in_two

SCALES = "model.layers.1.mlp.down_proj.scales"


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
    save_in_two(load_file(folder / "model.safetensors"), folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), SHARDS[1]),
        (partial(cut, 64), SHARDS[1]),
        (lambda folder: (folder / SHARDS[0]).write_bytes(b""), SHARDS[0]),
        (partial(drop, SCALES), SCALES),
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
