"""The `hold` calls between edges and engine replicas, both ends: one for each pair that has streams. Knows no Ray.

Requests and tokens travel over the channel; what Serve sees of them is one ongoing call from each edge to each replica
that it works with. Serve waits for its end before it stops the replica, and its counts say who works with whom, not how
many streams there are: edges and engines count those.

The edge ends its call when it has had no stream for a moment. That of an edge which died is ended by the replica: its
engine has had no request from it for a while. So nobody can leave a call behind.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Collection

GRACE_S = 1.0
"""How long an edge's call stays open after its last request at the replica has ended."""
RETRY_S = 1.0
"""Pause before a call that broke off is made again."""
IDLE_S = 5.0
"""A call whose edge has had no request at the engine for so long is ended; a living edge ends its own before."""


class Holds:
    """The edge's end. `call(replica_id)` makes one call and returns when it is over, however; it can be cancelled."""

    def __init__(
        self,
        call: Callable[[str], Awaitable[None]],
        *,
        is_member: Callable[[str], bool],
        grace_s: float = GRACE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """A replica that is no member is not called; one that was and drains waits for nothing but the last request."""
        self._call = call
        self._is_member = is_member
        self._grace_s = grace_s
        self._retry_s = retry_s
        self._held: dict[str, _Held] = {}

    def hold(self, replica_id: str) -> Callable[[], None]:
        """A request runs on the replica; the result, called once, says that it has ended."""
        held = self._held.get(replica_id)
        if held is None:
            # In a context of its own: a call belongs to no HTTP request, whose internal id Serve would give to it.
            task = asyncio.get_running_loop().create_task(self._keep_held(replica_id), context=contextvars.Context())
            held = self._held[replica_id] = _Held(task)
        held.num_requests += 1
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        return lambda: self._release(replica_id, held)

    def _release(self, replica_id: str, held: _Held) -> None:
        held.num_requests -= 1
        if not held.num_requests:
            grace_s = self._grace_s if self._is_member(replica_id) else 0.0
            held.timer = asyncio.get_running_loop().call_later(grace_s, self._end, replica_id, held)

    def _end(self, replica_id: str, held: _Held) -> None:
        del self._held[replica_id]
        held.task.cancel()

    async def _keep_held(self, replica_id: str) -> None:
        while self._is_member(replica_id):
            await self._call(replica_id)
            await asyncio.sleep(self._retry_s)


class _Held:
    """The call to one replica, and how many requests it stands for."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.num_requests = 0
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call; set while it stands for nothing."""


class HeldCalls:
    """The replica's end. `learn` is told again and again which edges have had requests at its engine."""

    def __init__(self, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._calls: dict[asyncio.Future[None], _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def wait(self, edge_id: str) -> None:
        """Until the edge has been idle for `idle_s`, or everything ends."""
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[end] = _Call(edge_id, self._clock())
        try:
            await end
        finally:
            del self._calls[end]

    def learn(self, busy_edges: Collection[str]) -> None:
        """These edges have had requests since the call before."""
        now_s = self._clock()
        for end, call in self._calls.items():
            if call.edge_id in busy_edges:
                call.busy_at_s = now_s
            elif now_s - call.busy_at_s > self._idle_s and not end.done():
                end.set_result(None)

    def end_all(self) -> None:
        """The engine is gone."""
        for end in self._calls:
            if not end.done():
                end.set_result(None)


class _Call:
    __slots__ = ("busy_at_s", "edge_id")

    def __init__(self, edge_id: str, busy_at_s: float) -> None:
        self.edge_id, self.busy_at_s = edge_id, busy_at_s
