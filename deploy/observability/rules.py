"""Alert rules as plain data, and as Prometheus's rule file. Pure; knows no Grafana.

Burn rates as in "The Site Reliability Workbook", chapter 5: how many times faster than allowed the error budget goes,
over a long window and a short one at once, so that an alert begins soon and ends soon.
"""

# ruff: noqa: E501  (an expression is a line)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .queries import increase, mean, mean_of, metrics_in, now, rate
from .queries import with_values as filled


@dataclass(frozen=True)
class Alert:
    """Fires when the expression has been beyond the limit for so long."""

    uid: str
    title: str
    expression: str
    comparison: Literal[">", "<"]
    limit: float
    for_s: int
    severity: Literal["page", "ticket"]
    summary: str
    advice: str
    """What to look at or to do."""

    @property
    def metrics(self) -> list[str]:
        """The table's metrics that it looks at."""
        return metrics_in(self.expression)


def _burn(window: str) -> str:
    """How many times faster than allowed the error budget went."""
    good = increase("manta_slo_requests_total", match='outcome="met"', window=window)
    every = increase("manta_slo_requests_total", window=window)
    return f'((1 - {good} / ({every} > 0)) / (1 - max(manta_slo_target_ratio{{job=~"$job"}})))'


def _least(one: str, other: str) -> str:
    return f"({one} < {other}) or {other}"


_READY = now("manta_scaling_replicas", match='state="ready"')
_DESIRED = now("manta_scaling_desired_replicas")

ALERTS = (
    Alert(
        "manta-slo-fast-burn", "SLO: the error budget goes fast", _least(_burn("1h"), _burn("5m")), ">", 14.4, 120, "page",
        "Requests miss the objective 14.4 times as often as allowed: two per cent of a month's budget in an hour.",
        "Look at the dashboard Manta: overview for which limit is missed, then at Manta: autoscaling for what holds replicas back.",
    ),
    Alert(
        "manta-slo-slow-burn", "SLO: the error budget goes steadily", _least(_burn("6h"), _burn("30m")), ">", 6, 900, "ticket",
        "Requests miss the objective 6 times as often as allowed, for hours.",
        "More replicas, another split or other limits are needed: `manta plan` says which.",
    ),
    Alert(
        "manta-no-replica", "No replica is ready", f"({_DESIRED} > bool 0) * ({_READY} == bool 0)", ">", 0, 120, "page",
        "Replicas are wanted and none takes work: requests wait or get 503.",
        "`manta status` says what each replica waits for; `manta logs` what its ranks wrote.",
    ),
    Alert(
        "manta-replicas-missing", "Fewer replicas than wanted", f"{_DESIRED} - {_READY}", ">", 0, 900, "ticket",
        "For a quarter of an hour fewer replicas are ready than the autoscaler wants.",
        "`manta status` says whether they lack room in the cluster, or do not start.",
    ),
    Alert(
        "manta-budget-spent", "The GPU budget holds scaling back",
        increase("manta_scaling_decisions_total", match='reason="budget"', window="30m"), ">", 0, 300, "ticket",
        "The autoscaler wants more GPUs than autoscaling.gpu_budget allows.",
        "Raise the budget, or accept that requests are late; `manta plan` says what would be enough.",
    ),
    Alert(
        "manta-kv-full", "The KV cache is full", mean_of("manta_kv_cache_usage"), ">", 0.95, 600, "ticket",
        "Sequences hold nearly all blocks: others wait or are computed again.",
        "More decode replicas, an 8-bit KV cache or fewer sequences a replica; manta_preemptions_total says what it costs.",
    ),
    Alert(
        "manta-step-model-off", "Steps are slower than predicted",
        f"({mean('manta_step_seconds', window='15m')}) / ({mean('manta_step_predicted_seconds', window='15m')})", ">", 1.5, 900, "ticket",
        "Steps take half as long again as the step-time model says: routing, admission and scaling decide by wrong numbers.",
        "Record a profile on this hardware with `manta profile`, or look for what else uses the machine.",
    ),
    Alert(
        "manta-kv-recomputed", "KV of prompts does not arrive",
        f"{rate('manta_kv_recomputed_total', window='15m')} / ({rate('manta_kv_recomputed_total', window='15m')} + {rate('manta_kv_received_total', window='15m')} > 0)", ">", 0.1, 600, "ticket",
        "More than a tenth of the prompts that prefill replicas computed are computed again by decode replicas.",
        "Look at the network between the pools, and at Manta: prefill and decode pools.",
    ),
    Alert(
        "manta-replicas-lost", "Replicas are lost", increase("manta_replicas_lost_total", window="15m"), ">", 2, 0, "ticket",
        "Three or more channels to replicas broke in a quarter of an hour.",
        "`manta logs` shows what their ranks wrote; streams went on elsewhere (manta_requests_moved_total).",
    ),
)  # fmt: skip

GROUP = "manta"
INTERVAL_S = 60


def prometheus_rules(job: str = ".+") -> dict[str, Any]:
    """The content of a rule file, with `manta:*` recordings of attainment and burn rates beside the alerts."""
    recordings = [
        {"record": f"manta:slo_burn:ratio_{window}", "expr": filled(_burn(window), window="5m", job=job)}
        for window in ("5m", "30m", "1h", "6h")
    ]
    alerts = [
        {
            "alert": "".join(word.capitalize() for word in alert.uid.split("-")),
            "expr": f"{_braced(filled(alert.expression, window='5m', job=job))} {alert.comparison} {alert.limit:g}",
            "for": f"{alert.for_s}s",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.advice},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": GROUP, "interval": f"{INTERVAL_S}s", "rules": [*recordings, *alerts]}]}


def _braced(expression: str) -> str:
    return f"({expression})"
