"""What the policy is told once: objective, times, reserves. Knows no fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from .capacity import Work
from .slo import Slo

USUAL_WORK = Work(num_new_tokens=1024.0, num_prompt_tokens=1024.0, num_output_tokens=256.0)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Seconds and shares. The defaults hold for replicas that start within a minute or so."""

    slo: Slo
    cold_start_s: float = 30.0
    """Expected, until starts were measured."""
    quiet_s: float = 120.0
    """So long fewer replicas must have been enough before some stop; longer where that was regretted (damping.py)."""
    burst_window: float = 0.5
    """Of `quiet_s`: the window of what came for a burst that lasted, as long as no fall was regretted."""
    to_zero_s: float = 300.0
    """So long no request must have come before the last stops, where a pool may go to zero."""
    headroom: float = 1.05
    """Of the expected rate, replicas are provided for so many times it, while nothing of the error budget is saved."""
    down_margin: float = 1.1
    """Replicas stop when so many times that would still be held: load near a threshold changes nothing; likewise."""
    drain_backlog_s: float = 10.0
    """A backlog is to be worked off in so long."""
    breach_s: float = 60.0
    """Window over which lateness is looked at."""
    least_outcomes: int = 20
    """Requests that must have ended in it before lateness says anything."""
    usual: Work = field(default=USUAL_WORK)
    """A mean request, before any was seen."""
