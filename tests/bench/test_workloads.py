"""Workloads give the same requests everywhere (literal numbers), and trace files become requests."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from manta.bench import traces, workloads
from manta.bench.traces import TraceRow
from manta.bench.workloads import Item
from manta.engine.errors import ConfigError

TOKEN_IDS_SEED_7 = [51944, 66943, 20308, 34607, 71013]
MIX_EXTREMES = (11, 2000, 19, 1000)


def test_token_ids_are_reproducible() -> None:
    assert workloads.token_ids(5, 128256, 7) == TOKEN_IDS_SEED_7
    assert workloads.token_ids(3, 128256, 7) == TOKEN_IDS_SEED_7[:3]
    many = workloads.token_ids(10_000, 2000, 1)
    assert min(many) >= 1000
    assert max(many) < 2000
    assert len(set(many)) == 1000
    with pytest.raises(ConfigError, match="more than 1000"):
        workloads.token_ids(1, 1000, 0)


def test_chat_like_lengths_are_those_of_published_figures() -> None:
    prompt_lens, output_lens = workloads.mix_lengths()
    assert (sum(prompt_lens), sum(output_lens)) == (357_923, 232_936)
    assert (min(prompt_lens), max(prompt_lens), min(output_lens), max(output_lens)) == MIX_EXTREMES


def test_an_item_does_not_depend_on_its_neighbours() -> None:
    three = workloads.uniform(3, 10, 4, vocab_size=5000, seed=2)
    assert three[:2] == workloads.uniform(2, 10, 4, vocab_size=5000, seed=2)
    assert three[0] != three[1]
    assert [len(item.prompt_token_ids) for item in three] == [10, 10, 10]


def test_a_shared_prefix_is_shared_and_suffixes_are_not() -> None:
    items = workloads.shared_prefix(
        4, prefix_len=32, suffix_len=8, output_len=2, vocab_size=5000, prefix_seed=1, suffix_seed=2
    )
    assert len({tuple(item.prompt_token_ids[:32]) for item in items}) == 1
    assert len({tuple(item.prompt_token_ids[32:]) for item in items}) == 4
    assert {len(item.prompt_token_ids) for item in items} == {40}


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [("512", 512, 512), ("fixed:7", 7, 7), ("uniform:3:9", 3, 9), ("lognormal:50:2:10:60", 10, 60)],
)
def test_lengths_keep_their_bounds(spec: str, low: int, high: int) -> None:
    found = workloads.lengths(spec, 2000, seed=3)
    assert (min(found), max(found)) == (low, high)
    assert found == workloads.lengths(spec, 2000, seed=3)


@pytest.mark.parametrize("spec", ["", "0", "normal:3:4", "uniform:9:3", "lognormal:1", "uniform:a:b", "fixed:1:2"])
def test_lengths_that_mean_nothing_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        workloads.lengths(spec, 1, seed=0)


def test_arrivals() -> None:
    assert workloads.constant_arrivals(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    times = workloads.poisson_arrivals(4000, 5.0, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(800, rel=0.05)
    assert workloads.poisson_arrivals(3, 5.0, seed=1) == times[:3]
    items = workloads.at_rate([Item([1], 1), Item([2], 1)], 4.0, process="constant")
    assert [item.arrival_s for item in items] == [0.0, 0.25]
    with pytest.raises(ConfigError, match="rate above 0"):
        workloads.at_rate(items, 0.0)
    with pytest.raises(ConfigError, match="weekly"):
        workloads.at_rate(items, 1.0, process="weekly")


def test_a_trace_is_stretched_to_a_rate() -> None:
    items = [Item([1], 1, 10.0), Item([1], 1, 11.0), Item([1], 1, 14.0)]
    assert [item.arrival_s for item in workloads.rescaled(items, 1.0)] == [0.0, 0.5, 2.0]
    with pytest.raises(ConfigError, match="no arrival times"):
        workloads.rescaled([Item([1], 1), Item([1], 1)], 1.0)


def test_bundled_traces_are_read_whole() -> None:
    code = traces.read_trace(traces.find_trace("azure2023_code"))
    assert len(code) == 8819
    assert code[:2] == [TraceRow(0.0, 4808, 10), TraceRow(0.052, 3180, 8)]
    chat = traces.read_trace(traces.find_trace("mooncake_conversation_1000"))
    assert len(chat) == 1000
    assert (chat[0].prompt_len, chat[0].output_len, chat[0].block_ids) == (6758, 500, tuple(range(14)))
    assert len(traces.read_trace(traces.find_trace("azure2023_code"), limit=3)) == 3


def test_hash_ids_become_shared_prompts(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 1100, 5, (1, 2, 3)), TraceRow(1.0, 1100, 5, (1, 2, 4)), TraceRow(2.0, 9000, 5)]
    items = traces.trace_items(rows, vocab_size=5000, max_model_len=2000, seed=0)
    first, second = (item.prompt_token_ids for item in items)  # the third does not fit the context
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    assert len(first) == len(second) == 1100
    with pytest.raises(ConfigError, match="no request"):
        traces.trace_items(rows[2:], vocab_size=5000, max_model_len=2000, seed=0)


def test_traces_from_files(tmp_path: Path) -> None:
    lengths_only = tmp_path / "lengths.csv"
    lengths_only.write_text("input_len,output_len\n12,3\n5,1\n")
    assert traces.read_trace(lengths_only) == [TraceRow(0.0, 12, 3), TraceRow(0.0, 5, 1)]
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"timestamp": 500, "input_length": 4, "output_length": 2}\n' * 2))
    assert traces.read_trace(zipped) == [TraceRow(0.0, 4, 2)] * 2
    broken = tmp_path / "b.csv"
    broken.write_text("input_len,output_len\n12,3\nx,1\n")
    with pytest.raises(ConfigError, match=r"b\.csv, line 3"):
        traces.read_trace(broken)
    with pytest.raises(ConfigError, match=r"jsonl or \.csv"):
        traces.read_trace(tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match="azure2023_code"):
        traces.find_trace("nowhere")
