"""Where sequences wait in the edge until a replica takes them, in whose turn, and what is refused instead. Knows no
replica and no channel: it is told how to begin a sequence, and when it is worth trying again.

The order, the bounds and the tenants' rates are those of cluster/routing/admission.py. What an engine has had before
goes on ahead of everything new and is never refused for want of room. One event loop owns a gate.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from manta.cluster.routing.admission import Admission, AdmissionSettings, Offer, RefusalCause, Refused, Tenant
from manta.cluster.routing.decision import NoRoom, NoRoomReason
from manta.cluster.routing.token_rates import divide
from manta.engine.errors import Overloaded, Unavailable

from .client import DEFAULT_TENANT

T = TypeVar("T")

MOST_RETRY_AFTER_S = 60.0


@dataclass(eq=False)
class _Waiter(Generic[T]):
    """A sequence that waits, and how to begin it."""

    begin: Callable[[], T | NoRoom]
    begun: asyncio.Future[T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: Exception) -> None:
        if not self.begun.done():
            self.begun.set_exception(error)


class Gate(Generic[T]):
    """`T` is what beginning a sequence gives. `serve` is to be called whenever a replica may have room again."""

    def __init__(
        self,
        tenants: Sequence[Tenant] = (),
        *,
        max_queued: int,
        max_wait_s: float,
        undo: Callable[[T], None],
        on_refused: Callable[[str, str], None],
        num_edges: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With tenants, sequences wait here for their turn while all replicas are full; without, they are refused then
        and wait only while no replica is ready. `undo` ends what was begun for a caller that is gone. `on_refused` is
        told tenant and reason of each refusal. Limits of tenants hold for all `num_edges` edges together.
        """
        self._is_fair = bool(tenants)
        self._max_queued, self._max_wait_s = max_queued, max_wait_s
        self._undo = undo
        self._on_refused = on_refused
        self._clock = clock
        known = {tenant.name: tenant for tenant in (Tenant(name=DEFAULT_TENANT), *tenants)}
        self._limited = [tenant.name for tenant in known.values() if tenant.tokens_per_s is not None]
        now_s = clock()
        # With no queue at all, a sequence still passes through it on its way to a replica that has room.
        settings = AdmissionSettings(max_queued=max(max_queued, 1), max_wait_s=max_wait_s)
        self._admission = Admission(known.values(), settings, now_s=now_s)
        for name in self._limited:
            self._admission.set_share(name, 1.0 / num_edges, now_s)
        self._waiters: dict[str, _Waiter[T]] = {}
        self._tenant_of: dict[str, str] = {}
        self._movers: list[_Waiter[T]] = []

    @property
    def num_waiting(self) -> Mapping[str, int]:
        """By tenant."""
        return Counter(self._tenant_of[request_id] for request_id in self._waiters)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiters or self._movers)

    @property
    def num_waiting_to_move(self) -> int:
        return len(self._movers)

    async def enter(self, offer: Offer, begin: Callable[[], T | NoRoom], *, first_token_s: float = 0.0) -> T:
        """Begin a new sequence, when it is its turn and there is room. `ended` must be called when it is over.

        `first_token_s` is how long its first token would take if it began now, where it has a deadline.
        Raises Overloaded when it is refused, Unavailable when no replica became ready in time.
        """
        waiter = _Waiter(begin)
        self._waiters[offer.request_id], self._tenant_of[offer.request_id] = waiter, offer.tenant
        try:
            for refused in self._admission.offer(offer, self._clock(), first_token_s=first_token_s):
                self._refuse(refused.request_id, refused)
            if not waiter.begun.done():
                no_room = self.serve()
                if not waiter.begun.done():
                    self._check_wait(offer, no_room)
                    await self._wait(waiter, offer)
            return await waiter.begun
        except BaseException:
            self._admission.withdraw(offer.request_id, self._clock())
            self.ended(offer.request_id, 0)
            self._undo_if_begun(waiter)
            raise
        finally:
            del self._waiters[offer.request_id], self._tenant_of[offer.request_id]

    async def enter_again(self, begin: Callable[[], T | NoRoom]) -> T:
        """Go on with a sequence that an engine has had. Raises Unavailable when that is impossible for too long."""
        waiter = _Waiter(begin)
        self._movers.append(waiter)
        try:
            self.serve()
            await asyncio.wait((waiter.begun,), timeout=self._max_wait_s)
            if not waiter.begun.done():
                raise self._nothing_ready()
            return await waiter.begun
        except BaseException:
            self._undo_if_begun(waiter)
            raise
        finally:
            if waiter in self._movers:
                self._movers.remove(waiter)

    def serve(self) -> NoRoom | None:
        """Begin whatever has its turn and finds room. Returns why the next new one does not; None when none waits."""
        for waiter in list(self._movers):
            begun = self._begin(waiter)
            if isinstance(begun, NoRoom):
                break  # a queue in which the first waits for what the others wait for, too
            self._movers.remove(waiter)
        while (first := self._admission.first()) is not None:
            begun = self._begin(self._waiters[first.request_id])
            if begun is None:
                self._admission.start(self._clock())
            elif begun.reason in (NoRoomReason.DEADLINE, NoRoomReason.WAIT):
                self._admission.withdraw(first.request_id, self._clock())
                self._refuse(first.request_id, _refused(first.request_id, begun))
            else:
                return begun
        return None

    def ended(self, request_id: str, num_tokens: int) -> None:
        """A new sequence that was begun is over, after so many tokens of prompt and answer."""
        self._admission.ended(request_id, num_tokens, self._clock())

    def demands(self) -> dict[str, float]:
        """What tenants with limits asked this edge for lately, tokens a second."""
        now_s = self._clock()
        return {name: self._admission.demand(name, now_s) for name in self._limited}

    def divide_limits(self, edge_id: str, others: Mapping[str, Mapping[str, float]]) -> None:
        """Take this edge's share of every limit, given the demands at the other edges by their ids."""
        now_s, own = self._clock(), self.demands()
        for name in self._limited:
            shares = divide({edge_id: own[name], **{other: given.get(name, 0.0) for other, given in others.items()}})
            self._admission.set_share(name, shares[edge_id], now_s)

    def _begin(self, waiter: _Waiter[T]) -> NoRoom | None:
        """Why it could not begin; None when it has, or failed, or nobody waits for it."""
        if waiter.begun.done():
            return None
        try:
            begun = waiter.begin()
        except Exception as error:  # belongs to the task that waits
            waiter.fail(error)
            return None
        if isinstance(begun, NoRoom):
            return begun
        waiter.begun.set_result(begun)
        return None

    def _undo_if_begun(self, waiter: _Waiter[T]) -> None:
        begun = waiter.begun
        if begun.done() and not begun.cancelled() and begun.exception() is None:
            self._undo(begun.result())

    def _check_wait(self, offer: Offer, no_room: NoRoom | None) -> None:
        """Raise unless it may wait: where replicas are full it may for the sake of fairness, and not in vain."""
        assert no_room is not None, "it would have begun"
        if no_room.reason is NoRoomReason.FULL:
            now_s = self._clock()
            wait_s = no_room.estimated_wait_s + self._admission.queue_s(offer.tenant, priority=offer.priority or 0)
            if not self._is_fair:
                raise self._overloaded(offer.tenant, "full", "All replicas are full; try again later.", wait_s)
            if offer.deadline_s is not None and now_s + wait_s > offer.deadline_s:
                raise self._overloaded(
                    offer.tenant,
                    RefusalCause.DEADLINE,
                    f"All replicas are full: the first token would come in about {wait_s:.3g} s, too late.",
                    wait_s,
                )
        if not self._max_queued:
            raise self._overloaded(
                offer.tenant,
                RefusalCause.QUEUE,
                "No replica is ready, and nothing may wait for one; try again later.",
                1.0,
            )

    async def _wait(self, waiter: _Waiter[T], offer: Offer) -> None:
        left_s = self._max_wait_s
        if offer.deadline_s is not None:
            left_s = min(left_s, max(offer.deadline_s - self._clock(), 0.0))
        await asyncio.wait((waiter.begun,), timeout=left_s)
        if waiter.begun.done():
            return
        if left_s < self._max_wait_s:
            message = f"No replica took the request within its deadline, {left_s:.3g} s after it came."
            raise self._overloaded(offer.tenant, RefusalCause.DEADLINE, message, max(left_s, 1.0))
        no_room = self.serve()
        if no_room is not None and no_room.reason is NoRoomReason.FULL:
            message = f"All replicas were full for {left_s:g} s; try again later."
            raise self._overloaded(offer.tenant, "full", message, no_room.estimated_wait_s)
        if not waiter.begun.done():
            raise self._nothing_ready()

    def _refuse(self, request_id: str, refused: Refused) -> None:
        waiter = self._waiters[request_id]
        waiter.fail(
            self._overloaded(self._tenant_of[request_id], refused.cause, refused.message, refused.estimated_wait_s)
        )

    def _overloaded(self, tenant: str, reason: str, message: str, wait_s: float) -> Overloaded:
        self._on_refused(tenant, str(reason))
        code = {"rate": "rate_limit_exceeded", "deadline": "deadline_exceeded"}.get(str(reason), "overloaded")
        retry_after_s = min(max(wait_s, 1.0), MOST_RETRY_AFTER_S)
        return Overloaded(message, retry_after_s=retry_after_s, code=code, estimated_wait_s=wait_s)

    def _nothing_ready(self) -> Unavailable:
        return Unavailable(f"No replica became ready within {self._max_wait_s:g} s.", retry_after_s=5.0)


def _refused(request_id: str, no_room: NoRoom) -> Refused:
    wait_s = no_room.estimated_wait_s
    if no_room.reason is NoRoomReason.DEADLINE:
        message = f"The first token would come in about {wait_s:.3g} s, after the request's deadline; try again later."
        return Refused(request_id, RefusalCause.DEADLINE, wait_s, message)
    message = f"The first token would come in about {wait_s:.3g} s, later than anybody should wait; try again later."
    return Refused(request_id, RefusalCause.WAIT, wait_s, message)
