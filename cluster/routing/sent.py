"""Requests that one router sent to a replica and that have not begun, with their sums. Knows no load but theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Sent:
    """One of them."""

    num_new_tokens: int
    num_context_tokens: int
    num_pairs: int
    sent_at_s: float
    estimate_s: float
    """Before it was corrected by what was observed."""
    expected_s: float
    """The estimate as it was made."""
    at_snapshot: int


class SentRequests:
    """By request id."""

    __slots__ = ("num_context_tokens", "num_new_tokens", "num_pairs", "requests")

    def __init__(self) -> None:
        self.requests: dict[str, Sent] = {}
        self.num_new_tokens = self.num_context_tokens = self.num_pairs = 0

    def add(self, request_id: str, sent: Sent) -> None:
        self.requests[request_id] = sent
        self.num_new_tokens += sent.num_new_tokens
        self.num_context_tokens += sent.num_context_tokens
        self.num_pairs += sent.num_pairs

    def pop(self, request_id: str) -> Sent | None:
        sent = self.requests.pop(request_id, None)
        if sent is not None:
            self.num_new_tokens -= sent.num_new_tokens
            self.num_context_tokens -= sent.num_context_tokens
            self.num_pairs -= sent.num_pairs
        return sent
