"""What the policy would have done over a series of samples of somebody's fleet. Pure; knows no metric's name.

The fleet does not follow it, so each decision starts from the replicas that there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manta.cluster.scaling import Decided

from .policy import Decision, Policy
from .policy_settings import PolicySettings
from .signals import Counters, FleetSnapshot, PoolState


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A fleet at one moment."""

    time_s: float
    num_replicas: int
    counters: Counters
    """They may begin anywhere."""
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


@dataclass(frozen=True)
class Advice:
    """What should be, at the end of the samples."""

    num_replicas: int
    """That there are."""
    desired: int
    sentence: str
    """Why, or why nothing changes."""
    decision: Decision
    wished: tuple[Decided, ...]
    """Wishes over the time of the samples, one for each that differs from the last."""


def advise(samples: Sequence[Sample], settings: PolicySettings, pool: PoolState, *, gpu_budget: float | None) -> Advice:
    """By `pool`'s limits, sizes and step costs; its load is that of the samples, of which there is at least one."""
    policy = Policy(settings)
    state, decision, wished, last = policy.initial(), Decision(), [], None
    for sample in samples:
        now = replace(
            pool,
            num_ready=sample.num_replicas,
            target=sample.num_replicas,
            num_running=sample.num_running,
            num_waiting=sample.num_waiting,
            kv_cache_usage=sample.kv_cache_usage,
        )
        snapshot = FleetSnapshot(
            counters=sample.counters, pools=(now,), gpu_budget=gpu_budget, cold_start_s=settings.cold_start_s
        )
        state, decision = policy.decide(state, snapshot, sample.time_s)
        for one in decision.decided:
            if (one.after, one.reason) != last:
                wished.append(one)
            last = one.after, one.reason
        if not decision.decided:
            last = None
    num_replicas, desired = samples[-1].num_replicas, decision.targets[pool.name]
    here = [one for one in decision.decided if one.after == desired]
    sentence = (
        here[-1].sentence
        if here
        else (
            f"{num_replicas} are right: {decision.level_requests_s:.3g} requests/s come, "
            f"{decision.forecast_requests_s:.3g} are expected"
        )
    )
    return Advice(num_replicas, desired, sentence, decision, tuple(wished))
