"""The cost of routing, with sizes that take no time: what is measured is what routing does."""

from __future__ import annotations

import pytest

from manta.bench import routing_cost
from manta.bench.routing_cost import BLOCK_SIZE, Fleet, index_bytes, request, run
from manta.cluster.routing.policy import Decision, RoutingSettings, decide


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_cost, "BLOCKS_A_REPLICA", 100)
    monkeypatch.setattr(routing_cost, "PROMPT_LENS", {"4k": 4096, "128k": 16_384})


def test_conversations_are_held_in_part_by_a_few_and_worst_cases_by_all():
    fleet = Fleet(8)
    matched = fleet.index.match(fleet.conversation(4096))
    assert len(matched) == 8
    assert 1 <= sum(num_blocks > routing_cost.SYSTEM_BLOCKS for num_blocks in matched.values()) <= 3
    worst = fleet.index.match(fleet.held_by_all(8 * 8 * BLOCK_SIZE))
    assert sorted(worst.values()) == [8, 16, 24, 32, 40, 48, 56, 64]


def test_the_decisions_that_are_measured_choose_a_replica():
    fleet = Fleet(4)
    one = request(fleet.conversation(4096), 4096)
    settings = RoutingSettings()
    assert isinstance(decide(one, fleet.views, fleet.index, now_s=0.0, settings=settings, tie=0.0), Decision)


def test_an_index_takes_between_its_hashes_and_a_quarter_of_a_kilobyte_a_block():
    for num_bytes in index_bytes(20_000, 8):
        assert 49 < num_bytes < 256


def test_a_report_has_every_figure_of_both_prompt_lengths():
    figures = run(num_replicas=4, repeats=3, num_memory_blocks=4000).figures
    for name in ("decide_4k", "decide_128k", "decide_128k_worst", "expect_4k", "hash_128k", "learn"):
        assert figures[f"{name}_us_p99"] >= figures[f"{name}_us_p50"] > 0
    assert figures["index_mb_per_million_blocks"] > 0
