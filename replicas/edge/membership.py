"""Engine replicas as Ray Serve knows them: who they are, calls to one of them, and the accounting of requests.

Serve's request router of the edge's handle is the membership feed: `update_replicas` runs whenever a replica joins or
leaves. The router only enacts choices made before: a call goes to the replica that its `replica_id` argument names.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from manta.replicas.channel import Address, ChannelLost

logger = logging.getLogger(__name__)


class Membership:
    """The replica ids that Serve last told this process, and who wants to know."""

    def __init__(self) -> None:
        self._ids: frozenset[str] = frozenset()
        self._listener: Callable[[frozenset[str]], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` in the running loop, now and at each change."""
        self._loop, self._listener = asyncio.get_running_loop(), listener
        listener(self._ids)

    def publish(self, ids: frozenset[str]) -> None:
        """From any thread."""
        if ids == self._ids:
            return
        self._ids = ids
        if self._loop is not None and self._listener is not None:
            self._loop.call_soon_threadsafe(self._listener, ids)


MEMBERSHIP = Membership()
"""Of this process. An edge process has one handle to the engines, and so one router that feeds it."""

ROUTER_CLASS = "manta.replicas.edge.membership.PinnedRouter"


class PinnedRouter(RequestRouter):
    """Sends a call to the replica that its keyword argument `replica_id` names."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # Serve pickles this class by value: the module's own globals are reached by importing it.
        import manta.replicas.edge.membership as module

        module.MEMBERSHIP.publish(frozenset(replica.replica_id.unique_id for replica in replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.kwargs.get("replica_id") if pending_request is not None else None
        if wanted is None:
            return [candidate_replicas]
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]]


class ServeDirectory:
    """Implements the router's Directory with pinned calls. No call is made to a replica that is not a member."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._locate = engines.options(method_name="get_address")
        self._hold = engines.options(method_name="hold")
        self._tasks: set[asyncio.Task[None]] = set()

    async def locate(self, replica_id: str) -> Address:
        try:
            return await self._locate.remote(replica_id=replica_id)
        except (RayError, RayServeException) as error:
            raise ChannelLost(f"the replica cannot be asked ({type(error).__name__})") from error

    def hold(self, replica_id: str, request_id: str) -> Callable[[], None]:
        """One Serve call, open until the request ended: Serve counts it, and lets it end before a replica stops."""
        # In a context of its own: calls made inside one HTTP request share Serve's internal request id, and its router
        # spins, blocking the event loop, while two calls with the same id are pending.
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._held(replica_id, request_id), context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def release() -> None:
            """The engine's process ends the call when the request ends; this is for one that never gets there."""
            asyncio.get_running_loop().call_later(HOLD_GRACE_S, task.cancel)

        return release

    async def _held(self, replica_id: str, request_id: str) -> None:
        response = self._hold.remote(request_id, replica_id=replica_id)
        try:
            await response
        except (RayError, RayServeException) as error:  # never the trigger: the channel says what happened
            logger.debug("the call that holds request %s ended: %s", request_id, type(error).__name__)
        except asyncio.CancelledError:
            response.cancel()
            raise


HOLD_GRACE_S = 2.0
