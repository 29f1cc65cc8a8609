"""What a simulated fleet's edges count and see: the policy's snapshots, and samples for plots. Knows no policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manta.autoscaling.signals import Counters, FleetSnapshot, PoolState
from manta.cluster.slo import Slo

from .elastic_pool import MemberState, PoolMembers
from .workload import SimRequest


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment, pools together."""

    time_s: float
    num_arrived: int
    """Since the beginning, as `num_good` and `num_ended`."""
    num_good: int
    num_ended: int
    target: int
    num_ready: int
    num_starting: int
    num_draining: int
    num_running: int
    num_waiting: int
    """In replicas and at edges."""
    forecast: float
    """Requests a second, as the policy expects."""


class Sightings:
    """Counts as all edges together."""

    def __init__(self, slo: Slo) -> None:
        self.samples: list[Sample] = []
        self._slo = slo
        self._num_arrived = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._num_finished = self._num_output_tokens = self._num_good = 0
        self._num_late_ttft = self._num_late_tpot = self._num_failed = 0

    def arrived(self, request: SimRequest) -> None:
        self._num_arrived += 1
        self._num_prompt_tokens += request.num_prompt_tokens

    def began(self, num_cached_tokens: int) -> None:
        """A first token came."""
        self._num_cached_tokens += num_cached_tokens

    def finished(self, num_output_tokens: int, ttft_s: float | None, tpot_s: float | None) -> None:
        self._num_finished += 1
        self._num_output_tokens += num_output_tokens
        if not self._slo.is_ttft_met(ttft_s):
            self._num_late_ttft += 1
        elif not self._slo.is_tpot_met(tpot_s):
            self._num_late_tpot += 1
        else:
            self._num_good += 1

    def failed(self) -> None:
        self._num_failed += 1

    def counters(self) -> Counters:
        return Counters(
            num_arrived=self._num_arrived,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_finished=self._num_finished,
            num_output_tokens=self._num_output_tokens,
            num_good=self._num_good,
            num_late_ttft=self._num_late_ttft,
            num_late_tpot=self._num_late_tpot,
            num_failed=self._num_failed,
        )

    def snapshot(
        self, now_s: float, pools: Sequence[PoolMembers], num_held: int, gpu_budget: float | None
    ) -> FleetSnapshot:
        """As a policy gets it."""
        startups = [pool.startup_s for pool in pools if pool.startup_s is not None]
        return FleetSnapshot(
            counters=self.counters(),
            num_held=num_held,
            pools=tuple(map(_state_of, pools)),
            gpu_budget=gpu_budget,
            cold_start_s=max(startups, default=None),
        )

    def sample(self, now_s: float, pools: Sequence[PoolMembers], num_held: int, forecast: float) -> None:
        """Keep how it is now."""
        up = [one for pool in pools for one in pool.members if one.state in (MemberState.READY, MemberState.DRAINING)]
        self.samples.append(
            Sample(
                now_s,
                self._num_arrived,
                self._num_good,
                self._num_finished + self._num_failed,
                sum(pool.target for pool in pools),
                sum(pool.count(MemberState.READY) for pool in pools),
                sum(pool.count(MemberState.STARTING) for pool in pools),
                sum(pool.count(MemberState.DRAINING) for pool in pools),
                sum(one.num_running for one in up),
                sum(one.num_waiting for one in up) + num_held,
                forecast,
            )
        )


def _state_of(pool: PoolMembers) -> PoolState:
    kind, spec = pool.kind, pool.kind.kind.spec
    ready = starting = draining = lent = running = waiting = prefill = context = 0
    usage = 0.0
    for member in pool.members:
        if member.state is MemberState.STARTING:
            starting += 1
            continue
        if member.state is MemberState.READY:
            ready += 1
            lent += member.role is not kind.role
            usage += member.kv_usage
        else:
            draining += 1
        running += member.num_running
        waiting += member.num_waiting
        prefill += member.num_waiting_tokens
        context += member.num_context_tokens
    return PoolState(
        name=kind.name,
        role=kind.role,
        num_ready=ready,
        num_starting=starting,
        num_draining=draining,
        target=pool.target,
        min_replicas=kind.min_replicas,
        max_replicas=kind.max_replicas,
        gpus_per_replica=kind.gpus_per_replica,
        num_lent=lent,
        num_running=running,
        num_waiting=waiting,
        num_prefill_tokens=prefill,
        num_context_tokens=context,
        kv_cache_usage=usage / ready if ready else 0.0,
        max_num_seqs=spec.max_num_seqs,
        kv_room_tokens=kind.kind.room,
        tokens_a_step=spec.max_num_batched_tokens,
        tpot_target_s=spec.tpot_target_s,
        step_costs=kind.kind.costs,
    )
