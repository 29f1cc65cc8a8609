"""What the policy sees: pools and sums over edges, at one moment. Pure; knows no edge's clock and no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Counters, EdgeSignals, PoolSignals
from manta.engine.step_costs import StepCosts

SILENT_AFTER_S = 10.0
"""What an edge holds and sees counts for so long after its last report; its counters count for ever."""


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """One pool. Load sums over its replicas, sizes are of one replica."""

    name: str
    role: Role = Role.MIXED
    num_ready: int = 0
    num_starting: int = 0
    num_draining: int = 0
    target: int = 0
    """What was last asked for."""
    min_replicas: int = 1
    """0: may go to zero."""
    max_replicas: int = 1
    gpus_per_replica: float = 1.0
    num_lent: int = 0
    """Of the ready ones, those that have the other pool's role for now."""
    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    num_context_tokens: int = 0
    kv_cache_usage: float = 0.0
    max_num_seqs: int = 256
    kv_room_tokens: int = 0
    """0: not known."""
    tokens_a_step: int = 8192
    tpot_target_s: float | None = None
    """What a replica holds its steps with decodes under; None: they take as many prompt tokens as fit."""
    step_costs: StepCosts | None = None
    """None: what a replica can do is learned from its load only."""


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """All that a decision is made from, beside the policy's own state."""

    counters: Counters = field(default_factory=Counters)
    num_held: int = 0
    """Requests that wait in edges."""
    pools: tuple[PoolState, ...] = ()
    """One of mixed replicas, or one of each other role."""
    gpu_budget: float | None = None
    """Of all these pools; None: as many as there are."""
    cold_start_s: float | None = None
    """From asking for a replica to its first request, as measured; None: not yet, the settings' guess counts."""


@dataclass
class EdgeSums:
    """Adds up what edges report. An edge that is gone stays in the sums, one that is silent holds nothing.

    Belongs to one thread.
    """

    total: Counters = field(default_factory=Counters)
    _last: dict[str, Counters] = field(default_factory=dict)
    _reports: dict[str, tuple[float, EdgeSignals]] = field(default_factory=dict)

    def learn(self, report: EdgeSignals, now_s: float) -> None:
        """A report came; `now_s` is the receiver's clock. Older ones than the last of that edge are ignored.

        What an edge had counted before its first report is no news: who adds up may have begun anew since.
        """
        before = self._reports.get(report.edge_id)
        if before is not None and before[1].now_s >= report.now_s:
            return
        last = self._last.get(report.edge_id)
        if last is not None:
            self.total = self.total.plus(report.counters.plus(last, sign=-1))
        self._last[report.edge_id] = report.counters
        self._reports[report.edge_id] = now_s, report

    def num_held(self, now_s: float) -> int:
        """Requests that wait in the edges that were heard of lately."""
        return sum(report.num_held for report in self._live(now_s))

    def pools(self, now_s: float) -> Mapping[str, PoolSignals]:
        """Each pool by name, as seen by the edge that sees the most ready replicas of it."""
        seen: dict[str, PoolSignals] = {}
        for report in self._live(now_s):
            for pool in report.pools:
                before = seen.get(pool.name)
                if before is None or pool.num_ready > before.num_ready:
                    seen[pool.name] = pool
        return seen

    def num_edges(self, now_s: float) -> int:
        """Edges that were heard of lately."""
        return len(self._live(now_s))

    def _live(self, now_s: float) -> list[EdgeSignals]:
        for edge_id, (at_s, _) in list(self._reports.items()):
            if now_s - at_s > SILENT_AFTER_S:
                del self._reports[edge_id]
        return [report for _, report in self._reports.values()]
