"""Which placement is best, why others are not, and what is said when there is none."""

from __future__ import annotations

import json
import random

import pytest

from manta.autoscaling.planner.demand import Demand
from manta.autoscaling.planner.fleet import problem_of, shape_of, specs_of, step_model_of
from manta.autoscaling.planner.placement import ReplicaKind
from manta.autoscaling.planner.report import plan_tree
from manta.autoscaling.planner.search import Planner
from manta.cluster.routing.roles import Role
from manta.engine.errors import ConfigError
from tests.autoscaling.planning import LLAMA_8B, demand_of, plan_of, problem

MIXED = {
    "pools": ["mixed"],
    "tensor_parallel": [1],
    "pipeline_parallel": [1],
    "weights": ["bf16", "fp8"],
    "kv": ["bf16"],
}


def test_the_best_placement_keeps_the_objective_with_the_fewest_gpus() -> None:
    found = plan_of(problem(rate=20.0, search=MIXED))
    assert found.is_feasible
    assert found.best is not None
    assert found.best.placement.num_gpus == min(one.placement.num_gpus for one in found.ranked)
    assert found.best.estimate.ttft_p95_s <= 0.5
    assert found.best.estimate.tpot_p95_s <= 0.03
    assert found.best.utilization <= 0.9


def test_among_placements_of_as_many_gpus_the_one_that_rounds_least_is_best() -> None:
    found = plan_of(problem(rate=5.0, search=MIXED))
    assert found.best is not None
    assert found.best.placement.kind == ReplicaKind(1, 1, "bf16", "bf16")
    assert {one.placement.kind.weights for one in found.ranked} >= {"bf16", "fp8"}


def test_more_load_asks_for_more_gpus() -> None:
    sizes = [
        found.best.placement.num_gpus
        for rate in (10.0, 60.0)
        if (found := plan_of(problem(rate=rate, search=MIXED))).best
    ]
    assert sizes[0] < sizes[1]


def test_a_rate_that_cannot_be_served_is_answered_with_the_largest_that_can() -> None:
    asked = problem(rate=500.0, cluster={"gpus_per_node": 2}, search=MIXED)
    found = plan_of(asked)
    assert not found.is_feasible
    assert found.best is not None
    assert found.largest_rate == found.best.rate
    assert 20.0 < found.largest_rate < 200.0
    again = plan_of(problem(rate=0.95 * found.largest_rate, cluster={"gpus_per_node": 2}, search=MIXED))
    assert again.is_feasible


def test_a_limit_below_a_lone_step_is_infeasible_at_any_rate() -> None:
    found = plan_of(problem(slo={"ttft_s": None, "tpot_s": 1e-4}, search=MIXED))
    assert not found.is_feasible
    assert found.best is None
    assert found.largest_rate == 0.0
    assert "infeasible at any rate" in plan_tree(found)["answer"]
    assert found.rejected[0].reason.startswith("an idle replica takes")


def test_weights_that_do_not_fit_are_said_to_be_too_large() -> None:
    found = plan_of(
        problem(
            rate=1.0,
            cluster={"gpu": "l40s", "gpus_per_node": 1},
            search={**MIXED, "memory_fraction": 0.3, "weights": ["bf16"]},
        )
    )
    reasons = {one.name: one.reason for one in found.rejected}
    assert "GB would be needed before any KV" in reasons["TP1, bf16 weights, bf16 KV"]


@pytest.mark.parametrize(("weights", "why"), [("int8", "multiplies in 16 bits"), ("w8a8", "same bytes and time")])
def test_int8_is_not_tried_beside_fp8_which_costs_no_more(weights: str, why: str) -> None:
    reasons = [
        one.reason
        for one in plan_of(problem(search={**MIXED, "weights": ["fp8", weights]})).rejected
        if weights in one.name
    ]
    assert reasons
    assert all(why in reason for reason in reasons)


def test_a_model_s_heads_bound_how_it_can_be_split() -> None:
    kind = ReplicaKind(3, 1, "bf16", "bf16")
    hardware = problem().cluster.hardware
    assert kind.misfit(LLAMA_8B, hardware, gpus_per_node=8) == "32 attention heads cannot be shared by 3 ranks"
    assert "need one node" in str(ReplicaKind(16, 1, "bf16", "bf16").misfit(LLAMA_8B, hardware, gpus_per_node=8))


def test_a_written_plan_stands_alone() -> None:
    asked = problem(rate=20.0, search=MIXED)
    written = json.loads(json.dumps(plan_tree(plan_of(asked))))
    assert problem_of(written).slo == asked.slo
    assert shape_of(written).num_parameters == LLAMA_8B.num_parameters
    pool = written["best"]["pools"][0]
    assert step_model_of(written, pool).kv_bytes_per_token == written["best"]["kv_bytes_per_token"]
    specs = specs_of(written)
    assert [role for role, _ in specs] == [Role.MIXED] * pool["num_replicas"]
    assert specs[0][1].num_blocks == pool["kv_room_tokens"] // 64


def test_something_else_than_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="manta plan --json"):
        problem_of({"bench": "engine"})
    with pytest.raises(ConfigError, match="nothing to simulate"):
        specs_of({"best": None})


def test_a_plan_says_what_it_costs_and_what_limits_it() -> None:
    best = plan_tree(plan_of(problem(rate=20.0, search=MIXED)))["best"]
    dollars_an_hour = 2.5 * best["num_gpus"]
    outputs_an_hour = 20.0 * demand_of(problem()).num_output_tokens * 3600
    assert best["dollars_per_million_output_tokens"] == pytest.approx(dollars_an_hour / outputs_an_hour * 1e6, rel=1e-3)
    assert best["limited_by"]["tightest"] in ("utilization", "ttft", "tpot")
    assert best["limited_by"]["resource"] in ("compute", "bandwidth", "communication", "kv_memory", "queueing")


def test_the_same_problem_has_the_same_answer() -> None:
    asked = problem(search=MIXED)
    demand = Demand.drawn(asked.workload, 300, random.Random(5))
    one, other = (plan_tree(Planner(asked, LLAMA_8B, demand).plan()) for _ in range(2))
    assert one == other
