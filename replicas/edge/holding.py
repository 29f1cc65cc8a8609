"""Requests that came before any replica was ever there: they wait here, bounded, until one is. Knows no replica.

An edge can neither tokenize for nor check a request against an engine of which it knows nothing. Once it has seen one,
requests wait in the gate instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from manta.engine.errors import Overloaded, Unavailable


class Holding:
    """Belongs to one event loop. `open` lets all go that wait."""

    def __init__(self, *, max_held: int, max_wait_s: float, is_open: Callable[[], bool]) -> None:
        """`is_open`: whether an engine is known."""
        self._max_held, self._max_wait_s = max_held, max_wait_s
        self._is_open = is_open
        self._opened = asyncio.Event()
        self.num_held = 0

    def open(self) -> None:
        """An engine is known from now on."""
        self._opened.set()

    async def wait(self) -> None:
        """Until an engine is known. Raises Overloaded when too many wait already, Unavailable when none comes."""
        if self._is_open():
            return
        if self.num_held >= self._max_held:
            raise Overloaded(
                f"No replica runs, and {self.num_held} requests wait for one already; try again later.",
                retry_after_s=5.0,
            )
        self.num_held += 1
        try:
            await asyncio.wait_for(self._opened.wait(), self._max_wait_s)
        except TimeoutError:
            raise Unavailable(f"No replica became ready within {self._max_wait_s:g} s.", retry_after_s=5.0) from None
        finally:
            self.num_held -= 1
