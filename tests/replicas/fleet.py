"""Engines in this process behind a router, as an edge has them. For tests only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from manta.cluster.routing.roles import Role
from manta.engine.stats import EngineInfo
from manta.replicas.channel import Address, ChannelLost, KeyPair
from manta.replicas.edge.router import ChannelRouter, RouterLimits
from manta.replicas.engine_loop import Core
from manta.replicas.metrics import EdgeMetrics
from tests.replicas.engines import INFO, Engine, engine

KEYS = KeyPair.new()


class Fleet:
    """Engines by name, and a directory of them."""

    def __init__(self, stack: AsyncExitStack, limits: RouterLimits) -> None:
        self._stack = stack
        self.engines: dict[str, Engine] = {}
        self.addresses: dict[str, Address] = {}
        """Engines that run elsewhere."""
        self.held: list[str] = []
        """Replicas for which the router accounts, once a request."""
        self.router = ChannelRouter(self, edge_id="edge", keys=KEYS, limits=limits, metrics=EdgeMetrics("edge"))

    async def locate(self, replica_id: str) -> Address:
        if replica_id in self.addresses:
            return self.addresses[replica_id]
        if replica_id not in self.engines:
            raise ChannelLost("it does not answer yet")
        return self.engines[replica_id].server.address

    def hold(self, replica_id: str) -> Callable[[], None]:
        self.held.append(replica_id)
        return lambda: self.held.remove(replica_id)

    def start(self, name: str, core: Core, info: EngineInfo = INFO, *, role: Role = Role.MIXED) -> Engine:
        running = engine(core, KEYS.public, name=name, info=info, role=role)
        one = self.engines[name] = self._stack.enter_context(running)
        return one

    async def ready(self, *names: str) -> None:
        """Tell the router these members, and wait until it has them all."""
        self.router.set_members(names)
        await become_true(lambda: sum(status.ready for status in self.router.replicas()) == len(names))


@asynccontextmanager
async def fleet(**limits: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        one = Fleet(stack, RouterLimits(**limits))
        try:
            yield one
        finally:
            await one.router.close()


async def become_true(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "it did not become true in time"
        await asyncio.sleep(0.005)
