"""What an edge counts and reports for scaling, and requests that wait while no engine was ever there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Counters, EdgeSignals, ScalingStatus
from manta.cluster.slo import Slo
from manta.engine.errors import Overloaded, Unavailable
from manta.engine.request import FinishReason
from manta.engine.stats import EngineInfo, Snapshot
from manta.replicas.edge.client import ChoiceRecord, RequestRecord
from manta.replicas.edge.holding import Holding
from manta.replicas.edge.scaling_ledger import ScalingLedger
from manta.replicas.edge.scaling_report import ReplicaLoad, ScalingReporter, pool_signals


def record(*choices: tuple[FinishReason, float | None, float | None]) -> RequestRecord:
    made = tuple(ChoiceRecord(reason, 10, ttft_s, tpot_s) for reason, ttft_s, tpot_s in choices)
    return RequestRecord("completions", False, 5, 0, 0.0, 1.0, made)


def test_answers_are_counted_by_what_of_the_objective_they_kept() -> None:
    ledger = ScalingLedger(Slo(ttft_s=1.0, tpot_s=0.1))
    ledger.request_finished(record((FinishReason.STOP, 0.5, 0.05), (FinishReason.LENGTH, 2.0, 0.5)))
    ledger.request_finished(record((FinishReason.STOP, 0.5, 0.2), (FinishReason.STOP, 0.9, None)))
    assert (ledger.num_good, ledger.num_late_ttft, ledger.num_late_tpot) == (2, 1, 1)
    assert (ledger.num_finished, ledger.num_output_tokens) == (4, 40)


def test_what_the_client_gave_up_or_got_wrong_is_nobodys_failure() -> None:
    ledger = ScalingLedger(Slo(ttft_s=1.0))
    ledger.request_finished(record((FinishReason.CANCELLED, None, None)))
    ledger.request_refused("completions", 400, "invalid")
    assert (ledger.num_finished, ledger.num_failed) == (0, 0)
    ledger.request_finished(record((FinishReason.ERROR, 0.1, None)))
    ledger.request_refused("completions", 429, "overloaded")
    ledger.request_refused("completions", 503, "unavailable")
    assert ledger.num_failed == 3


def load(replica_id: str, *, running: int, is_draining: bool = False, role: Role = Role.MIXED) -> ReplicaLoad:
    info = EngineInfo(
        model_name="m", max_model_len=64, vocab_size=9, block_size=16, num_blocks=100, max_num_seqs=8,
        max_num_waiting=4, device="sim", dtype="float32", startup_s={"weights": 2.0, "graphs": 1.0},
    )  # fmt: skip
    snapshot = Snapshot(num_running=running, num_blocks=100, num_used_blocks=50)
    return ReplicaLoad(replica_id, role, is_draining, snapshot, info, None)


def test_loads_are_summed_by_pool_and_who_left_counts_nowhere() -> None:
    loads = [load("a", running=3), load("b", running=4, is_draining=True), load("gone", running=9)]
    (pool,) = pool_signals([("engine", Role.MIXED)], loads, {"a": "engine", "b": "engine"}.get)
    assert (pool.num_ready, pool.num_draining, pool.num_running) == (1, 1, 7)
    assert (pool.kv_cache_usage, pool.kv_room_tokens, pool.startup_s) == (0.5, 1600, 3.0)


def test_replicas_that_have_the_other_pools_role_are_lent() -> None:
    loads = [load("a", running=0, role=Role.PREFILL), load("b", running=0, role=Role.DECODE)]
    prefill, decode = pool_signals(
        [("prefill", Role.PREFILL), ("decode", Role.DECODE)], loads, lambda replica_id: "decode"
    )
    assert (prefill.num_ready, decode.num_ready, decode.num_lent) == (0, 2, 1)


async def test_a_request_that_waits_is_reported_at_once_and_an_answer_is_learned() -> None:
    sent: list[EdgeSignals] = []
    held, learned = [0], asyncio.Event()

    async def send(signals: EdgeSignals) -> ScalingStatus:
        sent.append(signals)
        return ScalingStatus(time_s=float(len(sent)))

    reporter = ScalingReporter(
        "edge", counters=lambda: Counters(num_arrived=7), num_held=lambda: held[0], pools=tuple, send=send,
        learned=lambda status: learned.set(), period_s=3600.0,
    )  # fmt: skip
    task = asyncio.create_task(reporter.run())
    await asyncio.wait_for(learned.wait(), 5)
    learned.clear()
    held[0] = 1
    await asyncio.wait_for(learned.wait(), 5)
    task.cancel()
    assert [(one.counters.num_arrived, one.num_held) for one in sent] == [(7, 0), (7, 1)]
    assert reporter.status == ScalingStatus(time_s=2.0)


async def test_reports_go_on_after_the_autoscaler_was_away() -> None:
    answers: list[Any] = [RuntimeError("gone"), ScalingStatus(time_s=1.0)]
    learned = asyncio.Event()

    async def send(signals: EdgeSignals) -> ScalingStatus:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    reporter = ScalingReporter(
        "edge", counters=Counters, num_held=lambda: 0, pools=tuple, send=send, learned=lambda status: learned.set(),
        period_s=0.01,
    )  # fmt: skip
    answers += [ScalingStatus(time_s=1.0)] * 1000
    task = asyncio.create_task(reporter.run())
    await asyncio.wait_for(learned.wait(), 5)
    task.cancel()


async def test_requests_wait_bounded_until_an_engine_is_known() -> None:
    known = [False]
    holding = Holding(max_held=1, max_wait_s=60.0, is_open=lambda: known[0])
    first = asyncio.create_task(holding.wait())
    await asyncio.sleep(0)
    assert holding.num_held == 1
    with pytest.raises(Overloaded, match="1 requests wait for one already"):
        await holding.wait()
    known[0] = True
    holding.open()
    await first
    await holding.wait()
    assert holding.num_held == 0


async def test_a_request_for_which_no_engine_comes_is_answered() -> None:
    holding = Holding(max_held=1, max_wait_s=0.01, is_open=lambda: False)
    with pytest.raises(Unavailable, match=r"within 0\.01 s"):
        await holding.wait()
    assert holding.num_held == 0
