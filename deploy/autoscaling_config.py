"""Configuration of the objective and of how the number of replicas follows it. Knows no engine and no Ray."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from manta.autoscaling.policy_settings import PolicySettings
from manta.cluster.slo import Slo
from manta.engine.config import Section

USUAL_QUIET_S = 120.0
LEAST_BREACH_S, MOST_BREACH_S = 10.0, 60.0
"""Bounds of the window over which lateness is looked at; between them it is the quiet one."""


class SloConfig(Section):
    """What clients are promised. Requests are counted against it with or without autoscaling."""

    ttft_s: float | None = Field(default=None, gt=0, description="arrival to first token, seconds; default: any")
    tpot_s: float | None = Field(
        default=None, gt=0, description="mean gap between the tokens after the first, seconds; default: any"
    )
    target: float = Field(default=0.99, gt=0, lt=1, description="share of requests that keep both limits")
    percentile: float = Field(default=95.0, gt=0, lt=100, description="at which `manta plan` holds each limit")

    def slo(self) -> Slo:
        """As the rest of the system knows it."""
        return Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s, target=self.target, percentile=self.percentile)


class AutoscalingConfig(Section):
    """How many replicas there may be, and how soon their number changes."""

    enabled: bool = Field(default=False, description="whether the number of replicas follows load and objective")
    min_replicas: int = Field(default=1, ge=0, description="of each pool; 0: the last one stops when nothing comes")
    max_replicas: int = Field(default=8, ge=1, description="of each pool")
    gpu_budget: float | None = Field(
        default=None, gt=0, description="GPUs of all models on this Ray together; default: as many as there are"
    )
    gpus_per_replica: float | None = Field(
        default=None,
        gt=0,
        description="what a replica counts for in the budget; default: its ranks' GPUs, one a rank where it uses none",
    )
    period_s: float = Field(default=1.0, gt=0, description="from decision to decision")
    cold_start_s: float = Field(
        default=30.0, gt=0, description="from decision to a replica's first request, until that was measured"
    )
    quiet_s: float | None = Field(
        default=None,
        ge=0,
        description="so long fewer must have been enough before some stop; default: 120 s, or 60 s for what came for "
        "a burst that lasted, until one came back",
    )
    to_zero_s: float = Field(default=300.0, gt=0, description="so long no request came before the last one stops")
    headroom: float = Field(
        default=1.05,
        ge=0.5,
        le=5,
        description="replicas are provided for so many times the rate, and for less where the error budget pays for it",
    )

    @field_validator("max_replicas")
    @classmethod
    def limits_in_order(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min_replicas", 0)
        if least > value:
            raise ValueError(f"must be at least min_replicas, which is {least}: raise one or lower the other")
        return value

    def policy_settings(self, slo: Slo) -> PolicySettings:
        """For the policy."""
        quiet_s = USUAL_QUIET_S if self.quiet_s is None else self.quiet_s
        return PolicySettings(
            slo=slo,
            cold_start_s=self.cold_start_s,
            quiet_s=quiet_s,
            burst_window=PolicySettings.burst_window if self.quiet_s is None else 1.0,
            to_zero_s=self.to_zero_s,
            breach_s=min(max(quiet_s, LEAST_BREACH_S), MOST_BREACH_S),
            headroom=self.headroom,
        )
