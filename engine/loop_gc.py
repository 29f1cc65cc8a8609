"""Python's garbage collection beside a step loop: in its pauses, not in its steps. Knows no engine.

Reference counts free nearly everything that a step leaves behind; the collector, which looks for cycles, would stop
some steps for milliseconds. So it runs when there is no work, and every MAX_STEPS in an engine that is never without.
"""

from __future__ import annotations

import gc
import logging
import time
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

MAX_STEPS = 20_000
"""Steps without a pause after which a collection happens all the same: some minutes."""


class LoopGc:
    """While entered, collections happen in `step_done` and `pause` only. One for a process; not reentrant.

    `freezes`: what exists at the entry is collected once and then left out of all collections, for loops that last.
    """

    def __init__(self, *, max_steps: int = MAX_STEPS, freezes: bool = True) -> None:
        self._max_steps = max_steps
        self._freezes = freezes
        self._was_enabled = True
        self._num_steps = 0
        self.num_forced = 0
        """Collections between two steps, for want of a pause."""
        self.longest_forced_s = 0.0

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self._freezes:
            gc.collect()
            gc.freeze()  # what start-up made lives on; collections need not look at it again
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_enabled:
            gc.enable()
        if self._freezes:
            gc.unfreeze()

    def step_done(self) -> None:
        """After each step."""
        self._num_steps += 1
        if self._num_steps < self._max_steps:
            return
        start_s = time.monotonic()
        self._collect()
        seconds = time.monotonic() - start_s
        self.num_forced += 1
        self.longest_forced_s = max(self.longest_forced_s, seconds)
        logger.info("garbage collection between two steps: %.1f ms", seconds * 1e3)

    def pause(self) -> None:
        """There is nothing to do. Collects if there were steps since the last time."""
        if self._num_steps:
            self._collect()

    def _collect(self) -> None:
        self._num_steps = 0
        gc.collect()
