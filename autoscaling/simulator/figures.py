"""What a run of an elastic fleet is judged by: attainment, GPU hours, times, scaling steps. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from manta.cluster.slo import Slo

from .elastic import ElasticRun, Served


@dataclass(frozen=True)
class ScalingFigures:
    """Times in seconds; NaN where nothing happened."""

    num_requests: int
    num_failed: int
    """Refused at the edge."""
    num_moved: int
    """Went on at another replica, computed again."""
    slo_attainment: float
    """Share of all requests that finished within the limits."""
    late_ttft: float
    """Share of all requests whose first token was late, or never came."""
    late_tpot: float
    """Share of those whose first token came in time and the others too slowly."""
    gpu_hours: float
    mean_gpus: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    prefix_hit_rate: float
    num_starts: int
    num_scaling_steps: int
    """Changes of a target."""
    num_reversals: int
    """Changes whose direction is another than that of the change before."""
    reversals_per_10_min: float
    num_role_changes: int
    simulated_s: float
    num_events: int


def scaling_figures(run: ElasticRun, slo: Slo, *, from_s: float = 0.0) -> ScalingFigures:
    """Requests that arrived before `from_s` are left out of shares and percentiles."""
    served = [one for one in run.served if one.request.arrival_s >= from_s]
    ttfts = [one.ttft_s for one in served if one.ttft_s is not None]
    tpots = [one.tpot_s for one in served if one.tpot_s is not None]
    late_ttft = sum(one.finished_s is None or not slo.is_ttft_met(one.ttft_s) for one in served)
    num_good = sum(is_good(one, slo) for one in served)
    num_steps = sum(len(changes) - 1 for changes in run.targets.values())
    num_reversals = sum(map(reversals, run.targets.values()))
    num_prompt_tokens = sum(one.request.num_prompt_tokens for one in served)
    return ScalingFigures(
        num_requests=len(served),
        num_failed=sum(one.is_failed for one in served),
        num_moved=sum(one.num_moves > 0 for one in served),
        slo_attainment=num_good / len(served),
        late_ttft=late_ttft / len(served),
        late_tpot=(len(served) - num_good - late_ttft) / len(served),
        gpu_hours=run.gpu_s / 3600,
        mean_gpus=run.gpu_s / run.end_s,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p95_s=percentile(ttfts, 95),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p95_s=percentile(tpots, 95),
        prefix_hit_rate=sum(one.num_cached for one in served) / num_prompt_tokens,
        num_starts=run.num_starts,
        num_scaling_steps=num_steps,
        num_reversals=num_reversals,
        reversals_per_10_min=num_reversals / (run.end_s / 600),
        num_role_changes=run.num_role_changes,
        simulated_s=run.end_s,
        num_events=run.num_events,
    )


def is_good(served: Served, slo: Slo) -> bool:
    """Whether it finished within the limits."""
    return served.finished_s is not None and slo.is_met(served.ttft_s, served.tpot_s)


def reversals(changes: Sequence[tuple[float, int]]) -> int:
    """How often a target began to fall after it had risen, or the other way round."""
    count = direction = 0
    for (_, before), (_, after) in pairwise(changes):
        new = (after > before) - (after < before)
        count += direction * new < 0
        direction = new or direction
    return count


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks, as numpy's default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
