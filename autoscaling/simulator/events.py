"""The virtual clock: actions in the order of their times. Knows nothing of what they do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

STEP_ENDS, ARRIVES, AFTERWARDS = 0, 1, 2
"""Order of what happens at the same moment: a step's results are known before a request comes, and an idle replica
begins a step when all that came at that moment is there."""


class EventQueue:
    """Time passes from event to event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.num_events = 0

    def at(self, time_s: float, action: Callable[[], None], *, order: int = AFTERWARDS) -> None:
        """Run `action` at `time_s`, which is not in the past."""
        assert time_s >= self.now_s, "time does not run backwards"
        heapq.heappush(self._heap, (time_s, order, next(self._order), action))

    def run(self, until_s: float = float("inf")) -> None:
        """Everything up to `until_s`, or all there is."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, _, action = heapq.heappop(heap)
            self.num_events += 1
            action()
