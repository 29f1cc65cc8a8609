"""The planner's estimate: steady state by hand, single requests by hand, and beside the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manta.autoscaling.planner.demand import Asked, Demand
from manta.autoscaling.planner.estimate import ReplicaModel, Transfer, estimate
from manta.autoscaling.planner.fleet import simulate
from manta.autoscaling.planner.memory import ledger
from manta.autoscaling.planner.placement import Placement, Pool, ReplicaKind
from manta.autoscaling.planner.report import plan_tree
from manta.autoscaling.planner.search import Plan, Planner
from manta.autoscaling.planner.steady import Sizes, max_rate, steady
from manta.cluster.routing.roles import Role
from manta.engine.step_time import StepShape
from tests.autoscaling.planning import LLAMA_8B, demand_of, problem

ONE = ReplicaKind(1, 1, "bf16", "bf16")


def step_s(step: StepShape) -> float:
    """10 ms, and 0.1 ms for each prompt token."""
    return 10e-3 + 1e-4 * step.num_prefill_tokens if step.num_prefill_tokens + step.num_decode_seqs else 0.0


def replica(**changes: object) -> ReplicaModel:
    made = ReplicaModel(step_s, Role.MIXED, kv_room_tokens=100_000, max_num_seqs=8, max_num_batched_tokens=1000)
    return replace(made, **changes)  # type: ignore[arg-type]


def demand(*requests: tuple[float, int, int]) -> Demand:
    return Demand(1.0, tuple(Asked(*one) for one in requests))


def test_a_lone_request_takes_its_prompt_s_step_and_a_step_for_each_token_more() -> None:
    found = estimate([replica()], demand((0.0, 100, 11)))
    assert found.ttft_p50_s == pytest.approx(20e-3)
    assert found.tpot_p50_s == pytest.approx(10e-3)


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    found = estimate([replica()], demand((0.0, 2500, 2)))
    assert found.ttft_p50_s == pytest.approx(3 * 10e-3 + 0.25)


def test_who_comes_during_a_step_is_in_the_one_after_the_next() -> None:
    # Steps end at 10, 20, 30 ms; the one from 10 to 20 is planned when the second request comes at 15.
    found = estimate([replica()], demand((0.0, 1, 100), (0.0151, 1, 100)), percentile=99)
    assert found.ttft_at_s == pytest.approx(0.0302 + 10.1e-3 - 0.0151, abs=2e-4)


def test_a_request_waits_for_room_in_the_cache() -> None:
    room = replica(kv_room_tokens=1000)
    found = estimate([room], demand((0.0, 900, 50), (0.001, 900, 2)), percentile=99)
    assert found.ttft_at_s > 50 * 10e-3


def test_prompts_that_are_computed_elsewhere_come_with_their_kv() -> None:
    pools = [replica(role=Role.PREFILL), replica(role=Role.DECODE)]
    transfer = Transfer(bytes_per_token=1000.0, bytes_per_s=1e6, latency_s=2e-3)
    found = estimate(pools, demand((0.0, 100, 11)), transfer=transfer)
    assert found.ttft_p50_s == pytest.approx(20e-3)
    assert found.tpot_p50_s * 10 == pytest.approx(100e-3 - 20e-3 + 2e-3 + 10 * 10e-3, abs=2e-3)


def test_steady_state_solves_its_own_step() -> None:
    asked = problem()
    model, load = ONE.step_times(asked, LLAMA_8B), demand_of(asked)
    sizes = Sizes(ledger(asked, LLAMA_8B, model).kv_room_tokens, 256, 8192)
    most = max_rate(model, load, Role.MIXED, sizes)
    found = steady(model, load, Role.MIXED, sizes, 0.5 * most)
    assert found is not None
    assert found.utilization == pytest.approx(0.5, rel=1e-3)
    assert found.num_seqs == pytest.approx(0.5 * most * load.num_output_tokens * found.step_s)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert steady(model, load, Role.MIXED, sizes, 1.01 * most) is None


def test_little_room_for_kv_is_what_bounds_the_rate() -> None:
    asked = problem()
    model, load = ONE.step_times(asked, LLAMA_8B), demand_of(asked)
    found = steady(model, load, Role.MIXED, Sizes(12_000, 256, 8192), 0.1)
    assert found is not None
    assert found.bound == "kv_memory"


def test_the_ledger_adds_up_to_the_gpu_s_memory() -> None:
    asked = problem()
    found = ledger(asked, LLAMA_8B, ReplicaKind(2, 1, "bf16", "bf16").step_times(asked, LLAMA_8B))
    parts = found.tree()
    assert sum(parts.values()) - parts["total_gb"] == pytest.approx(80.0, abs=0.01)
    assert parts["weights_gb"] == pytest.approx(8.03, abs=0.01)
    assert found.kv_room_tokens * 131_072 / 2 == pytest.approx(found.kv_cache, rel=0.01)


@pytest.mark.parametrize(
    ("pools", "rate"),
    [
        ((Pool(Role.MIXED, 1),), 12.0),
        ((Pool(Role.MIXED, 3, 0.03),), 45.0),
        ((Pool(Role.PREFILL, 2), Pool(Role.DECODE, 1)), 30.0),
    ],
    ids=["one replica", "three with bounded steps", "prefill and decode"],
)
def test_estimate_and_simulator_agree_within_15_percent(pools: tuple[Pool, ...], rate: float) -> None:
    asked = problem(rate=rate)
    load = demand_of(asked, 400)
    judged = Planner(asked, LLAMA_8B, load).judge(Placement(ONE, pools), rate)
    assert judged is not None
    assert judged.utilization < 0.8
    written = plan_tree(Plan(asked, LLAMA_8B, load, (judged,), (), True, None))
    simulated = simulate(written, load, random.Random(1))
    for name in ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s"):
        assert written["best"][name] == pytest.approx(simulated[name], rel=0.15), name
