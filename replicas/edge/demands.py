"""Divides the tenants' limits over the edges by need: tells engines what is asked of this edge, learns of the others.

Every engine passes on what edges tell it, so two of them are enough; all edges pick the same two. Knows no limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from .links import Links

INTERVAL_S = 1.0
NUM_RELAYS = 2
MAX_AGE_S = 5.0
"""An edge of which nothing was heard for so long asks for nothing any more."""


class Limits(Protocol):
    """What divides limits."""

    def demands(self) -> dict[str, float]:
        """Asked of this edge, tokens a second by limited tenant; empty when none is limited."""
        ...

    def divide_limits(self, edge_id: str, others: Mapping[str, Mapping[str, float]]) -> None: ...


class DemandExchange:
    """Runs until `close`, when any tenant is limited."""

    def __init__(self, limits: Limits, links: Links, *, edge_id: str) -> None:
        self._limits = limits
        self._links = links
        self._edge_id = edge_id
        self._others: dict[str, tuple[float, dict[str, float]]] = {}
        """By edge: when it was heard of, and what is asked of it."""
        self._heard_any = False
        """Until then limits stay evenly divided."""
        self._task = asyncio.get_running_loop().create_task(self._run()) if limits.demands() else None

    def learn(self, demands: Mapping[str, dict[str, float]]) -> None:
        """What an engine passed on."""
        now_s, self._heard_any = time.monotonic(), True
        for edge_id, demand in demands.items():
            self._others[edge_id] = now_s, demand

    def close(self) -> None:
        """Tell nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            ready = sorted((link for link in self._links if link.is_ready), key=lambda link: link.replica_id)
            for link in ready[:NUM_RELAYS]:
                assert link.channel is not None
                link.channel.tell_demand(self._limits.demands())
            now_s = time.monotonic()
            self._others = {edge: heard for edge, heard in self._others.items() if now_s - heard[0] < MAX_AGE_S}
            if self._heard_any:
                self._limits.divide_limits(self._edge_id, {edge: demand for edge, (_, demand) in self._others.items()})
