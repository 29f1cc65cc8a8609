"""What edges report for scaling, and what they learn back: load, outcomes, decisions. Pure; knows no policy and no Ray.

Counters count since the edge began and only rise, so that a report that is lost costs nothing.
"""

from __future__ import annotations

import enum

import msgspec

from manta.cluster.routing.roles import Role
from manta.engine.step_costs import StepCosts


class ReasonCode(enum.StrEnum):
    """Why a target changed, or did not change as far as it should have. Few, since metrics carry them as a label."""

    FORECAST = "forecast"
    """The expected arrivals need another number of replicas to stay within the SLO."""
    BURST = "burst"
    """Many more requests came at once than the rate before explains."""
    BREACH = "breach"
    """More requests than the objective allows were late, though the model saw enough replicas."""
    BACKLOG = "backlog"
    """Requests wait that must be worked off."""
    RECURRING = "recurring"
    """Bursts come back that are over before a replica could start: so many are held for them."""
    KV_ROOM = "kv_room"
    """The KV cache, or the number of sequences a replica runs, is the limit."""
    QUIET = "quiet"
    """For a whole quiet window fewer were enough."""
    TO_ZERO = "to_zero"
    FROM_ZERO = "from_zero"
    BUDGET = "budget"
    """The GPU budget holds it back."""
    MIN = "min"
    MAX = "max"
    """The pool's own limits hold it."""
    ROLE_CHANGE = "role_change"
    """A replica of the other pool takes this role."""
    REPLACE_FAILED = "replace_failed"
    """A replica is gone that nobody stopped; another one starts."""


class PoolSignals(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as one edge sees it, from the channel's snapshots. All edges see all replicas. Sums over the ready and
    draining replicas unless said otherwise."""

    name: str
    role: Role = Role.MIXED
    num_ready: int = 0
    num_draining: int = 0
    num_lent: int = 0
    """Of the ready ones, those that have another role for now."""
    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    num_context_tokens: int = 0
    """KV-cache tokens that the running decodes read in a step."""
    kv_cache_usage: float = 0.0
    """Mean of the ready ones, 0 to 1."""
    max_num_seqs: int = 0
    """Of a replica; 0 while none was seen."""
    kv_room_tokens: int = 0
    """Of a replica; 0 while none was seen."""
    tokens_a_step: int = 0
    """Of a replica; 0 while none was seen."""
    tpot_target_s: float | None = None
    """What a replica holds its steps with decodes under; None: nothing."""
    step_costs: StepCosts | None = None
    """Of a replica; None while nobody knows how long its steps take."""
    startup_s: float | None = None
    """Seconds that the start of the replica that came last took, as its engine says; None while none was seen."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What came and what became of it, of an edge or summed over edges. They only rise."""

    num_arrived: int = 0
    """Sequences that asked to be generated, refused ones included."""
    num_prompt_tokens: int = 0
    """Of those that arrived."""
    num_cached_tokens: int = 0
    """Prompt tokens that engines found cached."""
    num_finished: int = 0
    num_output_tokens: int = 0
    """Of those that finished."""
    num_good: int = 0
    """Finished within the SLO."""
    num_late_ttft: int = 0
    """Finished; the first token came too late, whatever the others did."""
    num_late_tpot: int = 0
    """Finished; the first token came in time and the others too slowly."""
    num_failed: int = 0
    """Refused for load, or broken off by an error. What a client cancelled is counted nowhere."""

    def plus(self, other: Counters, *, sign: int = 1) -> Counters:
        """The sum; the difference with `sign` -1."""
        return Counters(**{name: getattr(self, name) + sign * getattr(other, name) for name in self.__struct_fields__})


class EdgeSignals(msgspec.Struct, frozen=True, kw_only=True):
    """One edge's report: counters since it began, and gauges."""

    edge_id: str
    now_s: float
    """When it was made, by the edge's own clock; only tells reports of one edge apart."""
    counters: Counters = Counters()
    num_held: int = 0
    """Requests that wait in the edge now."""
    pools: tuple[PoolSignals, ...] = ()


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a pool's target, or why it could not change."""

    time_s: float
    """By the clock of who decided; time.time() on a cluster, virtual in a simulation."""
    pool: str
    before: int
    after: int
    """Replicas."""
    reason: str
    """A ReasonCode."""
    sentence: str
    """For people, with the numbers that led to it."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: what is wanted, what is there, and why."""

    name: str
    role: Role = Role.MIXED
    desired: int = 0
    num_ready: int = 0
    num_starting: int = 0
    num_draining: int = 0
    min_replicas: int = 0
    max_replicas: int = 0
    gpus_per_replica: float = 0.0
    """Nominal GPUs that a replica counts for in the budget."""
    reason: str = ReasonCode.MIN
    """Of the last change."""
    sentence: str = ""


class ScalingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What edges learn back, and what GET /autoscaling shows."""

    time_s: float
    pools: tuple[PoolStatus, ...] = ()
    forecast_requests_s: float = 0.0
    """Arrivals a second that are expected when a replica that starts now is ready."""
    arrivals_requests_s: float = 0.0
    """Arrivals a second lately."""
    attainment: float | None = None
    """Share of the requests of the last minutes within the SLO; None without any."""
    cold_start_s: float = 0.0
    """Seconds that a start is expected to take."""
    gpus_used: float = 0.0
    gpu_budget: float | None = None
    decided: tuple[Decided, ...] = ()
    """The last decisions, oldest first."""
    num_decided: dict[str, dict[str, int]] = {}
    """Decisions ever, by pool and reason."""
