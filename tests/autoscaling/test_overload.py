"""Several edges that are asked for more than the replicas can do, on the virtual clock: what they promise is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import Fleet
from manta.autoscaling.simulator.replica import ReplicaSpec
from manta.autoscaling.simulator.router import PolicyRouter, view_of
from manta.autoscaling.simulator.workload import Outcome, SimRequest
from manta.engine.step_costs import StepCosts

STEP_S, NUM_SLOTS, NUM_TOKENS, DEADLINE_S = 0.1, 8, 32, 1.5
NUM_REPLICAS, NUM_EDGES = 4, 2
CAPACITY_PER_S = NUM_REPLICAS * NUM_SLOTS / ((NUM_TOKENS + 1) * STEP_S)
LOADS = (0.8, 1.0, 3.0)
LOAD_S, SETTLE_S, PAUSE_S = 30.0, 5.0, 10.0


def fleet() -> Fleet:
    """As `manta bench overload` has it: every step takes as long, and there is a frame after each."""
    found = Fleet(EventQueue())
    spec = ReplicaSpec(lambda shape: STEP_S, 1000, 64, max_num_seqs=NUM_SLOTS, max_num_waiting=256)
    for name in "abcd":
        replica = found.add_replica(name, spec, takes_stretches=False)
        replica.scheduler.num_quiet_steps = lambda: 0
    costs = StepCosts.of(spec.predict)
    for edge in range(NUM_EDGES):
        views = [view_of(name, spec, costs, kv_bytes_per_token=0.0) for name in found.replicas]
        found.routers.append(PolicyRouter(views, seed=edge, place=edge, num_edges=NUM_EDGES))
    return found


def outcomes(length: Callable[[random.Random], int], *, seed: int) -> dict[float, list[Outcome]]:
    """Of what came under each load, one after the other, once it had settled."""
    rng, begins_s, requests = random.Random(seed), 0.0, []
    for load in LOADS:
        at_s = begins_s
        while (at_s := at_s + rng.expovariate(load * CAPACITY_PER_S)) < begins_s + LOAD_S:
            name = f"{load}-{len(requests)}"
            requests.append(SimRequest(name, at_s, 64, length(rng), deadline_s=DEADLINE_S))
        begins_s += LOAD_S + PAUSE_S
    found: dict[float, list[Outcome]] = {load: [] for load in LOADS}
    for outcome in fleet().run(requests):
        load = float(outcome.request.request_id.partition("-")[0])
        if outcome.request.arrival_s >= LOADS.index(load) * (LOAD_S + PAUSE_S) + SETTLE_S:
            found[load].append(outcome)
    return found


def is_good(outcome: Outcome) -> bool:
    return outcome.ttft_s is not None and outcome.ttft_s <= DEADLINE_S


@pytest.mark.parametrize(
    "length",
    [
        lambda rng: NUM_TOKENS,
        lambda rng: rng.randint(1, 2 * NUM_TOKENS - 1),
        lambda rng: 1 + int(rng.expovariate(1 / NUM_TOKENS)),
    ],
    ids=["answers alike", "uniform", "exponential"],
)
def test_three_times_the_capacity_loses_nothing_of_the_goodput(length: Callable[[random.Random], int]) -> None:
    good, late = dict.fromkeys(LOADS, 0), dict.fromkeys(LOADS, 0)
    for seed in range(2):
        for load, ended in outcomes(length, seed=seed).items():
            good[load] += sum(map(is_good, ended))
            late[load] += sum(outcome.ttft_s is not None and not is_good(outcome) for outcome in ended)
    assert good[3.0] >= 0.95 * max(good.values())
    assert late[3.0] <= 0.06 * good[3.0]
    assert late[0.8] <= 0.01 * good[0.8]
