"""How many late requests the objective still allows: what a wrong guess may cost. Pure; knows no clock.

An objective of 99 % is a budget: of all requests of the last half hour one in a hundred may be late. Replicas that
keep it unspent are more than the objective asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from .signals import Counters
from .slo import Slo

MEMORY_S = 1800.0
"""After so long, what was spent or saved counts by a third."""
MISTAKE_LATE = 0.1
"""Of the requests that come until another replica is there, those that a fleet that is one too small makes late."""


@dataclass(frozen=True, kw_only=True)
class ErrorBudget:
    """A value; `learn` gives the next one. It begins with nothing saved."""

    num_ended: float = 0.0
    """Faded, as `num_late`."""
    num_late: float = 0.0
    at_s: float | None = None
    counters: Counters = field(default_factory=Counters)

    def learn(self, counters: Counters, now_s: float) -> ErrorBudget:
        """After one more look."""
        if self.at_s is None:
            return replace(self, at_s=now_s, counters=counters)
        new, kept = counters.plus(self.counters, sign=-1), math.exp(-max(now_s - self.at_s, 0.0) / MEMORY_S)
        num_ended = new.num_finished + new.num_failed
        return ErrorBudget(
            num_ended=kept * self.num_ended + num_ended,
            num_late=kept * self.num_late + num_ended - new.num_good,
            at_s=now_s,
            counters=counters,
        )

    def left(self, slo: Slo) -> float:
        """Requests that may be late and the objective is still kept; below 0: it is not."""
        return (1 - slo.target) * self.num_ended - self.num_late

    def share(self, slo: Slo, rate: float, cold_start_s: float) -> float:
        """Of what one wrong guess costs at `rate` requests/s, the part that is left: 0 to 1."""
        mistake = MISTAKE_LATE * rate * cold_start_s
        return min(max(self.left(slo) / mistake, 0.0), 1.0) if mistake > 0 else 0.0
