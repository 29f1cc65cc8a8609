"""Pools of an elastic fleet and their members: kinds, cold starts, states. Knows no requests and no policy."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manta.cluster.routing.roles import Role

from .events import EventQueue
from .quick import Job, QuickKind, QuickReplica
from .quick_cache import FleetIndex, QuickCache
from .replica import ReplicaSpec


@dataclass(frozen=True)
class ColdStart:
    """Seconds from asking for a replica to its first request, by phase."""

    phases: Mapping[str, float] = field(default_factory=lambda: {"place": 2.0, "import": 6.0, "weights": 20.0})
    spread: float = 0.0
    """Each start takes up to this share longer or shorter, evenly drawn."""

    @property
    def total_s(self) -> float:
        """Without the spread."""
        return sum(self.phases.values())

    def draw(self, rng: random.Random) -> dict[str, float]:
        """Of one start."""
        factor = 1.0 + self.spread * (2.0 * rng.random() - 1.0) if self.spread else 1.0
        return {name: seconds * factor for name, seconds in self.phases.items()}


@dataclass(frozen=True, kw_only=True)
class PoolKind:
    """What a pool's replicas are, and how many there may be."""

    name: str
    kind: QuickKind
    role: Role = Role.MIXED
    gpus_per_replica: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 64
    cold_start: ColdStart = ColdStart()
    has_cache: bool = False
    """Whether prompts are computed from cached prefixes, where requests name their blocks."""

    @property
    def spec(self) -> ReplicaSpec:
        """Of its replicas."""
        return self.kind.spec


class MemberState(enum.Enum):
    """Of one replica in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Member(QuickReplica):
    """A replica of a pool."""

    def __init__(
        self,
        number: int,
        pool: PoolKind,
        events: EventQueue,
        index: FleetIndex,
        *,
        on_first: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        """It starts now."""
        spec = pool.kind.spec
        cache = None
        if pool.has_cache:
            cache = QuickCache(index, number, num_blocks=spec.num_blocks, block_size=spec.block_size)
        super().__init__(pool.kind, events, on_first=on_first, on_end=on_end, cache=cache)
        self.number = number
        self.pool = pool.name
        self.role = pool.role
        self.next_role: Role | None = None
        """That it takes when it has drained."""
        self.state = MemberState.STARTING
        self.born_s = events.now_s
        self.max_ahead = spec.max_num_waiting
        """Requests that may wait there."""
        self.num_coming = 0
        """Whose KV is on its way."""
        self.draining_since_s = -1.0

    @property
    def is_idle(self) -> bool:
        return not self.num_jobs and not self.num_coming

    def has_drained_since(self, time_s: float) -> bool:
        """Whether it is this drain that goes on, none that began later."""
        return self.draining_since_s == time_s


class PoolMembers:
    """One pool's replicas that exist."""

    def __init__(self, kind: PoolKind) -> None:
        self.kind = kind
        self.target = 0
        self.members: list[Member] = []
        self.startup_s: float | None = None
        """Of the last start that ended."""

    def count(self, state: MemberState) -> int:
        return sum(member.state is state for member in self.members)

    @property
    def num_active(self) -> int:
        """Replicas that start, are ready, or change their role."""
        return sum(member.state is not MemberState.DRAINING or member.next_role is not None for member in self.members)

    def to_stop(self) -> Member:
        """Who leaves next: one that starts before one that is ready, of these the newest."""
        active = [one for one in self.members if one.state is not MemberState.DRAINING]
        starting = [one for one in active if one.state is MemberState.STARTING]
        return (starting or active)[-1]
