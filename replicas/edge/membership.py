"""Engine replicas as Ray Serve knows them: who they are, calls to one of them, and the accounting of requests.

Serve's request router of the edge's handle is the membership feed: `update_replicas` runs whenever a replica joins or
leaves. The router only enacts choices made before: a call goes to the replica that its `replica_id` argument names.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from manta.replicas.channel import Address, ChannelLost
from manta.replicas.held_calls import Holds

logger = logging.getLogger(__name__)


class Membership:
    """The replica ids of each deployment that Serve last told this process, and who wants to know."""

    def __init__(self) -> None:
        self._of_deployment: dict[str, frozenset[str]] = {}
        self._ids: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._listener: Callable[[frozenset[str]], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call `listener` in the running loop, now and at each change."""
        self._loop, self._listener = asyncio.get_running_loop(), listener
        listener(self._ids)

    @property
    def ids(self) -> frozenset[str]:
        """Of all deployments."""
        return self._ids

    def ids_of(self, deployment: str) -> frozenset[str]:
        """Of one."""
        return self._of_deployment.get(deployment, frozenset())

    def deployment_of(self, replica_id: str) -> str | None:
        """Where the replica belongs; None for one that is no member."""
        return next((name for name, ids in self._of_deployment.items() if replica_id in ids), None)

    def publish(self, deployment: str, ids: frozenset[str]) -> None:
        """All replicas that a deployment has now. From any thread."""
        with self._lock:
            if ids == self.ids_of(deployment):
                return
            self._of_deployment = {**self._of_deployment, deployment: ids}
            self._ids = frozenset().union(*self._of_deployment.values())
            if self._loop is not None and self._listener is not None:
                self._loop.call_soon_threadsafe(self._listener, self._ids)


MEMBERSHIP = Membership()
"""Of this process. An edge process has one handle to each deployment of engines, and so one router a deployment that
feeds it."""

ROUTER_CLASS = "manta.replicas.edge.membership.PinnedRouter"


class PinnedRouter(RequestRouter):
    """Sends a call to the replica that its keyword argument `replica_id` names."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        # Serve pickles this class by value: the module's own globals are reached by importing it.
        import manta.replicas.edge.membership as module

        ids = frozenset(replica.replica_id.unique_id for replica in replicas)
        module.MEMBERSHIP.publish(self._deployment_id.name, ids)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.kwargs.get("replica_id") if pending_request is not None else None
        if pending_request is None or wanted is None:
            return [candidate_replicas]
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        if found:
            return [found]
        # Without a choice Serve asks again at once and for ever, and nothing else runs in this process any more. The
        # call is answered instead; with some choice Serve looks at it and sees that it is over.
        if not pending_request.future.done():
            pending_request.future.set_exception(RayServeException(f"replica {wanted} is gone"))
        return [candidate_replicas]


class ServeDirectory:
    """Implements the router's Directory with pinned calls. No call is made to a replica that is not a member."""

    def __init__(self, engines: Iterable[DeploymentHandle[Any]], *, edge_id: str) -> None:
        """One handle a deployment."""
        self._edge_id = edge_id
        self._locate, self._hold = {}, {}
        for handle in engines:
            self._locate[handle.deployment_name] = handle.options(method_name="get_address")
            self._hold[handle.deployment_name] = handle.options(method_name="hold")
        self._holds = Holds(self._call_hold, is_member=lambda replica_id: replica_id in MEMBERSHIP.ids)

    async def locate(self, replica_id: str) -> Address:
        deployment = MEMBERSHIP.deployment_of(replica_id)
        if deployment is None:
            raise ChannelLost("the replica has left")
        try:
            return await self._locate[deployment].remote(replica_id=replica_id)
        except (RayError, RayServeException) as error:
            raise ChannelLost(f"the replica cannot be asked ({type(error).__name__})") from error

    def hold(self, replica_id: str) -> Callable[[], None]:
        return self._holds.hold(replica_id)

    async def _call_hold(self, replica_id: str) -> None:
        deployment = MEMBERSHIP.deployment_of(replica_id)
        if deployment is None:
            return
        response = self._hold[deployment].remote(self._edge_id, replica_id=replica_id)
        try:
            await response
        except (RayError, RayServeException) as error:  # never the trigger: the channel says what happened
            logger.debug("the call that holds replica %s ended: %s", replica_id, type(error).__name__)
        except asyncio.CancelledError:
            response.cancel()
            raise
