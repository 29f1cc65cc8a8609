"""From times of single requests to medians, percentiles, throughput and goodput. Knows no clock, engine or HTTP."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from manta.engine.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. `values` need no order; NaN when there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


@dataclass(frozen=True)
class Summary:
    """A distribution in five numbers, in the unit of its values."""

    count: int
    median: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        listed = sorted(values)
        return cls(len(listed), *(percentile(listed, percent) for percent in PERCENTILES))

    def figures(self, name: str, unit: str = "ms", scale: float = 1e3) -> dict[str, float]:
        """{name_median_ms: ...} and so on; nothing when there were no values."""
        if not self.count:
            return {}
        parts = {"median": self.median, "p90": self.p90, "p95": self.p95, "p99": self.p99}
        return {f"{name}_{part}_{unit}": value * scale for part, value in parts.items()}


@dataclass
class RequestRecord:
    """What happened to one request. Times in seconds on one clock."""

    due_s: float
    """When it should have been sent: a late client counts against the server's latency, not in its favour."""
    num_prompt_tokens: int
    num_expected_tokens: int
    arrivals_s: list[float] = field(default_factory=list)
    """When output arrived; one entry for each arrival, which may carry several tokens."""
    started_s: float | None = None
    """When the engine first worked on it, where that can be seen."""
    num_output_tokens: int = 0
    num_events: int = 0
    """Messages that brought output, where it comes as messages: fewer than tokens when text was held back."""
    token_ids: list[int] = field(default_factory=list)
    """The output, where the measurement sees ids."""
    finished_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    """A short kind, such as `http_429` or `short`; None when all was well."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.finished_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if not self.arrivals_s or self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: times between arrivals."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.due_s

    @property
    def queue_s(self) -> float | None:
        return None if self.started_s is None else self.started_s - self.due_s


@dataclass(frozen=True)
class Slo:
    """Limits in seconds that a good request keeps; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `ttft=0.9,tpot=0.045` (seconds). Raises ConfigError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                limits[f"{name.strip()}_s"] = float(value)
            except ValueError:
                limits = {}
                break
        if not limits or set(limits) - {"ttft_s", "tpot_s", "e2e_s"} or min(limits.values()) <= 0:
            raise ConfigError(f"--slo {text!r}: write seconds, as in ttft=0.9,tpot=0.045 (also e2e)")
        return cls(**limits)

    def is_met(self, record: RequestRecord) -> bool:
        pairs = ((self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s), (self.e2e_s, record.e2e_s))
        return record.ok and all(limit is None or value is None or value <= limit for limit, value in pairs)

    def is_met_at_p95(self, result: LoadResult) -> bool:
        """Whether the run as a whole keeps the limits at p95 and no request failed."""
        pairs = (
            (self.ttft_s, result.ttft.p95),
            (self.tpot_s, result.tpot.p95),
            (self.e2e_s, result.e2e.p95),
        )
        return not result.errors and all(limit is None or not value > limit for limit, value in pairs)


@dataclass(frozen=True)
class LoadResult:
    """One run of many requests. Throughput counts what succeeded, over the time from first due to last finish."""

    num_requests: int
    duration_s: float
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary
    queue: Summary
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    """Requests a second that kept the SLO; None without an SLO."""
    errors: dict[str, int]

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Name -> number, the unit in the name."""
        flat = {
            "requests": float(self.num_requests),
            "duration_s": self.duration_s,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "errors": float(sum(self.errors.values())),
        }
        if self.goodput_per_s is not None:
            flat["goodput_requests_per_s"] = self.goodput_per_s
        for name in ("ttft", "tpot", "itl", "e2e", "queue"):
            flat |= getattr(self, name).figures(name)
        return {prefix + name: value for name, value in flat.items()}


def summarize(records: Sequence[RequestRecord], slo: Slo | None = None) -> LoadResult:
    """Percentiles over the requests that succeeded; errors counted by kind."""
    good = [record for record in records if record.ok]
    ends = [record.finished_s for record in records if record.finished_s is not None]
    duration_s = max(ends) - min(record.due_s for record in records) if ends else math.nan
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)

    def per_second(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return LoadResult(
        num_requests=len(records),
        duration_s=duration_s,
        ttft=Summary.of(record.ttft_s for record in good if record.ttft_s is not None),
        tpot=Summary.of(record.tpot_s for record in good if record.tpot_s is not None),
        itl=Summary.of(gap for record in good for gap in record.gaps_s),
        e2e=Summary.of(record.e2e_s for record in good if record.e2e_s is not None),
        queue=Summary.of(record.queue_s for record in good if record.queue_s is not None),
        requests_per_s=per_second(len(good)),
        output_tokens_per_s=per_second(output_tokens),
        total_tokens_per_s=per_second(prompt_tokens + output_tokens),
        goodput_per_s=None if slo is None else per_second(sum(slo.is_met(record) for record in good)),
        errors=dict(Counter(record.error or "unfinished" for record in records if not record.ok)),
    )
