"""Tells an edge what engine replicas wait for that have no room here. Knows no Ray: it is given the question."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 2.0


class RoomWatch:
    """`run` asks again and again, in a thread of its own, for as long as replicas are fewer than they should be."""

    def __init__(
        self,
        ask: Callable[[], str | None],
        *,
        is_needed: Callable[[], bool],
        tell: Callable[[str | None], None],
        period_s: float = PERIOD_S,
    ) -> None:
        """`ask` may block and raise; `tell` is given each answer: what is missing, or None."""
        self._ask = ask
        self._is_needed = is_needed
        self._tell = tell
        self._period_s = period_s
        self._last: str | None = None

    async def run(self) -> None:
        """For ever; a question that fails is logged and asked again."""
        while True:
            missing = None
            if self._is_needed():
                try:
                    missing = await asyncio.to_thread(self._ask)
                except Exception as error:  # the head is away for a moment: the next answer tells
                    logger.info("cannot ask what replicas wait for: %s", error)
                    missing = self._last
            if missing is not None and missing != self._last:
                logger.warning("an engine replica cannot be placed: it %s", missing)
            self._last = missing
            self._tell(missing)
            await asyncio.sleep(self._period_s)
