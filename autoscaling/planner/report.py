"""A plan as a tree for JSON, which stands alone: `manta simulate --plan` runs it. Pure; knows no terminal."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from .placement import Pool
from .problem import Problem
from .search import Judged, Plan, transfer_of

DIGITS = 5
"""Of figures."""


def plan_tree(plan: Plan) -> dict[str, Any]:
    """`feasible`, `best`, `alternatives`, `infeasible`, and the problem with the model's shape."""
    best = plan.best
    tree: dict[str, Any] = {
        "feasible": plan.is_feasible,
        "answer": answer(plan),
        "rate": _short(plan.demand.rate),
        "largest_feasible_rate": None if plan.largest_rate is None else _short(plan.largest_rate),
        "best": None if best is None else judged_tree(plan.problem, plan, best),
        "alternatives": [judged_tree(plan.problem, plan, one) for one in plan.ranked[1:]],
        "infeasible": [
            {"placement": one.name, "reason": one.reason, "largest_rate": _short(one.largest_rate)}
            for one in plan.rejected
        ],
    }
    workload = msgspec.to_builtins(plan.problem.workload)
    workload["rate"] = _short(plan.demand.rate if plan.is_feasible or not plan.largest_rate else plan.largest_rate)
    return tree | {
        "demand": {
            "mean_prompt_tokens": _short(plan.demand.num_prompt_tokens),
            "mean_output_tokens": _short(plan.demand.num_output_tokens),
            "longest_tokens": plan.demand.longest,
            "requests": len(plan.demand.requests),
        },
        "workload": workload,
        "slo": msgspec.to_builtins(plan.problem.slo),
        "cluster": msgspec.to_builtins(plan.problem.cluster),
        "search": msgspec.to_builtins(plan.problem.search),
        "model": {"name": plan.problem.model.rsplit("/", 2)[-2 if plan.problem.model.endswith(".json") else -1]}
        | {"shape": shape_tree(plan)},
    }


def shape_tree(plan: Plan) -> dict[str, Any]:
    """The sizes that step times and memory follow from."""
    left_out = {"rope", "rms_norm_eps", "bos_token_id", "eos_token_ids"}
    return {name: value for name, value in dataclasses.asdict(plan.shape).items() if name not in left_out}


def answer(plan: Plan) -> str:
    """The plan in one sentence."""
    best = plan.best
    if best is None:
        return "infeasible at any rate: see why under `infeasible`"
    if plan.is_feasible:
        return f"{best.placement.num_gpus} GPUs: {best.placement.name}"
    return (
        f"infeasible as stated: {plan.problem.cluster.num_gpus} GPUs serve at most {best.rate:.3g} requests/s within "
        f"the objective, with {best.placement.name}"
    )


def judged_tree(problem: Problem, plan: Plan, judged: Judged) -> dict[str, Any]:
    """One placement with its figures."""
    placement, found, search = judged.placement, judged.estimate, problem.search
    model = placement.kind.step_times(problem, plan.shape)
    transfer = transfer_of(problem, placement, model)
    dollars_a_second = placement.num_gpus * problem.cluster.dollars_per_gpu_hour / 3600
    outputs = judged.rate * plan.demand.num_output_tokens
    tokens = outputs + judged.rate * plan.demand.num_prompt_tokens

    def pool_tree(pool: Pool) -> dict[str, Any]:
        return {
            "name": pool.name,
            "role": pool.role.value,
            "num_replicas": pool.num_replicas,
            "gpus_per_replica": placement.kind.num_gpus,
            "kv_room_tokens": judged.ledger.kv_room_tokens,
            "max_num_seqs": search.max_num_seqs,
            "max_num_batched_tokens": search.max_num_batched_tokens,
            "tpot_target_s": pool.step_target_s,
            "step": dataclasses.asdict(placement.kind),
        }

    bottleneck = max(judged.steady, key=lambda one: one.utilization)
    return {
        "placement": placement.name,
        "rate": _short(judged.rate),
        "num_gpus": placement.num_gpus,
        "ttft_p50_s": _short(found.ttft_p50_s),
        "ttft_p95_s": _short(found.ttft_p95_s),
        "ttft_p99_s": _short(found.ttft_p99_s),
        "tpot_p50_s": _short(found.tpot_p50_s),
        "tpot_p95_s": _short(found.tpot_p95_s),
        "tpot_p99_s": _short(found.tpot_p99_s),
        "utilization": _short(judged.utilization),
        "sustained_rate": _short(judged.rate / judged.utilization),
        "kv_peak_share": _short(found.kv_peak_share),
        "limited_by": limited_by(problem, judged),
        "step_s": _short(bottleneck.step_s),
        "step_shares": {name: _short(share) for name, share in bottleneck.shares.items()},
        "dollars_per_hour": _short(dollars_a_second * 3600),
        "dollars_per_million_output_tokens": _short(dollars_a_second / outputs * 1e6),
        "dollars_per_million_tokens": _short(dollars_a_second / tokens * 1e6),
        "pools": [pool_tree(pool) for pool in placement.pools],
        "memory_of_a_gpu": judged.ledger.tree(),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "transfer_bytes_per_s": transfer.bytes_per_s,
        "transfer_latency_s": transfer.latency_s,
    }


def limited_by(problem: Problem, judged: Judged) -> dict[str, Any]:
    """What gives way first when the rate rises: the resource, and how much of each limit is used."""
    slo, found = problem.slo, judged.estimate
    used = {"utilization": judged.utilization / problem.search.max_utilization}
    if slo.ttft_s is not None:
        used["ttft"] = found.ttft_at_s / slo.ttft_s
    if slo.tpot_s is not None:
        used["tpot"] = found.tpot_at_s / slo.tpot_s
    tightest = max(used, key=lambda name: used[name])
    resource = max(judged.steady, key=lambda one: one.utilization).bound
    if tightest == "ttft" and found.waiting_share > 0.5:
        resource = "queueing"
    return {
        "resource": resource,
        "tightest": tightest,
        "used": {name: _short(share) for name, share in used.items()},
        "waiting_share_of_ttft": _short(found.waiting_share),
    }


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
