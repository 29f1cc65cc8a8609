"""One simulated run of a fleet under a load: a model on GPUs, routers, and the figures of it. Knows no sweep."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manta.autoscaling.simulator.events import EventQueue
from manta.autoscaling.simulator.fleet import Fleet, Route, Router
from manta.autoscaling.simulator.handoff import KvLink
from manta.autoscaling.simulator.replica import Frame, Replica, ReplicaSpec
from manta.autoscaling.simulator.router import view_of
from manta.autoscaling.simulator.workload import Outcome, SimRequest
from manta.cluster.routing.replica_view import ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.config import EngineConfig
from manta.engine.model_source import load_shape, resolve_model
from manta.engine.step_costs import StepCosts
from manta.engine.step_time import StepTimeModel, hardware_named

from .stats import percentile

MAX_NUM_SEQS, TOKENS_A_STEP = 256, 8192
SATURATING_QUEUE = 4
"""Requests that wait at each replica while its capacity is measured."""

MakeRouters = Callable[[Fleet], Sequence[Router]]


@dataclass(frozen=True)
class Hardware:
    """What the replicas are: a model on a GPU."""

    model_name: str
    gpu: str
    step_times: StepTimeModel
    kv_room_tokens: int
    """Of one replica."""
    max_num_seqs: int = MAX_NUM_SEQS
    tokens_a_step: int = TOKENS_A_STEP
    tpot_target_s: float | None = None

    @classmethod
    def of(cls, config: EngineConfig, gpu: str, *, kv_room_tokens: int | None = None) -> Hardware:
        """The KV room is what the GPU's memory leaves, unless given. Raises ConfigError for an unknown GPU."""
        source = resolve_model(config.model)
        shape, hardware = load_shape(source), hardware_named(gpu)
        dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
        folder = config.scheduler.step_profiles
        folders = [] if folder is None else [Path(folder)]
        model = StepTimeModel.known(shape, hardware, dtype=dtype, profile_folders=folders)
        room = hardware.memory_bytes * config.cache.memory_fraction - model.weight_bytes
        target_ms = config.scheduler.tpot_target_ms
        return cls(
            source.name,
            gpu,
            model,
            kv_room_tokens or int(room // model.kv_bytes_per_token),
            max_num_seqs=config.scheduler.max_num_seqs or MAX_NUM_SEQS,
            tokens_a_step=config.scheduler.max_num_batched_tokens or TOKENS_A_STEP,
            tpot_target_s=None if target_ms is None else target_ms / 1e3,
        )

    def spec(self, block_size: int) -> ReplicaSpec:
        return ReplicaSpec(
            self.step_times.predict,
            self.kv_room_tokens // block_size,
            block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.tokens_a_step,
            tpot_target_s=self.tpot_target_s,
        )

    @property
    def costs(self) -> StepCosts:
        return StepCosts.of(self.step_times.predict)

    def view(self, replica_id: str, spec: ReplicaSpec, *, role: Role = Role.MIXED) -> ReplicaView:
        """What an edge is told of a replica at the start."""
        kv_bytes = self.step_times.kv_bytes_per_token
        return view_of(replica_id, spec, self.costs, role=role, kv_bytes_per_token=kv_bytes)

    def describe(self) -> dict[str, object]:
        """For a report."""
        return {
            "name": self.model_name,
            "gpu": self.gpu,
            "kv_room_tokens": self.kv_room_tokens,
            "max_num_seqs": self.max_num_seqs,
            "tokens_a_step": self.tokens_a_step,
            "tpot_target_s": self.tpot_target_s,
            "step_times_are_measured": self.step_times.is_measured,
        }


@dataclass(frozen=True)
class RunFigures:
    """What one run found. Times in seconds."""

    num_requests: int
    num_refused: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    itl_p99_s: float
    """Of the waits for a next token, over all tokens."""
    prefix_hit_rate: float
    """Share of the prompt tokens that were found in a cache."""
    max_over_mean_load: float
    """Load of a replica: the requests that run and wait there, averaged over the time."""
    max_over_mean_requests: float
    """The same of the number of requests that were sent there."""
    decision_us_p50: float
    estimate_over_actual_p50: float | None
    """Of the seconds from the decision to the first token, where the policy says what it expects."""
    num_preemptions: int
    num_detours: int
    """Requests whose prompt was computed on another replica."""
    busy_s: float
    """Time in which steps ran, summed over the replicas."""
    simulated_s: float
    num_steps: int
    num_events: int
    cpu_s: float
    """Of simulating it."""


class TimedRouter:
    """Measures how long another router's decisions take."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.decisions_s: list[float] = []

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        begin_s = time.perf_counter()
        route = self._router.route(request, now_s)
        self.decisions_s.append(time.perf_counter() - begin_s)
        return route

    def learn(self, frame: Frame, now_s: float) -> None:
        self._router.learn(frame, now_s)


def run_fleet(
    requests: Sequence[SimRequest],
    specs: Sequence[ReplicaSpec],
    make_routers: MakeRouters,
    *,
    link: KvLink | None = None,
) -> tuple[RunFigures, list[Outcome]]:
    """All requests through one fleet, one replica for each of `specs`, with empty caches at the beginning."""
    begin_s = time.process_time()
    events = EventQueue()
    fleet = Fleet(events, link=link)
    for index, spec in enumerate(specs):
        fleet.add_replica(f"replica-{index}", spec)
    routers = [TimedRouter(router) for router in make_routers(fleet)]
    fleet.routers.extend(routers)
    outcomes = fleet.run(requests)
    decisions_s = [second for router in routers for second in router.decisions_s]
    figures = figures_of(outcomes, list(fleet.replicas.values()), events, decisions_s, time.process_time() - begin_s)
    return figures, outcomes


def figures_of(
    outcomes: Sequence[Outcome],
    replicas: Sequence[Replica],
    events: EventQueue,
    decisions_s: Sequence[float],
    cpu_s: float,
) -> RunFigures:
    done = [outcome for outcome in outcomes if outcome.finished_s is not None]
    ttfts = [outcome.ttft_s for outcome in done if outcome.ttft_s is not None]
    tpots = [outcome.tpot_s for outcome in done if outcome.tpot_s is not None]
    ratios = [
        outcome.estimated_ttft_s / (outcome.first_token_s - outcome.routed_s)
        for outcome in done
        if outcome.estimated_ttft_s and outcome.first_token_s is not None and outcome.routed_s is not None
    ]
    spent_s, counts = defaultdict[str, float](float), Counter[str]()
    for outcome in done:
        assert outcome.replica_id is not None
        assert outcome.finished_s is not None
        counts[outcome.replica_id] += 1
        spent_s[outcome.replica_id] += outcome.finished_s - (outcome.routed_s or 0.0)
    gaps = Counter[int]()
    for replica in replicas:
        gaps.update(replica.log.gaps)
    num_prompt_tokens = sum(outcome.request.num_prompt_tokens for outcome in done)
    return RunFigures(
        num_requests=len(outcomes),
        num_refused=len(outcomes) - len(done),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p95_s=percentile(tpots, 95),
        itl_p99_s=weighted_percentile(gaps, 99) * 1e-4,
        prefix_hit_rate=sum(outcome.num_cached_tokens for outcome in done) / num_prompt_tokens,
        max_over_mean_load=_max_over_mean(spent_s, len(replicas)),
        max_over_mean_requests=_max_over_mean(counts, len(replicas)),
        decision_us_p50=percentile(decisions_s, 50) * 1e6,
        estimate_over_actual_p50=percentile(ratios, 50) if ratios else None,
        num_preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
        num_detours=sum(outcome.prefill_replica_id is not None for outcome in done),
        busy_s=sum(replica.log.busy_s for replica in replicas),
        simulated_s=events.now_s,
        num_steps=sum(replica.log.num_steps for replica in replicas),
        num_events=events.num_events,
        cpu_s=cpu_s,
    )


def weighted_percentile(counts: Counter[int], percent: float) -> float:
    """The least value that so many percent of the counted ones do not exceed; NaN when there are none."""
    rank, seen = counts.total() * percent / 100, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return float(value)
    return math.nan


def _max_over_mean(values: Mapping[str, float], num_replicas: int) -> float:
    total = sum(values.values())
    return max(values.values()) * num_replicas / total if total else math.nan


class Saturating:
    """Gives every replica as much as it takes, and a few that wait: for measuring capacity."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sent = dict.fromkeys(fleet.replicas, 0)
        self._begun = dict.fromkeys(fleet.replicas, 0)
        self._ended = dict.fromkeys(fleet.replicas, 0)

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        open_ids = [id_ for id_ in self._sent if self._sent[id_] - self._begun[id_] < SATURATING_QUEUE]
        if not open_ids:
            return None
        best = min(open_ids, key=lambda replica_id: self._sent[replica_id] - self._ended[replica_id])
        self._sent[best] += 1
        return Route(best)

    def learn(self, frame: Frame, now_s: float) -> None:
        for delta in frame.deltas:
            self._begun[frame.replica_id] += delta.num_cached_tokens is not None
            self._ended[frame.replica_id] += delta.finish_reason is not None
