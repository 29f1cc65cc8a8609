"""Each rank has its slices of the one model, and reads no more than these, from every kind of source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource, load_shape
from manta.engine.models.family import Parameter
from manta.engine.models.llama import LLAMA
from manta.engine.parallel.layout import ShardLayout, shard_parameters
from manta.engine.parallel.place import RankPlace
from manta.engine.weights import gguf_file, load, safetensors_files
from manta.engine.weights.load import load_weights
from manta.engine.weights.parameters import destinations
from manta.engine.weights.slices import slices
from tests.engine.parallel.shards import random_shape
from tests.engine.runners import save_tiny

CPU = torch.device("cpu")
DUMMY = ModelSource("random", "dummy", Path(), None)
SPLITS = [(2, 1), (4, 1), (1, 3), (2, 2)]
BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}


def held(source: ModelSource, shape: ModelShape, place: RankPlace) -> dict[Parameter, torch.Tensor]:
    layout = ShardLayout.of(shape, place)
    return destinations(shape, load_weights(source, shape, dtype=torch.float32, device=CPU, layout=layout, seed=5))


def check_all_ranks(source: ModelSource, shape: ModelShape, tp_size: int, pp_size: int) -> None:
    """Every rank's tensors are slices of the whole model's, and all of the model is somewhere."""
    whole = held(source, shape, RankPlace(0))
    covered = {parameter: torch.zeros(view.shape, dtype=torch.bool) for parameter, view in whole.items()}
    for rank in range(tp_size * pp_size):
        place = RankPlace(rank, tp_size, pp_size)
        slice_of = slices(shape, ShardLayout.of(shape, place))
        for parameter, view in held(source, shape, place).items():
            index = slice_of(parameter).index
            assert torch.equal(view, whole[parameter][index]), (rank, parameter)
            covered[parameter][index] = True
    assert all(bool(mask.all()) for mask in covered.values())


@pytest.mark.parametrize(("tp_size", "pp_size"), SPLITS)
@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_are_slices_of_the_model_on_one_rank(tp_size: int, pp_size: int, tied: bool):
    check_all_ranks(DUMMY, random_shape(q=6, kv=2, tie_word_embeddings=tied, **BIASES), tp_size, pp_size)


def test_random_weights_do_not_depend_on_how_gate_and_up_lie(monkeypatch: pytest.MonkeyPatch):
    shape = random_shape(q=4, kv=2, **BIASES)
    stacked = held(DUMMY, shape, RankPlace(1, 2))
    allocate = load.allocate_parameters

    def interleaved(*args: Any, **kwargs: Any) -> Any:
        return replace(allocate(*args, **kwargs), interleaved=True)

    monkeypatch.setattr(load, "allocate_parameters", interleaved)
    in_turns = held(DUMMY, shape, RankPlace(1, 2))
    assert not in_turns[Parameter("gate", 0, "weight")].is_contiguous()
    for parameter, view in stacked.items():
        assert torch.equal(in_turns[parameter], view), parameter


@pytest.mark.parametrize(("tp_size", "pp_size"), SPLITS)
def test_safetensors_are_read_in_slices(tmp_path: Path, tp_size: int, pp_size: int):
    save_tiny(tmp_path, max_shard_size="60KB", attention_bias=True, mlp_bias=True)
    source = ModelSource("tiny", "safetensors", tmp_path, None)
    check_all_ranks(source, load_shape(source), tp_size, pp_size)


class _CountingFile:
    """Of an opened safetensors file: counts the elements that are asked for."""

    def __init__(self, opened: Any, counts: dict[str, int]) -> None:
        self._opened, self._counts = opened, counts

    def __enter__(self) -> _CountingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return self._opened.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(name, self._opened.get_tensor(name))

    def get_slice(self, name: str) -> _CountingSlice:
        return _CountingSlice(self._opened.get_slice(name), lambda part: self._count(name, part))

    def _count(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._counts[name] = self._counts.get(name, 0) + tensor.numel()
        return tensor


class _CountingSlice:
    def __init__(self, stored: Any, count: Any) -> None:
        self._stored, self._count = stored, count

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._count(self._stored[index])


def test_a_rank_reads_nothing_but_its_slices_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny(tmp_path)
    source = ModelSource("tiny", "safetensors", tmp_path, None)
    shape = load_shape(source)
    counts: dict[str, int] = {}
    open_file = safetensors_files._open
    monkeypatch.setattr(safetensors_files, "_open", lambda file: _CountingFile(open_file(file), counts))
    for place in (RankPlace(0), RankPlace(3, 4), RankPlace(1, 2, 2), RankPlace(2, 2, 2)):
        counts.clear()
        layout = ShardLayout.of(shape, place)
        load_weights(source, shape, dtype=torch.bfloat16, device=CPU, layout=layout)
        assert sum(counts.values()) == shard_parameters(shape, layout)


def write_gguf(file: Path, shape: ModelShape, kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    writer = GGUFWriter(file, "llama")
    for parameter, view in held(DUMMY, shape, RankPlace(0)).items():
        values = rng.normal(size=tuple(view.shape)).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(LLAMA.gguf_name(parameter), values)
        else:
            writer.add_tensor(LLAMA.gguf_name(parameter), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (3, 1), (2, 2)])
def test_gguf_is_read_in_slices_also_through_the_middle_of_a_block(
    tmp_path: Path, kind: GGMLQuantizationType, tp_size: int, pp_size: int
):
    # Query heads of 16 and columns in multiples of 16, in blocks of 32.
    shape = random_shape(q=6, kv=3, hidden_size=96, intermediate_size=160, **BIASES)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, shape, kind)
    check_all_ranks(ModelSource("tiny", "gguf", file, None), shape, tp_size, pp_size)


def test_a_rank_dequantizes_its_rows_and_the_blocks_of_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = random_shape(q=4, kv=2, hidden_size=64, intermediate_size=128, vocab_size=256)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, shape, GGMLQuantizationType.Q8_0)
    num_bytes = 0
    dequantize = gguf_file.dequantize

    def counting(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        nonlocal num_bytes
        num_bytes += raw.size
        return dequantize(raw, kind)

    monkeypatch.setattr(gguf_file, "dequantize", counting)
    layout = ShardLayout.of(shape, RankPlace(1, 2))
    load_weights(ModelSource("tiny", "gguf", file, None), shape, dtype=torch.float32, device=CPU, layout=layout)
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    matrices = shard_parameters(shape, layout) - norms
    assert num_bytes == matrices // 32 * 34 + 4 * norms  # every split falls between blocks here


def test_a_stage_of_its_own_has_a_copy_of_the_tied_embedding():
    shape = random_shape(q=4, kv=2, tie_word_embeddings=True)
    embedding = Parameter("embedding", None, "weight")
    first, middle, last = (held(DUMMY, shape, RankPlace(rank, 1, 3)) for rank in range(3))
    assert torch.equal(first[embedding], last[embedding])
    assert embedding not in middle
    assert {parameter.layer for parameter in middle} == {1}
