"""`manta bench handoff` measures real hand-overs between processes, on a CPU with a tiny model."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from manta.bench import handoff
from manta.bench.handoff import Sizes
from manta.bench.handoff_processes import Child, Ready, Tokens
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from tests.engine.kv_transfer.pairs import TINY

SIZES = Sizes(
    prompt_lens=(40,),
    repeats=1,
    answer_len=4,
    num_decodes=2,
    decode_prompt_len=20,
    long_prompt_len=70,
    long_answer_len=4,
    interval_s=0.5,
    duration_s=1.0,
    settle_s=0.2,
)


def tiny_config(folder: Path) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps({**TINY, "vocab_size": 2003, "max_position_embeddings": 16384}))
    return EngineConfig.build(
        str(folder), device="cpu", dtype="float32", load_format="dummy", cpu_cache_gib=0.2, max_num_batched_tokens=32
    )


def test_every_part_gives_its_figures_and_every_prompt_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handoff, "ON_CPU", SIZES)
    report = handoff.run(tiny_config(tmp_path), json_path=tmp_path / "handoff.json")
    figures = json.loads((tmp_path / "handoff.json").read_text())["figures"]
    assert figures["transfer_host_40_gb_per_s"] > 0
    assert figures["equal_answers_host_40_percent"] == 100
    assert figures["ttft_host_40_ms"] > 0
    assert figures["pd_itl_max_ms"] >= figures["pd_itl_p99_ms"] > 0
    assert figures["chunked_itl_max_ms"] >= figures["chunked_itl_p99_ms"] > 0
    assert figures["chunked_recomputed"] == 0
    assert any("share one device" in note for note in report.details["notes"])


def test_two_devices_have_an_engine_each_and_the_one_engine_half_of_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(handoff, "ON_CPU", SIZES)
    report = handoff.run(tiny_config(tmp_path), parts=["transfer", "itl"], devices=["cpu", "cpu"])
    assert report.figures["transfer_host_40_gb_per_s"] > 0
    assert {"pd_itl_p99_ms", "chunked_itl_p99_ms"} <= set(report.figures)
    assert any("half of the load" in note for note in report.details["notes"])


def test_devices_come_in_pairs(tmp_path: Path):
    with pytest.raises(ConfigError, match="must be two"):
        handoff.run(tiny_config(tmp_path), devices=["cuda:0"])


def test_a_part_that_there_is_not_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match="nonsense"):
        handoff.run(tiny_config(tmp_path), parts=["nonsense"])


def talk_until_told_to_end(pipe: Connection) -> None:
    pipe.send(Ready(None))
    while not pipe.poll():
        pipe.send(Tokens(0.0, [("request", list(range(1000)), None)]))


def test_a_process_that_nobody_listens_to_any_more_ends_by_itself():
    child: Child[None] = Child(talk_until_told_to_end)
    child.close()
    assert child._process.exitcode == 0
