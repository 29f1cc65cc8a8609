"""Which replica takes a request: the one with the least work. Pure: candidates in, a choice and its reason out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A replica that takes new work, as one edge sees it."""

    replica_id: str
    num_requests: int
    """Requests that run or wait there, those included that this edge has just sent."""
    max_requests: int
    """How many may run or wait there."""


@dataclass(frozen=True)
class Choice:
    """A replica, and why it was chosen."""

    replica_id: str
    reason: str


def choose(candidates: Sequence[Candidate]) -> Choice | None:
    """The replica with the fewest requests (the first of equals), or None when all are full."""
    free = [candidate for candidate in candidates if candidate.num_requests < candidate.max_requests]
    if not free:
        return None
    best = min(free, key=lambda candidate: candidate.num_requests)
    reason = f"fewest requests ({best.num_requests} of {best.max_requests}) among {len(free)} free replicas"
    return Choice(best.replica_id, reason)
