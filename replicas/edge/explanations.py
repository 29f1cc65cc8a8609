"""How requests were routed, kept for a while so that somebody may ask. Knows no HTTP, no channel and no clock.

An explanation holds every decision about one sequence: when it was made, who was considered with which costs, what was
chosen or why nothing was, and what came of it. How many are kept depends on how many candidates they name.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from manta.cluster.routing.decision import Considered, CostTerms, Decision, NoRoom

MAX_CANDIDATES = 32768
"""Of all decisions together: about 16 MB."""


@dataclass
class Explained:
    """One decision, and what came of it. Times in seconds."""

    decided_at_s: float
    """Seconds since the epoch."""
    waited_s: float
    """In the edge, before."""
    decision: Decision | NoRoom
    num_candidates: int
    actual_s: float | None = None
    """From the decision to the first token that came of it."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine found in its cache."""
    outcome: str = "open"
    """How it ended: `finished`, `cancelled`, or a sentence about what went wrong."""

    def tree(self) -> dict[str, Any]:
        """As JSON."""
        decision = self.decision
        tree: dict[str, Any] = {
            "decided_at_s": round(self.decided_at_s, 3),
            "waited_s": round(self.waited_s, 6),
            "reason": decision.reason,
            "outcome": self.outcome,
            "num_cached_tokens": self.num_cached_tokens,
            "actual_s": self.actual_s,
        }
        if isinstance(decision, Decision):
            tree |= {
                "replica_id": decision.replica_id,
                "prefill_replica_id": decision.prefill_replica_id,
                "estimate": None if decision.is_by_load else _terms(decision.estimate),
            }
        else:
            tree |= {"replica_id": None, "prefill_replica_id": None, "estimated_wait_s": decision.estimated_wait_s}
        tree["candidates"] = [_candidate(one) for one in decision.considered]
        return tree


@dataclass
class _Kept:
    """All about one response."""

    decisions: dict[str, list[Explained]] = field(default_factory=dict)
    """By the id of the sequence."""
    num_candidates: int = 0


class Explanations:
    """The newest ones. One event loop owns it."""

    def __init__(self, *, max_candidates: int = MAX_CANDIDATES) -> None:
        self._max_candidates = max_candidates
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_candidates = 0

    @property
    def num_responses(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, explained: Explained) -> None:
        """A decision about the sequence `request_id` ("<response id>-<index>"). The oldest are forgotten for it."""
        response_id = _response_id(request_id)
        kept = self._kept.setdefault(response_id, _Kept())
        kept.decisions.setdefault(request_id, []).append(explained)
        num_candidates = 1 + explained.num_candidates
        kept.num_candidates += num_candidates
        self._num_candidates += num_candidates
        while self._num_candidates > self._max_candidates and len(self._kept) > 1:
            self._num_candidates -= self._kept.popitem(last=False)[1].num_candidates

    def find(self, request_id: str) -> dict[str, Any] | None:
        """Of a response, or of one of its sequences, as JSON; None when nothing is known of it (any more)."""
        kept = self._kept.get(request_id)
        wanted = None if kept is None else kept.decisions
        if kept is None and (kept := self._kept.get(_response_id(request_id))) is not None:
            wanted = {own: decisions for own, decisions in kept.decisions.items() if own == request_id}
        if not wanted:
            return None
        sequences = [
            {"sequence_id": own, "decisions": [explained.tree() for explained in decisions]}
            for own, decisions in wanted.items()
        ]
        return {"request_id": request_id, "sequences": sequences}


def _response_id(request_id: str) -> str:
    return request_id.rpartition("-")[0] or request_id


def _candidate(one: Considered) -> dict[str, Any]:
    return {
        "replica_id": one.replica_id,
        "prefill_replica_id": one.prefill_replica_id,
        "rejected": one.rejected,
        "terms": None if one.terms is None else _terms(one.terms),
        "num_requests": one.num_requests,
        "noise_s": round(one.noise_s, 6),
    }


def _terms(terms: CostTerms) -> dict[str, float]:
    seconds = (
        "queue_s",
        "prefill_s",
        "first_token_s",
        "transfer_s",
        "decode_s",
        "interference_s",
        "affinity_s",
        "total_s",
    )
    return {"num_cached_tokens": terms.num_cached_tokens, **{name: round(getattr(terms, name), 6) for name in seconds}}
