"""What an edge counts for scaling: arrivals, answers, and which of those kept the objective. Knows no replica."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from manta.cluster.scaling import Counters
from manta.cluster.slo import Slo
from manta.engine.request import FinishReason

from .client import RequestRecord

LOAD_REFUSALS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INTERNAL_SERVER_ERROR)
"""Answers that are the service's failure; others are for what the sender must change."""


@dataclass
class ScalingLedger:
    """The numbers of cluster/scaling.py's Counters, as they rise. Implements RequestObserver."""

    slo: Slo
    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0
    num_output_tokens: int = 0
    num_good: int = 0
    num_late_ttft: int = 0
    num_late_tpot: int = 0
    num_failed: int = 0

    def sequence_arrived(self, num_prompt_tokens: int) -> None:
        """One asks to be generated."""
        self.num_arrived += 1
        self.num_prompt_tokens += num_prompt_tokens

    def sequence_began(self, num_cached_tokens: int) -> None:
        """Its first token came, and so much of its prompt was cached."""
        self.num_cached_tokens += num_cached_tokens

    def request_finished(self, record: RequestRecord) -> None:
        """All its choices are over. Those that the client gave up count as nothing."""
        for choice in record.choices:
            if choice.finish_reason is FinishReason.CANCELLED:
                continue
            if choice.finish_reason is FinishReason.ERROR:
                self.num_failed += 1
                continue
            ttft_s, tpot_s = choice.time_to_first_token_s, choice.time_per_output_token_s
            self.num_finished += 1
            self.num_output_tokens += choice.num_completion_tokens
            if not self.slo.is_ttft_met(ttft_s):
                self.num_late_ttft += 1
            elif not self.slo.is_tpot_met(tpot_s):
                self.num_late_tpot += 1
            else:
                self.num_good += 1

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        """A request was answered with an error; it counts when that is the service's fault."""
        if status in LOAD_REFUSALS:
            self.num_failed += 1

    def counters(self) -> Counters:
        """As they stand."""
        return Counters(**{name: getattr(self, name) for name in Counters.__struct_fields__})
