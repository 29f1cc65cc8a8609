"""A fleet made of arithmetic, for tests of the policy: replicas start after a while and serve as the model says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from manta.autoscaling.capacity import ReplicaSize, Work, load
from manta.autoscaling.policy import Decision, Policy
from manta.autoscaling.policy_settings import PolicySettings
from manta.autoscaling.signals import Counters, FleetSnapshot, PoolState
from manta.autoscaling.slo import Slo
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided
from manta.engine.step_costs import StepCosts

COSTS = StepCosts(overhead_s=3e-4, weights_s=3.5e-3, token_s=2e-5, pair_s=1.5e-10, context_token_s=2.9e-8)
"""Of an H200 that runs Llama 3.1 8B, about."""
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
WORK = Work(num_new_tokens=1000.0, num_prompt_tokens=1000.0, num_output_tokens=250.0)


@dataclass
class Run:
    """What came of it: targets and ready replicas second by second."""

    targets: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    decided: list[Decided] = field(default_factory=list)

    @property
    def num_reversals(self) -> int:
        """Changes of direction of the target."""
        steps = [b - a for a, b in pairwise(self.targets) if b != a]
        return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def run(
    rate: Callable[[int], float],
    seconds: int,
    *,
    settings: PolicySettings | None = None,
    start: int = 1,
    least: int = 1,
    most: int = 64,
    cold_start_s: int = 20,
    budget: float | None = None,
    seed: int = 0,
    fails_at_s: int | None = None,
) -> Run:
    """Poisson arrivals at `rate(second)` requests/s; every request is answered as fast as the model says."""
    policy = Policy(settings or PolicySettings(slo=SLO, cold_start_s=cold_start_s))
    state, rng, done = policy.initial(), random.Random(seed), Run()
    ready, target, starting = start, start, []
    counters = Counters()
    size = ReplicaSize(COSTS, 256, 400_000)
    for now in range(seconds):
        ready += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        if fails_at_s == now:
            ready -= 1
            starting.append(now + cold_start_s)
        num = poisson(rng, rate(now))
        held = num if not ready else 0
        served = 0 if not ready else num
        each = load(max(rate(now), 1e-9), WORK, size, SLO, Role.MIXED, num_replicas=max(ready, 1))
        is_good = ready > 0 and each.limit(size, SLO) is None
        counters = counters.plus(
            Counters(
                num_arrived=num,
                num_prompt_tokens=1000 * num,
                num_finished=served,
                num_output_tokens=250 * served,
                num_good=served if is_good else 0,
                num_late_ttft=0 if is_good else served,
            )
        )
        pool = PoolState(
            name="engine", num_ready=ready, num_starting=len(starting), target=target, min_replicas=least,
            max_replicas=most, num_running=round(min(each.num_running, 256) * ready) if served else 0,
            kv_room_tokens=400_000, step_costs=COSTS,
        )  # fmt: skip
        snapshot = FleetSnapshot(counters=counters, num_held=held, pools=(pool,), gpu_budget=budget)
        state, decision = policy.decide(state, snapshot, float(now))
        target = apply(decision, target, starting, now + cold_start_s)
        ready = min(ready, target)
        done.targets.append(target)
        done.ready.append(ready)
        done.decided += decision.decided
    return done


def apply(decision: Decision, target: int, starting: list[int], ready_at: int) -> int:
    new = decision.targets["engine"]
    if new > target:
        starting += [ready_at] * (new - target)
    else:
        del starting[: max(target - new, 0)]
    return new


def poisson(rng: random.Random, mean: float) -> int:
    total, count = rng.expovariate(1.0), 0
    while total < mean:
        total += rng.expovariate(1.0)
        count += 1
    return count
