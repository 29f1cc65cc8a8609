"""The objective: how soon the first token, how fast the others, for which share of requests. Pure; knows no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slo:
    """Limits a request must keep, and the share of requests that must keep them. Times in seconds."""

    ttft_s: float | None = None
    """Arrival to first token; None: any time is fine."""
    tpot_s: float | None = None
    """Mean gap between the tokens after the first; None: any is fine."""
    percentile: float = 95.0
    """At which the planner holds each limit by itself."""
    target: float = 0.99
    """Share of requests that keep both limits."""

    def __post_init__(self) -> None:
        """Raises ValueError for limits that nothing keeps."""
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if value is not None and not value > 0:
                raise ValueError(f"slo.{name} = {value}: give seconds above 0, or leave it out")
        if not 0 < self.percentile < 100:
            raise ValueError(f"slo.percentile = {self.percentile}: give one between 0 and 100, as 95")
        if not 0 < self.target < 1:
            raise ValueError(f"slo.target = {self.target}: give a share between 0 and 1, as 0.99")

    def is_met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether a request that finished kept the limits. `tpot_s` is None for answers of one token."""
        return self.is_ttft_met(ttft_s) and self.is_tpot_met(tpot_s)

    def is_ttft_met(self, ttft_s: float | None) -> bool:
        """Whether the first token came in time; one that never came did not."""
        return self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s)

    def is_tpot_met(self, tpot_s: float | None) -> bool:
        """Whether the tokens after the first came fast enough; without any there is nothing to be late."""
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s
