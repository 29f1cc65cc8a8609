"""The one-shot all-reduce, its ranks played one after the other over buffers of one process: every rank publishes, then
every rank sums. Between real GPUs it is shown by tests/engine/parallel/test_two_gpus.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manta.kernels import runtime
from manta.kernels.all_reduce import (
    Arenas,
    Phase,
    SumTiles,
    all_reduce,
    all_reduce_reference,
    arena_bytes,
    one_shot_plan,
)
from tests.kernels import sum_process

TILES = SumTiles(programs=3, block=128, num_warps=4)


def arenas_of(num_ranks: int, slot_bytes: int, device: torch.device) -> tuple[list[torch.Tensor], list[Arenas]]:
    size = arena_bytes(num_ranks, slot_bytes, TILES)
    memory = [torch.zeros(size // 4, dtype=torch.int32, device=device) for _ in range(num_ranks)]
    table = torch.tensor([one.data_ptr() for one in memory], dtype=torch.int64, device=device)
    return memory, [
        Arenas(rank, table, torch.zeros(TILES.programs, dtype=torch.int32, device=device), slot_bytes, TILES)
        for rank in range(num_ranks)
    ]


def on_all_ranks(parts: list[torch.Tensor], arenas: list[Arenas], residuals: list[torch.Tensor] | None = None) -> None:
    for phase in (Phase.PUBLISH, Phase.SUM):
        for rank, part in enumerate(parts):
            all_reduce(part, arenas[rank], None if residuals is None else residuals[rank], phase=phase)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 1), (2, 127), (3, 1000), (4, 2048), (8, 513)])
def test_every_rank_has_the_same_sum_bit_for_bit(device: torch.device, dtype: torch.dtype, num_ranks: int, size: int):
    _, arenas = arenas_of(num_ranks, 8192, device)
    parts = [torch.randn(size, device=device).to(dtype) for _ in range(num_ranks)]
    expected = all_reduce_reference(parts)
    found = [part.clone() for part in parts]
    on_all_ranks(found, arenas)
    for one in found:
        assert torch.equal(one, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_takes_the_sum_and_the_part_stays(device: torch.device, dtype: torch.dtype):
    _, arenas = arenas_of(2, 4096, device)
    parts = [torch.randn(5, 70, device=device).to(dtype) for _ in range(2)]
    residual = torch.randn(5, 70, device=device).to(dtype)
    found, before = [residual.clone() for _ in parts], [part.clone() for part in parts]
    on_all_ranks(parts, arenas, found)
    assert all(torch.equal(one, all_reduce_reference(parts, residual)) for one in found)
    assert torch.equal(found[0], residual + all_reduce_reference(parts)), "as if it were added by itself"
    assert all(torch.equal(part, was) for part, was in zip(parts, before, strict=True))


def test_sums_of_changing_sizes_follow_one_another_in_two_slots(device: torch.device):
    memory, arenas = arenas_of(2, 4096, device)
    for size in (600, 3, 1024, 1, 129):
        parts = [torch.randn(size, device=device) for _ in range(2)]
        found = [part.clone() for part in parts]
        on_all_ranks(found, arenas)
        assert all(torch.equal(one, all_reduce_reference(parts)) for one in found)
    assert arenas[0].epochs.tolist() == arenas[1].epochs.tolist() == [5] * TILES.programs
    assert all(int(one[0]) == 0 for one in memory), "nobody touches the abort word"


def test_epochs_wrap(device: torch.device):
    memory, arenas = arenas_of(2, 4096, device)
    last = 2**31 - 1
    for rank in range(2):
        arenas[rank].epochs.fill_(last)
        memory[rank][16 : 16 + 2 * TILES.programs] = last  # flags
    parts = [torch.full((9,), float(rank + 1), device=device) for rank in range(2)]
    on_all_ranks(parts, arenas)
    assert all(part.tolist() == [3.0] * 9 for part in parts)
    assert arenas[0].epochs.tolist() == [-(2**31)] * TILES.programs


def test_a_rank_that_never_publishes_is_waited_for_until_the_abort_word_is_written(device: torch.device):
    memory, arenas = arenas_of(2, 4096, device)
    memory[0][0] = 1
    all_reduce(torch.ones(9, device=device), arenas[0])  # comes back
    assert arenas[0].epochs.tolist() == [1] * TILES.programs


def test_ranks_that_run_at_once_wait_for_each_other_and_never_mix_two_sums(tmp_path: Path):
    if not runtime.INTERPRETED:
        pytest.skip(
            "the interpreter's processes share host memory; for GPUs see tests/engine/parallel/test_two_gpus.py"
        )
    num_ranks, file = 2, tmp_path / "arenas"
    file.write_bytes(bytes(4 * sum_process.file_words(num_ranks)))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.sum_process", str(rank), str(num_ranks), str(file)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said


def test_nothing_goes_this_way_where_nothing_was_measured():
    tiles, max_bytes = one_shot_plan(2, torch.device("cpu"))
    assert max_bytes == 0
    assert tiles == SumTiles()


def test_the_table_says_how_and_up_to_which_size(monkeypatch: pytest.MonkeyPatch):
    table = {"2": {"tiles": {"programs": 32, "block": 2048, "num_warps": 4}, "one_shot_max_bytes": 1 << 19}}
    monkeypatch.setattr(runtime, "tuned_table", lambda op, device: table if op == "all_reduce" else {})
    assert one_shot_plan(2, torch.device("cpu")) == (SumTiles(32, 2048, 4), 1 << 19)
    assert one_shot_plan(4, torch.device("cpu"))[1] == 0
