"""Quick replicas: the same times as exact ones where nothing runs short, nothing lost where it does."""

from __future__ import annotations

import pytest

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.quick import Job, QuickReplica
from manta.autoscaling.simulator.quick_cache import FleetIndex, QuickCache
from manta.autoscaling.simulator.quick_kind import QuickKind

from .fleets import fleet_of, request, spec, step_s
from .quick_fleets import drawn, quick_times


@pytest.mark.parametrize(
    ("rate", "sizes"),
    [
        (2.0, {"num_blocks": 2000}),
        (60.0, {"num_blocks": 2000}),
        (60.0, {"num_blocks": 2000, "max_num_seqs": 2}),
        (60.0, {"num_blocks": 2000, "max_num_batched_tokens": 160, "tpot_target_s": 0.014}),
    ],
    ids=["idle", "busy", "short of slots", "bounded steps"],
)
def test_first_and_last_tokens_come_when_the_real_scheduler_says(rate: float, sizes: dict) -> None:
    requests = drawn(200, rate=rate, prompt=60, output=12)
    exact = fleet_of(1, **sizes).run(requests)
    found, replica = quick_times(requests, **sizes)
    for one, (first_s, finished_s) in zip(exact, found, strict=True):
        assert first_s == pytest.approx(one.first_token_s, abs=1e-9)
        assert finished_s == pytest.approx(one.finished_s, abs=1e-9)
    assert replica.is_idle


def test_where_blocks_run_short_times_are_near_the_real_ones() -> None:
    requests = drawn(300, rate=60.0, prompt=80, output=80)
    exact = fleet_of(1, num_blocks=160, max_num_seqs=64).run(requests)
    found, _ = quick_times(requests, num_blocks=160, max_num_seqs=64)
    exact_s = sum(one.ttft_s or 0.0 for one in exact) / 300
    found_s = sum((first_s or 0.0) - one.arrival_s for one, (first_s, _) in zip(requests, found, strict=True)) / 300
    assert found_s == pytest.approx(exact_s, rel=0.1)
    assert all(finished_s is not None for _, finished_s in found)


def test_who_came_last_is_preempted_and_still_gets_all_its_tokens() -> None:
    requests = [request(f"r{index}", 16, 100) for index in range(4)]
    found, replica = quick_times(requests, num_blocks=14)
    assert replica.num_preemptions > 0
    assert all(finished_s is not None for _, finished_s in found)
    assert (replica.num_jobs, replica.num_waiting_tokens, replica.kv_usage) == (0, 0, 0.0)


def test_a_replica_that_stops_says_how_many_tokens_each_job_had() -> None:
    events = EventQueue()
    kind = QuickKind(spec(num_blocks=200))
    replica = QuickReplica(kind, events, on_first=lambda job: None, on_end=lambda job: None)
    replica.submit(Job("a", 10, 50))
    events.run(until_s=0.0)
    events.now_s = step_s_of_prompt = 1e-3 + 10e-4
    replica.submit(Job("b", 10, 50))
    events.run(until_s=step_s_of_prompt + 0.0105)
    events.now_s = step_s_of_prompt + 0.0105
    lost = replica.stop()
    assert [job.owner for job, _ in lost] == ["a", "b"]
    assert 5 < lost[0][1] <= 11
    assert lost[1][1] < lost[0][1]
    assert replica.is_idle


def test_a_job_whose_kv_came_with_it_computes_one_token() -> None:
    events, firsts = EventQueue(), []
    kind = QuickKind(spec(num_blocks=200))
    replica = QuickReplica(kind, events, on_first=lambda job: firsts.append(events.now_s), on_end=lambda job: None)
    replica.submit(Job("a", 100, 5, num_cached=99))
    events.run()
    assert firsts == [pytest.approx(1e-3 + 1e-4)]


def test_cached_blocks_are_not_computed_again() -> None:
    events, firsts, index = EventQueue(), [], FleetIndex()
    cache = QuickCache(index, 0, num_blocks=200, block_size=16)
    replica = QuickReplica(
        QuickKind(spec(num_blocks=200)), events, on_first=lambda job: firsts.append(job), on_end=lambda job: None,
        cache=cache,
    )  # fmt: skip
    hashes = request("a", 40, 1, prefix=1).block_hashes
    replica.submit(Job("a", 40, 1, hashes=hashes))
    events.run()
    replica.submit(Job("b", 40, 1, hashes=hashes))
    events.run()
    assert [job.num_cached for job in firsts] == [0, 32]
    assert index.match(hashes) == [(1, 2)]
    cache.clear()
    assert index.match(hashes) == []


def test_the_index_says_who_holds_how_much() -> None:
    index = FleetIndex()
    hashes = request("a", 64, 1, prefix=1).block_hashes
    for number, num_blocks in ((0, 2), (1, 4)):
        QuickCache(index, number, num_blocks=10, block_size=16).began(hashes[:num_blocks], 64)
    assert index.match(hashes) == [(1, 2), (2, 4)]


def test_step_times_of_a_kind_are_those_of_its_model() -> None:
    base, slope = QuickKind(spec()).decode_times.piece(5, 40_000)
    from manta.engine.step_time import StepShape

    assert base + slope * 50_000 == pytest.approx(step_s(StepShape(0, 5, 50_000)))
