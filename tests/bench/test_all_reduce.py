"""`manta bench all-reduce`: what it enters into the table, and its processes, over shared memory and gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manta.bench import all_reduce
from manta.engine.errors import ConfigError

TILES = {"one_shot": {"programs": 64}, "one_shot_small": {"programs": 32}}


def test_the_fastest_tiles_are_taken_up_to_the_first_size_at_which_nccl_is_ahead():
    times = {
        "nccl graph": {8: 12.0, 16: 12.0, 32: 13.0, 64: 14.0},
        "one_shot graph": {8: 6.0, 16: 7.0, 32: 14.0, 64: 9.0},
        "one_shot_small graph": {8: 7.0, 16: 8.0},
    }
    found = all_reduce.table_entry(times, asdict_of_tiles=TILES)
    assert found == {"tiles": {"programs": 64}, "one_shot_max_bytes": 16}
    times["one_shot_small graph"] = {8: 5.0, 16: 5.0}
    assert all_reduce.table_entry(times, asdict_of_tiles=TILES)["tiles"] == {"programs": 32}


def test_no_size_is_taken_where_nccl_is_ahead_from_the_start():
    times = {"nccl graph": {8: 5.0, 16: 5.0}, "one_shot graph": {8: 6.0, 16: 4.0}}
    found = all_reduce.table_entry(times, asdict_of_tiles={"one_shot": TILES["one_shot"]})
    assert found["one_shot_max_bytes"] == 0


def test_gpus_that_cannot_read_each_other_s_memory_leave_all_sizes_to_nccl():
    found = all_reduce.table_entry({"nccl graph": {8: 5.0}}, asdict_of_tiles=TILES)
    assert found == {"tiles": TILES["one_shot"], "one_shot_max_bytes": 0}


def test_an_entry_stands_beside_those_of_other_operations_and_numbers_of_gpus(tmp_path: Path):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"linear": {"a": 1}, "all_reduce": {"4": {"one_shot_max_bytes": 1}}}))
    all_reduce.write_entry(file, 2, {"one_shot_max_bytes": 2})
    assert json.loads(file.read_text()) == {
        "linear": {"a": 1},
        "all_reduce": {"4": {"one_shot_max_bytes": 1}, "2": {"one_shot_max_bytes": 2}},
    }


def test_processes_sum_check_and_report(tmp_path: Path):
    file = tmp_path / "result.json"
    report = all_reduce.run(num_gpus=2, on_cpu=True, json_path=file)
    assert {"shared_memory_eager_8kib_us", "gloo_eager_32kib_us"} <= set(report.figures)
    assert json.loads(file.read_text())["bench"] == "all-reduce"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs here")
def test_one_gpu_is_not_enough():
    with pytest.raises(ConfigError, match="2 GPUs of one machine are needed"):
        all_reduce.run()
