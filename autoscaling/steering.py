"""Joins reports, counts of replicas and the policy: what to ask for now, and what to tell. Knows no Ray and no clock.

Whoever owns one feeds it reports as they come, asks it each period, carries out what it says and tells it when that
was accepted; what was not is asked for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided, EdgeSignals, PoolSignals, PoolStatus, ReasonCode, ScalingStatus

from .budget import ModelAsk, own_budget
from .policy import Decision, Policy
from .policy_settings import PolicySettings
from .signals import EdgeSums, FleetSnapshot, PoolState

MOST_DECIDED = 500
"""Decisions that are kept."""
STARTS_REMEMBERED = 4
"""Over so many of the last starts the expected cold start is the mean."""


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """What a pool may be."""

    name: str
    role: Role = Role.MIXED
    min_replicas: int = 1
    max_replicas: int = 1
    gpus_per_replica: float = 1.0
    max_num_seqs: int = 256
    """Of a replica, before one was seen."""


@dataclass(frozen=True, kw_only=True)
class SteeringSettings:
    """All that one application's scaling goes by."""

    model: str
    """Tells models apart that share a budget."""
    pools: tuple[PoolLimits, ...]
    policy: PolicySettings
    gpu_budget: float | None = None
    """Of all models together."""
    period_s: float = 1.0


@dataclass(frozen=True)
class PoolCounts:
    """Replicas of a pool as Serve counts them."""

    target: int
    num_ready: int
    num_starting: int
    num_draining: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a restart."""

    decided: tuple[Decided, ...] = ()
    num_decided: dict[str, dict[str, int]] = {}


@dataclass
class Steering:
    """Belongs to one thread. Times are of one clock that never falls, unless named `wall`."""

    settings: SteeringSettings
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        self._policy = Policy(self.settings.policy)
        self._state = self._policy.initial()
        self._sums = EdgeSums()
        self._decided = deque(self.memory.decided, maxlen=MOST_DECIDED)
        self._num_decided = {pool: dict(counts) for pool, counts in self.memory.num_decided.items()}
        self._starting_since: dict[str, deque[float]] = {pool.name: deque() for pool in self.settings.pools}
        self._starts_s: deque[float] = deque(maxlen=STARTS_REMEMBERED)
        self._num_ready: dict[str, int] = {}
        self._decision = Decision()
        self._pools: tuple[PoolState, ...] = ()
        self._is_new = False

    def learn(self, report: EdgeSignals, now_s: float) -> bool:
        """An edge's report came; whether it is so urgent that the next step should not wait for its time."""
        self._sums.learn(report, now_s)
        return report.num_held > 0 and any(pool.target == 0 for pool in self._pools)

    def step(
        self, counts: Mapping[str, PoolCounts], now_s: float, *, wall_s: float, others: Sequence[ModelAsk] = ()
    ) -> Decision:
        """What should be. `others` are what other models ask for of the same budget."""
        seen = self._sums.pools(now_s)
        self._pools = tuple(_pool_state(pool, counts[pool.name], seen.get(pool.name)) for pool in self.settings.pools)
        self._notice_starts(now_s)
        snapshot = FleetSnapshot(
            counters=self._sums.total,
            num_held=self._sums.num_held(now_s),
            pools=self._pools,
            gpu_budget=self.settings.gpu_budget,
            cold_start_s=self.cold_start_s,
        )
        if snapshot.gpu_budget is not None and others:
            _, alone = self._policy.decide(self._state, replace(snapshot, gpu_budget=None), now_s)
            own = replace(self.ask(), wanted=alone.gpus_wanted)
            snapshot = replace(snapshot, gpu_budget=own_budget(own, others, snapshot.gpu_budget))
        self._state, decision = self._policy.decide(self._state, snapshot, now_s)
        self._decision = decision
        for one in decision.decided:
            self._keep(msgspec.structs.replace(one, time_s=wall_s))
        for pool in self._pools:
            rising = decision.targets[pool.name] - max(pool.target, pool.num_ready + pool.num_starting)
            self._starting_since[pool.name].extend([now_s] * max(rising, 0))
        return decision

    @property
    def cold_start_s(self) -> float | None:
        """From decision to a ready replica, mean of the last few; None before the first."""
        return sum(self._starts_s) / len(self._starts_s) if self._starts_s else None

    def ask(self) -> ModelAsk:
        """What this model needs of a budget, and holds of it."""
        pools = self._pools
        return ModelAsk(
            name=self.settings.model,
            least=sum(pool.min_replicas * pool.gpus_per_replica for pool in pools),
            wanted=self._decision.gpus_wanted,
            held=sum(
                (max(pool.target, pool.num_ready + pool.num_starting) + pool.num_draining) * pool.gpus_per_replica
                for pool in pools
            ),
        )

    def status(self, wall_s: float) -> ScalingStatus:
        """For edges and operators."""
        last = {one.pool: one for one in self._decided}
        decision = self._decision
        pools = []
        for pool in self._pools:
            why = last.get(pool.name)
            pools.append(
                PoolStatus(
                    name=pool.name,
                    role=pool.role,
                    desired=decision.targets.get(pool.name, pool.target),
                    num_ready=pool.num_ready,
                    num_starting=pool.num_starting,
                    num_draining=pool.num_draining,
                    min_replicas=pool.min_replicas,
                    max_replicas=pool.max_replicas,
                    gpus_per_replica=pool.gpus_per_replica,
                    reason=ReasonCode.MIN.value if why is None else why.reason,
                    sentence="as at the beginning" if why is None else why.sentence,
                )
            )
        guess = self.settings.policy.cold_start_s
        return ScalingStatus(
            time_s=wall_s,
            pools=tuple(pools),
            forecast_requests_s=decision.forecast_requests_s,
            arrivals_requests_s=decision.level_requests_s,
            attainment=decision.attainment,
            cold_start_s=guess if self.cold_start_s is None else self.cold_start_s,
            gpus_used=self.ask().held,
            gpu_budget=self.settings.gpu_budget,
            decided=tuple(self._decided)[-50:],
            num_decided={pool: dict(counts) for pool, counts in self._num_decided.items()},
        )

    def take_memory(self) -> Memory | None:
        """What to keep, if it has changed since the last call."""
        if not self._is_new:
            return None
        self._is_new = False
        return Memory(decided=tuple(self._decided), num_decided=self._num_decided)

    def _keep(self, decided: Decided) -> None:
        self._decided.append(decided)
        counts = self._num_decided.setdefault(decided.pool, {})
        counts[decided.reason] = counts.get(decided.reason, 0) + 1
        self._is_new = True

    def _notice_starts(self, now_s: float) -> None:
        for pool in self._pools:
            since = self._starting_since[pool.name]
            for _ in range(max(pool.num_ready - self._num_ready.get(pool.name, pool.num_ready), 0)):
                if since:
                    self._starts_s.append(now_s - since.popleft())
            while len(since) > max(pool.target - pool.num_ready, 0):
                since.pop()  # not wanted any more
            self._num_ready[pool.name] = pool.num_ready


def _pool_state(limits: PoolLimits, counts: PoolCounts, seen: PoolSignals | None) -> PoolState:
    seen = seen or PoolSignals(name=limits.name, role=limits.role)
    # Ready is what edges can use, for a replica that Serve runs may not have been reached yet.
    num_ready = min(seen.num_ready + seen.num_draining, counts.num_ready)
    return PoolState(
        name=limits.name,
        role=limits.role,
        num_ready=num_ready,
        num_starting=counts.num_starting + counts.num_ready - num_ready,
        num_draining=counts.num_draining,
        target=counts.target,
        min_replicas=limits.min_replicas,
        max_replicas=limits.max_replicas,
        gpus_per_replica=limits.gpus_per_replica,
        num_lent=seen.num_lent,
        num_running=seen.num_running,
        num_waiting=seen.num_waiting,
        num_prefill_tokens=seen.num_prefill_tokens,
        num_context_tokens=seen.num_context_tokens,
        kv_cache_usage=seen.kv_cache_usage,
        max_num_seqs=seen.max_num_seqs or limits.max_num_seqs,
        kv_room_tokens=seen.kv_room_tokens,
        tokens_a_step=seen.tokens_a_step or 8192,
        tpot_target_s=seen.tpot_target_s,
        step_costs=seen.step_costs,
    )
