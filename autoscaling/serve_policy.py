"""The autoscaler as a deployment of Ray Serve: hears the edges, asks the policy, scales through Serve's controller.

The one file here that knows Ray. Serve supervises it like any deployment: when it dies, another one goes on from the
replicas that there are and from the decisions that were kept; nothing is scaled meanwhile. Serve's own autoscaling is
off (`external_scaler_enabled`), so that nothing else changes a target, and at zero no call wakes a replica by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from manta.cluster.scaling import EdgeSignals, ScalingStatus

from .budget import ModelAsk
from .role_changes import RoleChange
from .steering import Memory, PoolCounts, Steering, SteeringSettings

logger = logging.getLogger(__name__)

DEPLOYMENT = "autoscaler"
NAMESPACE = b"manta"
ANSWER_TIMEOUT_S = 5.0
SILENT_S = 30.0
"""A loop that has not come round for so long is replaced."""


class Autoscaler:
    """One of an application. Edges call `report`; operators read what edges learn from it."""

    async def __init__(self, settings: SteeringSettings, edge: str) -> None:  # type: ignore[misc]
        """`edge` is the name of the edges' deployment."""
        context = serve.get_replica_context()
        self._app, self._edge = context.app_name, edge
        self._settings = settings = replace(settings, model=self._app)
        client = _get_global_client()
        assert client is not None, "Serve runs"
        self._controller: Any = client._controller
        self._steering = Steering(settings, await asyncio.to_thread(self._recall))
        self._status: ScalingStatus | None = None
        self._others: list[ModelAsk] = []
        self._wake = asyncio.Event()
        self._is_failing = False
        self._alive_at_s = time.monotonic()
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def report(self, signals: EdgeSignals) -> ScalingStatus | None:
        """An edge says what it sees; what there is and why comes back, once that is known."""
        if self._steering.learn(signals, time.monotonic()):
            self._wake.set()
        return self._status

    async def ask(self) -> ModelAsk:
        """For autoscalers of other models: what this one needs of the budget."""
        return self._steering.ask()

    async def check_health(self) -> None:
        """Raises when the loop has ended or stands still."""
        if self._loop.done() or time.monotonic() - self._alive_at_s > SILENT_S:
            raise RuntimeError("the autoscaler's loop stands still")

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT_S / 2):
                    await self._step()
                self._is_failing = False
            except Exception as error:  # the loop goes on whatever happens: what was not done is asked for again
                if not self._is_failing:
                    logger.warning("cannot scale for now: %s", error, exc_info=not isinstance(error, TimeoutError))
                self._is_failing = True
            self._alive_at_s = time.monotonic()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._settings.period_s)

    async def _step(self) -> None:
        counts = await self._counts()
        if self._settings.gpu_budget is not None:
            self._others = await self._ask_others()
        decision = self._steering.step(counts, time.monotonic(), wall_s=time.time(), others=self._others)
        self._status = self._steering.status(time.time())
        for one in decision.decided:
            logger.warning(
                "pool %s: %d -> %d replicas (%s): %s", one.pool, one.before, one.after, one.reason, one.sentence
            )
        for name, target in decision.targets.items():
            if target != counts[name].target:
                await self._controller.update_deployment_replicas.remote(DeploymentID(name, self._app), target)
        for change in decision.role_changes:
            await self._change_roles(change)
        memory = self._steering.take_memory()
        if memory is not None:
            await asyncio.to_thread(self._remember, memory)

    async def _counts(self) -> dict[str, PoolCounts]:
        counts = {}
        for pool in self._settings.pools:
            details = await self._controller.get_deployment_details.remote(self._app, pool.name)
            states = Counter(str(getattr(one.state, "value", one.state)) for one in details.replicas)
            num_ready, num_draining = states["RUNNING"], states["STOPPING"]
            num_starting = sum(states.values()) - num_ready - num_draining
            target = details.target_num_replicas
            # Serve may not have begun those it is to start.
            counts[pool.name] = PoolCounts(target, num_ready, max(num_starting, target - num_ready), num_draining)
        return counts

    async def _change_roles(self, change: RoleChange) -> None:
        edge = serve.get_deployment_handle(self._edge, self._app)
        await _apart(lambda: edge.change_roles.remote(change.pool, change.role, change.num_replicas))

    async def _ask_others(self) -> list[ModelAsk]:
        """Of the other applications on this Ray that have an autoscaler; of those that do not answer, the last word."""
        applications = await asyncio.to_thread(lambda: serve.status().applications)
        found, before = [], {ask.name: ask for ask in self._others}
        for name, application in applications.items():
            if name == self._app or DEPLOYMENT not in application.deployments:
                continue
            handle = serve.get_deployment_handle(DEPLOYMENT, name)
            try:
                asked = await _apart(lambda handle=handle: handle.ask.remote())
                found.append(replace(asked, name=name))
            except (RayError, RayServeException, TimeoutError):
                if name in before:
                    found.append(before[name])
        return found

    def _recall(self) -> Memory:
        kept = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        try:
            return msgspec.msgpack.decode(kept, type=Memory) if kept else Memory()
        except msgspec.DecodeError:  # of another version
            return Memory()

    def _remember(self, memory: Memory) -> None:
        internal_kv._internal_kv_put(self._key, msgspec.msgpack.encode(memory), namespace=NAMESPACE)

    @property
    def _key(self) -> bytes:
        return f"autoscaling:{self._app}".encode()


async def _apart(call: Any) -> Any:
    """The answer of a call to a deployment, in a context of its own: it belongs to no request that is under way."""

    async def ask() -> Any:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await call()

    return await asyncio.get_running_loop().create_task(ask(), context=contextvars.Context())
