"""Replicas that start, and how far they are: asked for only while some do. Knows no Ray: it is given the question."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .cluster_status import GangStatus

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class StartWatch:
    """`run` asks again and again while replicas start; `starting` is the last answer."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[list[GangStatus]]],
        *,
        is_needed: Callable[[], bool],
        period_s: float = PERIOD_S,
    ) -> None:
        """`ask` gives all gangs; what it raises is logged, and asked again."""
        self._ask, self._is_needed, self._period_s = ask, is_needed, period_s
        self._starting: list[dict[str, Any]] = []

    def starting(self) -> list[dict[str, Any]]:
        """As JSON: replica, pool, what it is at (`waiting` for room, `processes` or `engine`), and the phases of the
        engine that are over on its slowest rank, seconds."""
        return self._starting

    async def run(self) -> None:
        """For ever."""
        while True:
            found: list[dict[str, Any]] = []
            if self._is_needed():
                try:
                    found = [_describe(gang) for gang in await self._ask() if _starts(gang)]
                except Exception as error:  # the head is away for a moment: the next answer tells
                    logger.info("cannot ask which replicas start: %s", error)
                    found = self._starting
            self._starting = found
            await asyncio.sleep(self._period_s)


def _starts(gang: GangStatus) -> bool:
    return gang.state == "waiting" or any(rank.state in ("starting", "absent") for rank in gang.ranks)


def _stage(gang: GangStatus) -> str:
    """Processes start before the engine in them does."""
    return "processes" if any(rank.state == "absent" for rank in gang.ranks) else "engine"


def _describe(gang: GangStatus) -> dict[str, Any]:
    known = [rank.phases_s for rank in gang.ranks]
    return {
        "replica_id": gang.replica_id,
        "pool": gang.pool,
        "state": gang.state if gang.state == "waiting" else _stage(gang),
        "phases_s": min(known, key=len) if known else {},
    }
