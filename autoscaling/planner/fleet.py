"""A written plan as a simulated fleet: step times, replicas, routers. The judge of the planner's estimate. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import Fleet
from manta.autoscaling.simulator.handoff import KvLink
from manta.autoscaling.simulator.replica import ReplicaSpec
from manta.autoscaling.simulator.router import PolicyRouter, view_of
from manta.autoscaling.simulator.workload import Outcome, SimRequest, own_hash
from manta.cluster.routing.decision import RoutingSettings
from manta.cluster.routing.roles import Role
from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.step_costs import StepCosts
from manta.engine.step_time import StepShape, StepTimeModel

from .demand import Demand
from .estimate import WARM_UP, quantile
from .placement import ReplicaKind
from .problem import Problem

Tree = Mapping[str, Any]


def problem_of(plan: Tree) -> Problem:
    """The problem that a plan's tree answers. Raises ConfigError when the tree is not a plan's."""
    names = ("workload", "slo", "cluster", "search")
    try:
        return msgspec.convert({"model": plan["model"]["name"]} | {name: plan[name] for name in names}, Problem)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"this is no plan ({error}): write one with `manta plan --json FILE`") from None


def shape_of(plan: Tree) -> ModelShape:
    """Of the model that was planned for. Raises ConfigError when the tree is not a plan's."""
    try:
        return ModelShape(**plan["model"]["shape"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"this is no plan ({error}): write one with `manta plan --json FILE`") from None


def step_model_of(plan: Tree, pool: Tree) -> StepTimeModel:
    """Of a pool of `plan["best"]["pools"]`."""
    return ReplicaKind(**pool["step"]).step_times(problem_of(plan), shape_of(plan))


def predict_of(plan: Tree, pool: Tree) -> Callable[[StepShape], float]:
    """Seconds of a replica's step, a full pipeline where it has stages."""
    return step_model_of(plan, pool).predict_full


def specs_of(plan: Tree, *, block_size: int | None = None) -> list[tuple[Role, ReplicaSpec]]:
    """The best placement's replicas, one after the other. Raises ConfigError when the plan has none."""
    if plan.get("best") is None:
        raise ConfigError("the plan found no placement: there is nothing to simulate")
    size = block_size or plan["search"]["block_size"]
    specs = []
    for pool in plan["best"]["pools"]:
        spec = ReplicaSpec(
            predict_of(plan, pool),
            pool["kv_room_tokens"] // size,
            size,
            max_num_seqs=pool["max_num_seqs"],
            max_num_batched_tokens=pool["max_num_batched_tokens"],
            tpot_target_s=pool["tpot_target_s"],
        )
        specs += [(Role(pool["role"]), spec)] * pool["num_replicas"]
    return specs


def link_of(plan: Tree) -> KvLink:
    """How KV moves from pool to pool."""
    best = plan["best"]
    return KvLink(best["kv_bytes_per_token"], best["transfer_bytes_per_s"], best["transfer_latency_s"])


def routing_settings_of(plan: Tree) -> RoutingSettings:
    """With pools, every prompt is computed on a prefill replica, as the plan supposes."""
    link = link_of(plan)
    return RoutingSettings(
        transfer_bytes_s=link.bytes_per_s,
        transfer_latency_s=link.latency_s,
        transfer_tail=link.tail,
        detour_from_tokens=1 if len(plan["best"]["pools"]) > 1 else None,
        ramp_s=0.0,
    )


def requests_of(demand: Demand, *, block_size: int) -> list[SimRequest]:
    """Demand as simulated requests; no two share a block."""
    requests, next_block = [], 1
    for index, (arrival_s, num_prompt, num_outputs) in enumerate(demand.requests):
        num_blocks = num_prompt // block_size
        hashes = tuple(own_hash((1 << 40) + number) for number in range(next_block, next_block + num_blocks))
        next_block += num_blocks
        requests.append(SimRequest(f"{index}", arrival_s, num_prompt, num_outputs, hashes))
    return requests


def simulate(plan: Tree, demand: Demand, rng: random.Random) -> dict[str, float]:
    """The best placement with the real scheduler and router; figures as `best` has them, without the first requests."""
    specs, link, block_size = specs_of(plan), link_of(plan), plan["search"]["block_size"]
    fleet = Fleet(EventQueue(), link=link)
    views = []
    for index, (role, spec) in enumerate(specs):
        replica_id = f"{role.value}-{index}"
        fleet.add_replica(replica_id, spec)
        views.append(
            view_of(
                *(replica_id, spec, StepCosts.of(spec.predict)), role=role, kv_bytes_per_token=int(link.bytes_per_token)
            )
        )
    fleet.routers.append(PolicyRouter(views, settings=routing_settings_of(plan), seed=rng.randrange(1 << 30)))
    outcomes = fleet.run(requests_of(demand, block_size=block_size))
    busy_s = sum(replica.log.busy_s for replica in fleet.replicas.values())
    return figures_of(outcomes) | {
        "num_preemptions": sum(replica.scheduler.num_preemptions for replica in fleet.replicas.values()),
        "busy_share": busy_s / len(specs) / fleet.events.now_s,
    }


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """p50, p95 and p99 of TTFT and TPOT, and how many requests they are of."""
    kept = outcomes[int(WARM_UP * len(outcomes)) :]
    times = {
        "ttft": sorted(one.ttft_s for one in kept if one.ttft_s is not None),
        "tpot": sorted(one.tpot_s for one in kept if one.tpot_s is not None),
    }
    figures = {
        f"{name}_p{percent}_s": quantile(values, percent) for name, values in times.items() for percent in (50, 95, 99)
    }
    return figures | {"num_requests": len(kept), "num_refused": sum(one.finished_s is None for one in kept)}
