"""The registry of one edge's metrics, over the table in metrics_table.py. Knows no channel and no HTTP.

Requests are recorded when they are over, never a token at a time. An engine's numbers come from its snapshots.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import ScalingStatus
from manta.cluster.slo import Slo
from manta.cluster.spec import PoolSpec
from manta.engine.stats import EngineInfo, Snapshot

from .edge.client import DEFAULT_TENANT, ReplicaStatus, RequestRecord
from .edge.scaling_ledger import ScalingLedger
from .engine_metrics import EngineCollector, Totals
from .engine_times import EngineTimes
from .metric_families import render_text
from .metrics_table import BY_NAME, METRICS, MetricSpec
from .scaling_metrics import CostMeter, ScalingCollector
from .step_histogram import BOUNDS_S, StepHistogram

__all__ = ["METRICS", "EdgeMetrics", "MetricSpec"]

LONG_GAP_S = 60.0
"""After so long without a token from a replica nobody waited for the next one all that time."""


class EdgeMetrics:
    """All metrics that one edge shows. Implements RequestObserver."""

    def __init__(
        self,
        edge_id: str,
        *,
        slo: Slo | None = None,
        pools: Sequence[PoolSpec] = (),
        pool_of: Callable[[str], str | None] = lambda replica_id: None,
        dollars_per_gpu_hour: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pools` are those that are configured, by default one called "engine"; `pool_of` names a replica's pool, None
        for one that is no member any more. Without `slo` every answer is good enough."""
        disable_created_metrics()
        self._edge = edge_id
        self._clock = clock
        self._registry = CollectorRegistry()
        self._known_tenants = {DEFAULT_TENANT}
        self.ledger = ScalingLedger(slo or Slo())
        """How requests stood to the objective, and what else scaling wants counted."""
        self._engines = EngineCollector({pool.name: pool.role for pool in pools} or {"engine": Role.MIXED}, pool_of)
        self._cost = CostMeter(dollars_per_gpu_hour)
        self._scaling = ScalingCollector(pools, self.ledger.slo, self._cost, self._engines.num_ready)
        self._gaps = _Gaps(edge_id)
        for collector in (self._engines, self._scaling, self._gaps, _Outcomes(edge_id, self.ledger)):
            self._registry.register(collector)
        self._waiting = self._gauge("manta_edge_requests_waiting").labels(edge_id)
        self._moved = self._counter("manta_requests_moved_total").labels(edge_id)
        self._lost = self._counter("manta_replicas_lost_total").labels(edge_id)
        self._in_flight = self._gauge("manta_edge_requests_in_flight").labels(edge_id)
        self._decisions = self._counter("manta_routing_decisions_total")
        self._decision = self._histogram("manta_routing_decision_seconds")
        self._estimated = self._histogram("manta_routing_estimated_seconds")
        self._actual = self._histogram("manta_routing_actual_seconds")
        self._ratio = self._histogram("manta_routing_actual_to_estimated")
        self._routed_cached = self._counter("manta_routing_cached_tokens_total")
        self._index_blocks = self._gauge("manta_prefix_index_blocks").labels(edge_id)
        self._resyncs = self._counter("manta_prefix_index_resyncs_total").labels(edge_id)
        self._not_admitted = self._counter("manta_admission_refused_total")
        self._tenants_waiting = self._gauge("manta_admission_waiting")
        self._wait = self._histogram("manta_admission_wait_seconds")
        self._tenant_tokens = self._counter("manta_tenant_tokens_total")
        self._handoffs = self._counter("manta_handoffs_total")
        self._requests = self._counter("manta_requests_total")
        self._choices = self._counter("manta_choices_total")
        self._refused = self._counter("manta_requests_refused_total")
        self._first_token = self._histogram("manta_time_to_first_token_seconds")
        self._per_token = self._histogram("manta_time_per_output_token_seconds")
        self._e2e = self._histogram("manta_request_seconds")
        self._queue = self._histogram("manta_request_queue_seconds")
        self._prompt_tokens = self._histogram("manta_request_prompt_tokens")
        self._completion_tokens = self._histogram("manta_request_completion_tokens")

    def request_finished(self, record: RequestRecord) -> None:
        """A request that was taken is over."""
        self.ledger.request_finished(record)
        self._requests.labels(self._edge, record.endpoint, str(record.stream).lower()).inc()
        self._e2e.observe(record.e2e_s)
        self._queue.observe(record.queue_s)
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._completion_tokens.observe(sum(choice.num_completion_tokens for choice in record.choices))
        for choice in record.choices:
            self._choices.labels(self._edge, record.endpoint, str(choice.finish_reason)).inc()
            if choice.time_to_first_token_s is not None:
                self._first_token.observe(choice.time_to_first_token_s)
            if choice.time_per_output_token_s is not None:
                self._per_token.observe(choice.time_per_output_token_s)

    def request_refused(self, endpoint: str, status: int, code: str) -> None:
        """A request was answered with an error."""
        self.ledger.request_refused(endpoint, status, code)
        self._refused.labels(self._edge, endpoint, str(status), code).inc()

    def decision_took(self, seconds: float) -> None:
        """A choice was made, or found impossible."""
        self._decision.observe(seconds)

    def replica_chosen(self, *, path: Literal["direct", "detour"], waited_s: float) -> None:
        """A sequence is sent to a replica, or to two for a detour over a prefill replica."""
        self._decisions.labels(self._edge, path).inc()
        self._wait.observe(waited_s)

    def first_token_came(
        self, *, estimated_s: float | None, actual_s: float, num_believed_tokens: int, num_cached_tokens: int
    ) -> None:
        """What came of a choice: seconds to the first token, and prompt tokens from the cache."""
        self._actual.observe(actual_s)
        if estimated_s is not None:
            self._estimated.observe(estimated_s)
            self._ratio.observe(actual_s / max(estimated_s, 1e-6))
        self._routed_cached.labels(self._edge, "believed").inc(num_believed_tokens)
        self._routed_cached.labels(self._edge, "actual").inc(num_cached_tokens)

    def request_not_admitted(self, tenant: str, reason: str) -> None:
        """A sequence was not taken; `reason` is a short word."""
        self._not_admitted.labels(self._edge, tenant, reason).inc()

    def tokens_used(self, tenant: str, num_tokens: int) -> None:
        """By a tenant: a prompt's, or some that were generated for him."""
        self._tenant_tokens.labels(self._edge, tenant).inc(num_tokens)

    def index_resynced(self) -> None:
        """A report of cache events was missing, and everything was asked for again."""
        self._resyncs.inc()

    def request_moved(self) -> None:
        """A stream goes on elsewhere."""
        self._moved.inc()

    def handoff_ended(self, outcome: str) -> None:
        """A request was sent over a prefill replica; the outcome is a detour's."""
        self._handoffs.labels(self._edge, outcome).inc()

    def replica_lost(self) -> None:
        """The channel to a replica broke."""
        self._lost.inc()

    def tokens_came(self, replica_id: str, *, num_going_on: int, has_more: bool) -> None:
        """A replica sent tokens of so many streams that had one before. `has_more`: it works for this edge still."""
        self._gaps.tokens_came(replica_id, self._clock(), num_going_on=num_going_on, has_more=has_more)

    def scaling_learned(self, status: ScalingStatus) -> None:
        """The autoscaler said what it wants, and why."""
        self._scaling.status = status

    def replica_joined(self, replica_id: str, snapshot: Snapshot, info: EngineInfo | None = None) -> None:
        """A replica's engine was reached; `snapshot` is where its counters stand."""
        self._engines.joined(replica_id, snapshot, info)

    def replica_left(
        self,
        replica_id: str,
        snapshot: Snapshot,
        step_times: StepHistogram | None = None,
        times: EngineTimes | None = None,
    ) -> None:
        """No more is heard of a replica; what it counted stays in the sums as it was last seen."""
        self._gaps.forget(replica_id)
        self._engines.left(replica_id, Totals(snapshot, step_times or StepHistogram(), times or EngineTimes()))

    def families(
        self,
        replicas: Sequence[ReplicaStatus],
        *,
        num_waiting: Mapping[str, int] = MappingProxyType({}),
        num_waiting_to_move: int = 0,
        num_in_flight: int = 0,
        num_index_blocks: int = 0,
    ) -> list[Metric]:
        """All metrics as they stand. `num_waiting` by tenant; one that is missing has none that waits."""
        self._waiting.set(sum(num_waiting.values()) + num_waiting_to_move)
        for tenant in self._known_tenants | num_waiting.keys():
            self._tenants_waiting.labels(self._edge, tenant).set(num_waiting.get(tenant, 0))
        self._known_tenants |= num_waiting.keys()
        self._in_flight.set(num_in_flight)
        self._index_blocks.set(num_index_blocks)
        self._engines.replicas = replicas
        num_tokens = self._engines.num_generated_tokens()
        self._cost.learn(self._clock(), num_gpus=self._scaling.num_gpus, num_tokens=num_tokens)
        return list(self._registry.collect())

    def render(
        self,
        replicas: Sequence[ReplicaStatus],
        *,
        num_waiting: Mapping[str, int] = MappingProxyType({}),
        num_waiting_to_move: int = 0,
        num_in_flight: int = 0,
        num_index_blocks: int = 0,
    ) -> bytes:
        """`families` as Prometheus text, version 0.0.4."""
        return render_text(
            self.families(
                replicas,
                num_waiting=num_waiting,
                num_waiting_to_move=num_waiting_to_move,
                num_in_flight=num_in_flight,
                num_index_blocks=num_index_blocks,
            )
        )

    def _gauge(self, name: str) -> Gauge:
        spec = BY_NAME[name]
        return Gauge(name, spec.help, spec.labels, registry=self._registry)

    def _counter(self, name: str) -> Counter:
        spec = BY_NAME[name]
        return Counter(name, spec.help, spec.labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        spec = BY_NAME[name]
        return Histogram(name, spec.help, spec.labels, registry=self._registry, buckets=spec.buckets).labels(self._edge)


class _Gaps(Collector):
    """Gaps between the tokens of streams, a frame at a time: the frame's, once for each stream that went on in it."""

    def __init__(self, edge_id: str) -> None:
        self._edge = edge_id
        self._counts = StepHistogram()
        self._last_s: dict[str, float] = {}
        """When a replica last sent tokens to streams that go on."""

    def tokens_came(self, replica_id: str, now_s: float, *, num_going_on: int, has_more: bool) -> None:
        last_s = self._last_s.get(replica_id)
        if num_going_on and last_s is not None and now_s - last_s < LONG_GAP_S:
            self._counts.add(now_s - last_s, num_going_on)
        if has_more:
            self._last_s[replica_id] = now_s
        else:
            self._last_s.pop(replica_id, None)

    def forget(self, replica_id: str) -> None:
        self._last_s.pop(replica_id, None)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        spec, counts = BY_NAME["manta_inter_token_seconds"], self._counts
        family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(counts.counts), strict=True))
        family.add_metric([self._edge], buckets, counts.sum_s)
        return [family]


class _Outcomes(Collector):
    """How sequences stood to the objective; every outcome from the beginning."""

    def __init__(self, edge_id: str, ledger: ScalingLedger) -> None:
        self._edge = edge_id
        self._ledger = ledger

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        one = self._ledger
        outcomes = {
            "met": one.num_good,
            "late_ttft": one.num_late_ttft,
            "late_tpot": one.num_late_tpot,
            "failed": one.num_failed,
        }
        spec = BY_NAME["manta_slo_requests_total"]
        family = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
        for outcome, count in outcomes.items():
            family.add_metric([self._edge, outcome], count)
        spec = BY_NAME["manta_slo_error_budget_remaining_ratio"]
        budget = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
        num_all = sum(outcomes.values())
        missed = 1 - one.num_good / num_all if num_all else 0.0
        budget.add_metric([self._edge], 1 - missed / (1 - one.slo.target))
        return [family, budget]
