"""Who may come in, and whose turn is next: tenants with weights and token rates, a bounded queue, deadlines. Pure.

Knows tokens, tenants and seconds; no replicas and no prompts. The clock is an argument. What a request really took is
settled when it ends, as with the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models",
2024).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from .fair_queue import FairQueue
from .token_rates import DemandMeter, TokenBucket

USUAL_BURST_S = 10.0
"""A tenant's burst, where it has none of its own: what it may send in so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What one tenant (an API key) may have."""

    name: str
    weight: float = 1.0
    """Its share, beside the weights of others, of what is served while requests wait."""
    tokens_per_s: float | None = None
    """Tokens of prompts and expected outputs that it may send a second, over all edges; None: any number."""
    burst_tokens: float | None = None
    """How many it may send at once after a pause; None: what it may send in 10 s."""
    priority: int = 0
    """Of its requests that do not say one; lower runs first."""
    deadline_s: float | None = None
    """Seconds in which a request's first token must come, where the request says nothing; None: no limit."""
    max_queued: int | None = None
    """Of its requests, how many may wait in one edge; None: as many as the edge has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Bounds of one edge's queue."""

    max_queued: int = 256
    """Requests that may wait."""
    max_wait_s: float = 60.0
    """A request that is estimated to wait longer is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A request that asks to be let in."""

    request_id: str
    tenant: str
    num_tokens: int
    """Of the prompt, and those that are expected to be generated."""
    priority: int | None = None
    """Lower runs first; None: the tenant's."""
    deadline_s: float | None = None
    """When the first token must be there, on the clock of `now_s`; None: the tenant's limit, if it has one."""


class RefusalCause(enum.StrEnum):
    """Why a request is not let in."""

    RATE = "rate"
    """The tenant has used up its tokens."""
    QUEUE = "queue"
    """The edge's queue is full."""
    TENANT_QUEUE = "tenant_queue"
    """The tenant's part of it is."""
    DEADLINE = "deadline"
    """The first token would come too late."""
    WAIT = "wait"
    """It would wait for longer than anybody should."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is not let in."""

    request_id: str
    cause: RefusalCause
    estimated_wait_s: float
    """After which it may be sent again, or how long it would have waited."""
    message: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was let in."""

    request_id: str
    tenant: Tenant
    num_tokens: int
    priority: int
    deadline_s: float | None
    """When the first token must be there."""
    queued_at_s: float


class Admission:
    """One edge's door and queue. Belongs to one thread.

    `offer` lets a request in; while a replica has room, `first` says whose turn it is and `start` takes it out;
    `ended` settles what it took. `withdraw` forgets one that nobody wants any more.
    """

    def __init__(self, tenants: Iterable[Tenant], settings: AdmissionSettings, *, now_s: float) -> None:
        """Requests must name one of `tenants`."""
        self._settings = settings
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._queue = FairQueue()
        self._waiting: dict[str, Waiting] = {}
        self._started: dict[str, Waiting] = {}
        self._num_queued = dict.fromkeys(self._tenants, 0)
        self._demands = {name: DemandMeter() for name in self._tenants}
        self._buckets = {
            tenant.name: TokenBucket(*_rate(tenant, 1.0), now_s)
            for tenant in self._tenants.values()
            if tenant.tokens_per_s is not None
        }
        self._drained = _Drain()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_started(self) -> int:
        """Requests that left the queue for a replica and have not ended."""
        return len(self._started)

    def num_waiting_of(self, tenant: str) -> int:
        return self._num_queued[tenant]

    def offer(self, offer: Offer, now_s: float, *, first_token_s: float = 0.0) -> list[Refused]:
        """Let a request into the queue. Returns who is refused for that: nobody, the request itself, or the one that
        would be served last, which gives way in a full queue.

        `first_token_s` is how long its first token will take once it has left the queue, at least.
        """
        tenant = self._tenants[offer.tenant]
        self._demands[tenant.name].add(offer.num_tokens, now_s)
        priority = tenant.priority if offer.priority is None else offer.priority
        deadline_s = offer.deadline_s
        if deadline_s is None and tenant.deadline_s is not None:
            deadline_s = now_s + tenant.deadline_s
        wait_s = self.queue_s(offer.tenant, priority=priority) + first_token_s
        refused = self._refusal(offer, tenant, priority, deadline_s, wait_s, now_s)
        if refused is not None:
            return [refused]
        given_way = []
        if len(self._waiting) >= self._settings.max_queued:
            last = self._queue.last
            assert last is not None
            given_way = [self._refused(last, RefusalCause.QUEUE, max(wait_s, 1.0), "The queue is full")]
            self.withdraw(last, now_s)
        if tenant.name in self._buckets:
            self._buckets[tenant.name].take(offer.num_tokens, now_s)
        self._queue.push(
            offer.request_id, tenant=tenant.name, weight=tenant.weight, cost=offer.num_tokens, priority=priority
        )
        self._waiting[offer.request_id] = Waiting(
            offer.request_id, tenant, offer.num_tokens, priority, deadline_s, now_s
        )
        self._num_queued[tenant.name] += 1
        return given_way

    def first(self) -> Waiting | None:
        """Whose turn it is."""
        request_id = self._queue.first
        return None if request_id is None else self._waiting[request_id]

    def start(self, now_s: float) -> Waiting:
        """The first leaves the queue for a replica. There must be one."""
        waiting = self._leave(self._queue.pop())
        self._started[waiting.request_id] = waiting
        self._drained.add(waiting.num_tokens, now_s, is_busy=bool(self._waiting))
        return waiting

    def withdraw(self, request_id: str, now_s: float) -> bool:
        """A waiting request is not to be served; its tenant is not charged. False when it does not wait."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        self._queue.remove(request_id, weight=waiting.tenant.weight)
        self._leave(request_id)
        self._give_back(waiting, waiting.num_tokens, now_s)
        self._begin_anew_if_idle()
        return True

    def ended(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """A started request ended after so many tokens of prompt and outputs. Unknown ids are ignored."""
        started = self._started.pop(request_id, None)
        if started is None:
            return
        difference = num_tokens - started.num_tokens
        tenant = started.tenant
        self._queue.settle(tenant.name, difference, weight=tenant.weight, priority=started.priority)
        self._give_back(started, -difference, now_s)
        self._begin_anew_if_idle()

    def overdue(self, now_s: float, *, first_token_s: float = 0.0) -> list[Refused]:
        """Take those out of the queue that waited too long, or whose first token would come too late even if their turn
        were now."""
        found = []
        for waiting in list(self._waiting.values()):
            waited_s = now_s - waiting.queued_at_s
            if waiting.deadline_s is not None and now_s + first_token_s > waiting.deadline_s:
                message = "The first token can no longer come in time"
                found.append(self._refused(waiting.request_id, RefusalCause.DEADLINE, first_token_s, message))
            elif waited_s > self._settings.max_wait_s:
                message = f"The request has waited for {waited_s:.0f} s"
                found.append(self._refused(waiting.request_id, RefusalCause.WAIT, waited_s, message))
        for refused in found:
            self.withdraw(refused.request_id, now_s)
        return found

    def queue_s(self, tenant: str, *, priority: int = 0) -> float:
        """Estimated seconds that a new request would wait for its turn; 0 while nobody waits or nothing is known."""
        ahead = self._queue.cost_ahead(tenant, priority=priority)
        return ahead / self._drained.tokens_per_s if ahead and self._drained.tokens_per_s else 0.0

    def demand(self, tenant: str, now_s: float) -> float:
        """Tokens a second that the tenant asked this edge for lately, granted or not."""
        return self._demands[tenant].tokens_per_s(now_s)

    def set_share(self, tenant: str, share: float, now_s: float) -> None:
        """This edge's share of the tenant's token rate (`token_rates.divide`), above 0 and at most 1."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.resize(*_rate(self._tenants[tenant], share), now_s)

    def _refusal(
        self,
        offer: Offer,
        tenant: Tenant,
        priority: int,
        deadline_s: float | None,
        wait_s: float,
        now_s: float,
    ) -> Refused | None:
        request_id, settings = offer.request_id, self._settings
        if tenant.max_queued is not None and self._num_queued[tenant.name] >= tenant.max_queued:
            message = f"{self._num_queued[tenant.name]} requests of {tenant.name} wait already"
            return self._refused(request_id, RefusalCause.TENANT_QUEUE, max(wait_s, 1.0), message)
        if len(self._waiting) >= settings.max_queued and self._queue.comes_last(tenant.name, priority=priority):
            message = f"The queue is full: {len(self._waiting)} requests wait"
            return self._refused(request_id, RefusalCause.QUEUE, max(wait_s, 1.0), message)
        if deadline_s is not None and now_s + wait_s > deadline_s:
            message = f"The first token would come in {wait_s:.3g} s, {now_s + wait_s - deadline_s:.3g} s too late"
            return self._refused(request_id, RefusalCause.DEADLINE, wait_s, message)
        if wait_s > settings.max_wait_s:
            message = f"The request would wait for {wait_s:.0f} s, longer than {settings.max_wait_s:g} s"
            return self._refused(request_id, RefusalCause.WAIT, wait_s, message)
        bucket = self._buckets.get(tenant.name)
        rate_s = 0.0 if bucket is None else bucket.wait_s(offer.num_tokens, now_s)
        if rate_s > 0:
            message = f"{tenant.name} has used up its {tenant.tokens_per_s:g} tokens a second"
            return self._refused(request_id, RefusalCause.RATE, rate_s, message)
        return None

    def _refused(self, request_id: str, cause: RefusalCause, wait_s: float, message: str) -> Refused:
        return Refused(request_id, cause, wait_s, message + "; try again later.")

    def _leave(self, request_id: str) -> Waiting:
        waiting = self._waiting.pop(request_id)
        self._num_queued[waiting.tenant.name] -= 1
        return waiting

    def _give_back(self, request: Waiting, num_tokens: int, now_s: float) -> None:
        bucket = self._buckets.get(request.tenant.name)
        if bucket is not None:
            bucket.take(-num_tokens, now_s)

    def _begin_anew_if_idle(self) -> None:
        if not self._waiting and not self._started:
            self._queue.forget_idle()


class _Drain:
    """How fast the queue empties while requests wait, tokens a second."""

    INTERVAL_S = 1.0
    WEIGHT = 0.3

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._since_s: float | None = None
        self._tokens = 0

    def add(self, num_tokens: int, now_s: float, *, is_busy: bool) -> None:
        """So many left the queue; `is_busy`: others are still waiting."""
        if self._since_s is None:
            self._since_s, self._tokens = (now_s, 0) if is_busy else (None, 0)
            return
        self._tokens += num_tokens
        if now_s - self._since_s >= self.INTERVAL_S:
            rate = self._tokens / (now_s - self._since_s)
            self.tokens_per_s += (rate - self.tokens_per_s) * (self.WEIGHT if self.tokens_per_s else 1.0)
            self._since_s, self._tokens = now_s, 0
        if not is_busy:
            self._since_s = None


def _rate(tenant: Tenant, share: float) -> tuple[float, float]:
    """Rate and burst of one edge's bucket."""
    assert tenant.tokens_per_s is not None
    burst = tenant.tokens_per_s * USUAL_BURST_S if tenant.burst_tokens is None else tenant.burst_tokens
    return tenant.tokens_per_s * share, burst * share
