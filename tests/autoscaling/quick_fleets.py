"""Quick replicas and elastic fleets of literal sizes; a step takes 1 ms and a tenth of a millisecond a prompt token."""

from __future__ import annotations

import random
from collections.abc import Sequence

from manta.autoscaling.simulator.elastic import (
    ColdStart,
    ElasticFleet,
    ElasticRun,
    ElasticSettings,
    Failure,
    PoolKind,
)
from manta.autoscaling.simulator.events import ARRIVES, EventQueue
from manta.autoscaling.simulator.policies import ScalingPolicy
from manta.autoscaling.simulator.quick import Job, QuickReplica
from manta.autoscaling.simulator.quick_kind import QuickKind
from manta.autoscaling.simulator.workload import SimRequest
from manta.cluster.routing.roles import Role
from manta.cluster.slo import Slo

from .fleets import spec

SLO = Slo(ttft_s=0.5, tpot_s=0.05)
Times = tuple[float | None, float | None]


def drawn(count: int, *, rate: float, prompt: int, output: int, seed: int = 0) -> list[SimRequest]:
    """Requests with Poisson arrivals and lognormal lengths of these medians."""
    rng, now_s, requests = random.Random(seed), 0.0, []
    for index in range(count):
        now_s += rng.expovariate(rate)
        num_prompt, num_output = (max(1, round(rng.lognormvariate(0.0, 0.7) * median)) for median in (prompt, output))
        requests.append(SimRequest(f"{index}", now_s, num_prompt, num_output))
    return requests


def evenly(count: int, *, every_s: float, prompt: int = 32, output: int = 20, from_s: float = 0.0) -> list[SimRequest]:
    """Requests of one size, one after the other."""
    return [SimRequest(f"{from_s}-{index}", from_s + index * every_s, prompt, output) for index in range(count)]


def quick_times(requests: Sequence[SimRequest], **sizes: object) -> tuple[list[Times], QuickReplica]:
    """First and last token of each, on one quick replica; and the replica as it is then."""
    events = EventQueue()
    firsts: dict[object, float] = {}
    ends: dict[object, float] = {}
    replica = QuickReplica(
        QuickKind(spec(**sizes)),
        events,
        on_first=lambda job: firsts.__setitem__(job.owner, events.now_s),
        on_end=lambda job: ends.__setitem__(job.owner, events.now_s),
    )
    for request in requests:
        job = Job(request.request_id, request.num_prompt_tokens, request.num_output_tokens)
        events.at(request.arrival_s, lambda job=job: replica.submit(job), order=ARRIVES)
    events.run()
    return [(firsts.get(one.request_id), ends.get(one.request_id)) for one in requests], replica


def pool(name: str = "engine", role: Role = Role.MIXED, **changes: object) -> PoolKind:
    """Replicas that start in 5 s."""
    given: dict = {"cold_start": ColdStart({"weights": 4.0, "graphs": 1.0}), "max_replicas": 8, **changes}
    return PoolKind(name=name, kind=QuickKind(spec(num_blocks=256)), role=role, **given)


def run_fleet(
    requests: Sequence[SimRequest],
    policy: ScalingPolicy,
    *,
    pools: Sequence[PoolKind] | None = None,
    num_initial: dict[str, int] | None = None,
    failures: tuple[Failure, ...] = (),
    **settings: object,
) -> tuple[ElasticRun, ElasticFleet]:
    """One replica at first, unless said otherwise."""
    given: dict = {"slo": SLO, "failures": failures, **settings}
    fleet = ElasticFleet(pools or [pool()], ElasticSettings(**given))
    return fleet.run(requests, policy, num_initial=num_initial or {"engine": 1}), fleet
