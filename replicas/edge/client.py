"""What the edge needs from the rest of the system: engines, a tokenizer, an observer. Knows no transport and no HTTP.

`EngineClient` is implemented over channels by `router.py` and, in tests, over an engine core in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from manta.cluster.routing.admission import Tenant
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import ScalingStatus
from manta.engine.errors import Unavailable
from manta.engine.request import EngineRequest, FinishReason, RequestDelta
from manta.engine.stats import EngineInfo, Snapshot
from manta.replicas.engine_times import EngineTimes
from manta.replicas.step_histogram import StepHistogram

from .sse import Outbox

if TYPE_CHECKING:
    from manta.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplicaStatus:
    """One engine replica as the edge sees it."""

    replica_id: str
    ready: bool
    """Takes new work."""
    draining: bool = False
    snapshot: Snapshot | None = None
    step_times: StepHistogram | None = None
    times: EngineTimes | None = None
    last_frame_age_s: float | None = None
    """Seconds since it was last heard of; None before the first frame."""
    role: Role | None = Role.MIXED
    """What it is for; while it drains for another role, the one from before. None while it is not connected."""
    startup_s: Mapping[str, float] | None = None
    """Seconds each phase of its start took; None while it is not connected."""


DEFAULT_TENANT = "default"
"""Everybody, and those without a tenant's key where there are tenants."""

Take = Callable[[RequestDelta], bool]
"""Is given a delta; whether more is wanted."""


@dataclass(frozen=True)
class RequestTerms:
    """What a request asks of the edge beside its tokens."""

    tenant: str = DEFAULT_TENANT
    """Whose API key it came with."""
    deadline_s: float | None = None
    """When its first token is of no use any more (time.monotonic()); it is refused when that cannot be met."""
    session: str | None = None
    """Requests of a session go to the same replica when that costs little."""


@dataclass
class RouteNote:
    """Where one sequence went, filled in by the client as it becomes known. Times in seconds."""

    replica_id: str | None = None
    """Of the last replica, where it moved."""
    prefill_replica_id: str | None = None
    """Where its prompt was computed, if not there."""
    estimated_s: float | None = None
    """From the first decision to the first token, as estimated then; None where steps of unknown length are ahead."""
    actual_s: float | None = None
    """The same as it turned out."""
    sent_at_s: float | None = None
    """When it was first sent to a replica (time.monotonic())."""
    handed_over_at_s: float | None = None
    """With pools, when the first token of the replica that decodes came (time.monotonic())."""


class EngineClient(Protocol):
    """All engine replicas of one model."""

    @property
    def info(self) -> EngineInfo | None:
        """Of a ready replica; None while all are loading. It stays known once it was."""
        ...

    async def run(
        self, request: EngineRequest, take: Take, terms: RequestTerms = RequestTerms(), note: RouteNote | None = None
    ) -> None:
        """Run one sequence to its end, and write into `note` where. Nothing is repeated or lost when a replica dies.

        `take` is given each delta in order as it arrives, in the event loop but in no task: it must not block. The
        last delta has a finish reason; when `take` returns False before, the work is cancelled and this returns.
        Before the first delta it raises Overloaded, Unavailable, InvalidRequest or ContextLengthExceeded when the
        request is not taken; EngineFailed and what `take` raises at any time. The queue of requests that wait for a
        replica is bounded here. Cancelling the task cancels the work at once; `take` is not called any more then.
        """
        ...

    def replicas(self) -> list[ReplicaStatus]:
        """Every replica that is known, ready or not."""
        ...

    async def render_metrics(self) -> bytes:
        """All metrics as Prometheus text (version 0.0.4)."""
        ...


@dataclass(frozen=True)
class ChoiceRecord:
    """One generated sequence, when it is over."""

    finish_reason: FinishReason
    """CANCELLED: the client went away or the request timed out; ERROR: the engine failed."""
    num_completion_tokens: int
    time_to_first_token_s: float | None
    """From the arrival of the HTTP request; None when no token came."""
    time_per_output_token_s: float | None
    """Mean distance of the tokens after the first; None with fewer than two."""
    note: RouteNote | None = None
    """Where it went."""


@dataclass(frozen=True)
class RequestRecord:
    """One HTTP request that an engine worked on, when it is over. Times in seconds."""

    endpoint: str
    """`chat.completions` or `completions`."""
    stream: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    """From arrival to submission: reading, template, tokenization."""
    e2e_s: float
    """From arrival to the end of the last choice."""
    choices: tuple[ChoiceRecord, ...]
    arrival_s: float = 0.0
    """When it came (time.monotonic())."""
    response_id: str = ""
    traceparent: str | None = None
    """The caller's trace, as W3C Trace Context has it; None where he has none."""


@dataclass(frozen=True)
class TenantKey:
    """Who holds an API key."""

    key: str = field(repr=False)
    tenant: Tenant


Explain = Callable[[str], Awaitable[dict[str, Any] | None]]
"""Given a response's id, or that of one of its sequences: all decisions about it, as JSON; None when it is unknown."""


class RequestObserver(Protocol):
    """Told about each request once, never about single tokens. Must not block or raise."""

    def request_finished(self, record: RequestRecord) -> None:
        """A request that was taken is over, however it ended."""
        ...

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        """A request was answered with an HTTP error. `code` is the envelope's code, or its type without one."""
        ...


class NoObserver:
    """Ignores everything."""

    def request_finished(self, record: RequestRecord) -> None:
        """Nothing to do."""

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        """Nothing to do."""


@dataclass
class EdgeContext:
    """Everything one edge process shares between its requests. Used from the event loop's thread only."""

    client: EngineClient
    tokenizer: Tokenizer
    model_name: str
    api_keys: tuple[str, ...] = ()
    """Accepted bearer tokens; none: no key is needed."""
    observer: RequestObserver = field(default_factory=NoObserver)
    request_timeout_s: float | None = None
    max_body_bytes: int = 32 * 2**20
    """A larger request is refused with 413."""
    max_sequences: int = 2048
    """Most sequences (prompts times n) that one request may ask for."""
    drain_retry_after_s: float = 5.0
    """Told to clients that come while this edge drains."""
    roles: tuple[Role, ...] = (Role.MIXED,)
    """Those of which /ready wants a ready replica each."""
    set_role: Callable[[str, Role], None] | None = None
    """Asks a replica, by id, to drain and take a role. Raises InvalidRequest; None where roles are fixed."""
    cluster_status: Callable[[], Awaitable[dict[str, Any]]] | None = None
    """Nodes, and every replica's ranks, for GET /cluster; None where there is no cluster."""
    outbox: Outbox = field(default_factory=Outbox)
    hash_key: bytes = b""
    """The cluster's key of block hashes; engines that hash with another find cached prefixes by themselves."""
    tenant_keys: tuple[TenantKey, ...] = ()
    """Accepted beside `api_keys`."""
    default_tenant: Tenant = field(default_factory=lambda: Tenant(name=DEFAULT_TENANT))
    """Everybody else."""
    deadline_s: float | None = None
    """Longest wait for a first token, where neither request nor tenant says one."""
    explain: Explain | None = None
    """How requests were routed, for GET /explain; None where nobody knows."""
    hold: Callable[[], Awaitable[None]] | None = None
    """Waits until an engine is known, where replicas start when a request comes. Raises Overloaded, Unavailable."""
    metrics: Callable[[], Awaitable[bytes]] | None = None
    """The page of GET /metrics, where it is more than this edge's own."""
    metrics_targets: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
    """For GET /metrics/targets: where the pages of single edges are; None where they have none."""
    scaling: Callable[[], ScalingStatus | None] | None = None
    """For GET /autoscaling; None where the number of replicas is fixed."""
    starting: Callable[[], list[dict[str, Any]]] = list
    """Replicas that start, with the phases that are over, for /ready."""
    _draining: bool = False
    _missing: str | None = None
    _open: set[OpenRequest] = field(default_factory=set)

    def drain(self) -> None:
        """From now on /ready answers 503 and new work is refused; running requests finish. Cannot be undone."""
        self._draining = True

    @property
    def is_draining(self) -> bool:
        return self._draining

    def set_missing(self, missing: str | None) -> None:
        """What engine replicas wait for that have no room in the cluster; None when none waits."""
        self._missing = missing

    @property
    def missing(self) -> str | None:
        return self._missing

    @property
    def num_open_requests(self) -> int:
        """Generation requests that are being answered."""
        return len(self._open)

    def abort_open_requests(self) -> None:
        """End every open request with an error: 503, or an error event where a stream has begun."""
        for request in list(self._open):
            request.interrupt(Unavailable("The server is stopping.", retry_after_s=self.drain_retry_after_s))

    def open_request(self) -> OpenRequest:
        """Count the current task as a generation request for as long as the result is entered."""
        return OpenRequest(self._open)


class OpenRequest:
    """One generation request in progress, run by the task that enters it. Others may interrupt it with a reason."""

    def __init__(self, registry: set[OpenRequest]) -> None:
        self.reason: Exception | None = None
        """Why it was interrupted."""
        self._registry = registry
        self._task: asyncio.Task[object] | None = None

    def interrupt(self, reason: Exception) -> None:
        """Cancel the task's current wait; the first reason counts. Called from the loop, never by the task itself."""
        if self.reason is None and self._task is not None:
            self.reason = reason
            self._task.cancel()

    def __enter__(self) -> OpenRequest:
        self._task = asyncio.current_task()
        self._registry.add(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._task = None
        self._registry.discard(self)


@dataclass(frozen=True)
class Observers:
    """Tells several observers the same."""

    all: tuple[RequestObserver, ...]

    def request_finished(self, record: RequestRecord) -> None:
        """A request that was taken is over."""
        for one in self.all:
            one.request_finished(record)

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        """A request was answered with an error."""
        for one in self.all:
            one.request_refused(endpoint, status, code)
