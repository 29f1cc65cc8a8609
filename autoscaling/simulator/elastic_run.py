"""How an elastic fleet is to be simulated, and what a run of it found. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from manta.cluster.scaling import Decided
from manta.cluster.slo import Slo

from .sightings import Sample
from .workload import SimRequest


@dataclass(frozen=True)
class Failure:
    """Replicas that die at a moment; what ran there goes on elsewhere, computed again."""

    at_s: float
    num_replicas: int = 1
    pool: str | None = None
    """None: of the first pool."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Seconds unless named otherwise."""

    slo: Slo
    period_s: float = 1.0
    """Between two looks of the policy."""
    delay_s: float = 0.5
    """From what a snapshot shows to a change of the fleet: reports, the decision, the scheduler of the cluster."""
    gpu_budget: float | None = None
    max_held: int = 4096
    """Requests that wait at the edge; more are refused."""
    max_hold_s: float = 120.0
    """A request that waited so long at the edge is refused."""
    drain_grace_s: float = 30.0
    """What runs on a replica that leaves may end there for so long, then it goes on elsewhere."""
    failures: tuple[Failure, ...] = ()
    seed: int = 0


class Served:
    """What became of one request. Times in seconds; None: that did not happen."""

    __slots__ = ("finished_s", "first_s", "is_failed", "num_cached", "num_moves", "replica", "request")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.first_s: float | None = None
        self.finished_s: float | None = None
        self.is_failed = False
        self.num_moves = 0
        self.num_cached = 0
        self.replica = -1
        """Number of the replica that has it, or had it last."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None for answers of one token and unfinished ones."""
        if self.finished_s is None or self.first_s is None or self.request.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_s) / (self.request.num_output_tokens - 1)


@dataclass
class ElasticRun:
    """What a run found."""

    served: list[Served]
    gpu_s: float
    """GPU seconds, from the beginning of a start to the end of a drain."""
    samples: list[Sample]
    decided: list[Decided]
    targets: dict[str, list[tuple[float, int]]]
    """Of each pool, whenever it changed."""
    end_s: float
    num_events: int
    num_starts: int
    num_role_changes: int
    startups: list[dict[str, float]] = field(default_factory=list)
    """Phases of each start that ended."""
