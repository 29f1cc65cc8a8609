"""What edges know of scaling, of the objective and of cost, as metrics. Knows no policy and no clock of its own.

Without an autoscaler, what is configured is what is desired; replicas are counted all the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manta.cluster.scaling import ReasonCode, ScalingStatus
from manta.cluster.slo import Slo
from manta.cluster.spec import PoolSpec

from .metrics_table import BY_NAME

COST_WINDOW_S = 300.0
"""Over which the price of tokens is worked out."""


class Usage(NamedTuple):
    """What was used up to a moment."""

    at_s: float
    gpu_s: float
    num_tokens: float


class CostMeter:
    """GPU seconds, and what a million generated tokens cost lately. Pure: it is told the time."""

    def __init__(self, dollars_per_gpu_hour: float | None) -> None:
        self._dollars_per_gpu_s = None if dollars_per_gpu_hour is None else dollars_per_gpu_hour / 3600
        self._used: deque[Usage] = deque()

    @property
    def gpu_s(self) -> float:
        """GPU seconds so far."""
        return self._used[-1].gpu_s if self._used else 0.0

    def learn(self, now_s: float, *, num_gpus: float, num_tokens: float) -> None:
        """So many GPUs are held since the last call; so many tokens were generated ever."""
        gpu_s = self.gpu_s + num_gpus * (now_s - self._used[-1].at_s) if self._used else 0.0
        self._used.append(Usage(now_s, gpu_s, num_tokens))
        while len(self._used) > 2 and self._used[1].at_s <= now_s - COST_WINDOW_S:
            self._used.popleft()

    def dollars_per_million_tokens(self) -> float | None:
        """None without a price, and while no token was generated."""
        if self._dollars_per_gpu_s is None or len(self._used) < 2:
            return None
        first, last = self._used[0], self._used[-1]
        num_tokens = last.num_tokens - first.num_tokens
        return None if num_tokens <= 0 else (last.gpu_s - first.gpu_s) * self._dollars_per_gpu_s / num_tokens * 1e6


def gpus_of(pool: PoolSpec) -> float:
    """GPUs that a replica counts for; one a rank where ranks run on none, as on a simulated device."""
    return pool.gang.world_size * (pool.gang.gpus_per_rank or 1.0)


class ScalingCollector(Collector):
    """Turns what was learned last into metrics when they are asked for."""

    def __init__(self, pools: Sequence[PoolSpec], slo: Slo, cost: CostMeter, num_ready: Callable[[], Counter[str]]):
        self.status: ScalingStatus | None = None
        """As the autoscaler said it last; None without one."""
        self._pools = pools
        self._slo = slo
        self._cost = cost
        self._num_ready = num_ready

    @property
    def num_gpus(self) -> float:
        """That replicas hold now."""
        if self.status is not None:
            return self.status.gpus_used
        ready = self._num_ready()
        return sum(ready[pool.name] * gpus_of(pool) for pool in self._pools)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._objective()
        yield from self._replicas()
        yield self._decisions()
        status = self.status
        yield _number("manta_scaling_forecast_requests_per_second", status and status.forecast_requests_s)
        yield _number("manta_scaling_arrivals_requests_per_second", status and status.arrivals_requests_s)
        yield _number("manta_scaling_attainment_ratio", status and status.attainment)
        yield _number("manta_scaling_cold_start_seconds", status and status.cold_start_s)
        gpus = _gauge("manta_scaling_gpus")
        gpus.add_metric(["used"], self.num_gpus)
        if status is not None and status.gpu_budget is not None:
            gpus.add_metric(["budget"], status.gpu_budget)
        yield gpus
        spec = BY_NAME["manta_gpu_seconds_total"]
        yield CounterMetricFamily(spec.name, spec.help, value=self._cost.gpu_s)
        yield _number("manta_cost_per_million_tokens_dollars", self._cost.dollars_per_million_tokens())

    def _objective(self) -> Iterator[Metric]:
        yield _number("manta_slo_target_ratio", self._slo.target)
        limits = _gauge("manta_slo_limit_seconds")
        for name, value in (("ttft", self._slo.ttft_s), ("tpot", self._slo.tpot_s)):
            if value is not None:
                limits.add_metric([name], value)
        yield limits

    def _replicas(self) -> Iterator[Metric]:
        desired, there = _gauge("manta_scaling_desired_replicas"), _gauge("manta_scaling_replicas")
        if self.status is not None:
            for pool in self.status.pools:
                desired.add_metric([pool.name], pool.desired)
                counts = (("starting", pool.num_starting), ("ready", pool.num_ready), ("draining", pool.num_draining))
                for state, count in counts:
                    there.add_metric([pool.name, state], count)
        else:
            ready = self._num_ready()
            for pool in self._pools:
                desired.add_metric([pool.name], pool.num_replicas)
                there.add_metric([pool.name, "ready"], ready[pool.name])
        yield from (desired, there)

    def _decisions(self) -> Metric:
        """Every reason of every pool from the beginning, at 0: the first decision is a rise, too."""
        spec = BY_NAME["manta_scaling_decisions_total"]
        family = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
        if self.status is not None:
            for pool in self.status.pools:
                counted = self.status.num_decided.get(pool.name, {})
                for reason in dict.fromkeys((*ReasonCode, *counted)):
                    family.add_metric([pool.name, str(reason)], counted.get(reason, 0))
        return family


def _gauge(name: str) -> GaugeMetricFamily:
    spec = BY_NAME[name]
    return GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)


def _number(name: str, value: float | None) -> Metric:
    """A gauge without labels; without a sample for None."""
    family = _gauge(name)
    if value is not None:
        family.add_metric([], value)
    return family
