"""Every metric in one table, and the edge's registry over it. Knows no channel and no HTTP.

Requests are recorded when they are over, never a token at a time. An engine's numbers come from its snapshots: gauges
by replica for as long as it lives, counters as sums over all replicas that ever were, so that they never fall.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from manta.engine.stats import Snapshot

from .edge.client import DEFAULT_TENANT, ReplicaStatus, RequestRecord
from .step_histogram import BOUNDS_S, StepHistogram

LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_TIME_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
DECISION_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 10.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class MetricSpec:
    """One row of the table. `field` names the Snapshot's number that an engine metric shows."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    field: str | None = None


METRICS = (
    # engines: gauges by replica, counters over all replicas
    MetricSpec("manta_requests_running", "gauge", "Requests that run.", ("replica",), field="num_running"),
    MetricSpec("manta_requests_waiting", "gauge", "Requests that wait there.", ("replica",), field="num_waiting"),
    MetricSpec("manta_kv_cache_usage", "gauge", "Share of blocks held.", ("replica",), field="kv_cache_usage"),
    MetricSpec("manta_last_step_seconds", "gauge", "Duration of the last step.", ("replica",), field="last_step_s"),
    MetricSpec("manta_step_seconds", "histogram", "End of a step to the next one's.", ("replica",), BOUNDS_S),
    MetricSpec("manta_kv_leases", "gauge", "Sets of blocks held for a hand-over.", ("replica",), field="num_kv_leases"),
    MetricSpec("manta_replica_role", "gauge", "1 for the role that a replica has.", ("replica", "role")),
    MetricSpec("manta_replica_ready", "gauge", "1 for a replica that takes new work, else 0.", ("replica",)),
    MetricSpec("manta_engine_steps_total", "counter", "Steps of all engines.", field="num_steps"),
    MetricSpec("manta_prompt_tokens_total", "counter", "Prompt tokens admitted.", field="num_prompt_tokens"),
    MetricSpec("manta_cached_prompt_tokens_total", "counter", "Of those, from the cache.", field="num_cached_tokens"),
    MetricSpec("manta_generation_tokens_total", "counter", "Tokens generated.", field="num_generated_tokens"),
    MetricSpec("manta_preemptions_total", "counter", "Requests that lost their blocks.", field="num_preemptions"),
    MetricSpec("manta_engine_finished_total", "counter", "Sequences that finished.", field="num_finished"),
    MetricSpec("manta_engine_cancelled_total", "counter", "Sequences that were cancelled.", field="num_cancelled"),
    MetricSpec("manta_engine_refused_total", "counter", "Sequences that engines refused.", field="num_refused"),
    MetricSpec("manta_kv_sent_total", "counter", "Prompts whose KV went to another replica.", field="num_kv_sent"),
    MetricSpec("manta_kv_received_total", "counter", "Prompts whose KV came and was used.", field="num_kv_received"),
    MetricSpec("manta_kv_recomputed_total", "counter", "Prompts whose KV came too late.", field="num_kv_recomputed"),
    MetricSpec("manta_kv_bytes_total", "counter", "Bytes of KV that came.", field="num_kv_bytes"),
    # this edge: routing and admission
    MetricSpec("manta_edge_requests_in_flight", "gauge", "Requests of the edge that replicas have.", ("edge",)),
    MetricSpec("manta_routing_decisions_total", "counter", "Replicas chosen.", ("edge", "path")),
    MetricSpec("manta_routing_decision_seconds", "histogram", "Time a choice took.", ("edge",), DECISION_S),
    MetricSpec("manta_routing_estimated_seconds", "histogram", "Choice to first token, guessed.", ("edge",), LATENCY_S),
    MetricSpec("manta_routing_actual_seconds", "histogram", "The same as it turned out.", ("edge",), LATENCY_S),
    MetricSpec("manta_routing_actual_to_estimated", "histogram", "Their ratio, each time.", ("edge",), RATIOS),
    MetricSpec("manta_routing_cached_tokens_total", "counter", "Cached prompt tokens.", ("edge", "kind")),
    MetricSpec("manta_prefix_index_blocks", "gauge", "Cached blocks that the edge knows of.", ("edge",)),
    MetricSpec("manta_prefix_index_resyncs_total", "counter", "Complete lists asked for after a gap.", ("edge",)),
    MetricSpec("manta_admission_refused_total", "counter", "Sequences not taken.", ("edge", "tenant", "reason")),
    MetricSpec("manta_admission_waiting", "gauge", "Requests that wait in the edge.", ("edge", "tenant")),
    MetricSpec("manta_admission_wait_seconds", "histogram", "Wait in the edge.", ("edge",), LATENCY_S),
    MetricSpec("manta_tenant_tokens_total", "counter", "Prompt and generated tokens.", ("edge", "tenant")),
    # this edge: requests
    MetricSpec("manta_edge_requests_waiting", "gauge", "Requests that wait in the edge for a replica.", ("edge",)),
    MetricSpec("manta_handoffs_total", "counter", "Requests sent over a prefill replica.", ("edge", "outcome")),
    MetricSpec("manta_requests_moved_total", "counter", "Streams that went on elsewhere.", ("edge",)),
    MetricSpec("manta_replicas_lost_total", "counter", "Replicas whose channel broke.", ("edge",)),
    MetricSpec("manta_requests_total", "counter", "Requests that are over.", ("edge", "endpoint", "stream")),
    MetricSpec("manta_choices_total", "counter", "Sequences by how they ended.", ("edge", "endpoint", "finish_reason")),
    MetricSpec("manta_requests_refused_total", "counter", "Error answers.", ("edge", "endpoint", "status", "code")),
    MetricSpec("manta_time_to_first_token_seconds", "histogram", "Arrival to first token.", ("edge",), LATENCY_S),
    MetricSpec("manta_time_per_output_token_seconds", "histogram", "Mean gap after it.", ("edge",), TOKEN_TIME_S),
    MetricSpec("manta_request_seconds", "histogram", "Arrival to last token.", ("edge",), LATENCY_S),
    MetricSpec("manta_request_queue_seconds", "histogram", "Arrival to submission.", ("edge",), LATENCY_S),
    MetricSpec("manta_request_prompt_tokens", "histogram", "Prompt tokens a request.", ("edge",), TOKEN_BUCKETS),
    MetricSpec("manta_request_completion_tokens", "histogram", "Generated tokens a request.", ("edge",), TOKEN_BUCKETS),
)  # fmt: skip

_BY_NAME = {spec.name: spec for spec in METRICS}
_GAUGES = [spec for spec in METRICS if spec.kind == "gauge" and spec.field]
_COUNTERS = [spec for spec in METRICS if spec.kind == "counter" and spec.field]


class EdgeMetrics:
    """All metrics that one edge shows. Implements RequestObserver."""

    def __init__(self, edge_id: str) -> None:
        disable_created_metrics()
        self._edge = edge_id
        self._registry = CollectorRegistry()
        self._known_tenants = {DEFAULT_TENANT}
        self._engines = _EngineCollector()
        self._registry.register(self._engines)
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

    def replica_joined(self, replica_id: str, snapshot: Snapshot) -> None:
        """A replica's engine was reached; `snapshot` is where its counters stand."""
        self._engines.joined(replica_id, snapshot)

    def replica_left(self, replica_id: str, snapshot: Snapshot) -> None:
        """No more is heard of a replica; its counters stay in the sums as they were last seen."""
        self._engines.left(replica_id, snapshot)

    def render(
        self,
        replicas: Sequence[ReplicaStatus],
        *,
        num_waiting: Mapping[str, int] = MappingProxyType({}),
        num_waiting_to_move: int = 0,
        num_in_flight: int = 0,
        num_index_blocks: int = 0,
    ) -> bytes:
        """Prometheus text, version 0.0.4. `num_waiting` by tenant; one that is missing has none that waits."""
        self._waiting.set(sum(num_waiting.values()) + num_waiting_to_move)
        for tenant in self._known_tenants | num_waiting.keys():
            self._tenants_waiting.labels(self._edge, tenant).set(num_waiting.get(tenant, 0))
        self._known_tenants |= num_waiting.keys()
        self._in_flight.set(num_in_flight)
        self._index_blocks.set(num_index_blocks)
        self._engines.replicas = replicas
        return generate_latest(self._registry)

    def _gauge(self, name: str) -> Gauge:
        spec = _BY_NAME[name]
        return Gauge(name, spec.help, spec.labels, registry=self._registry)

    def _counter(self, name: str) -> Counter:
        spec = _BY_NAME[name]
        return Counter(name, spec.help, spec.labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        spec = _BY_NAME[name]
        return Histogram(name, spec.help, spec.labels, registry=self._registry, buckets=spec.buckets).labels(self._edge)


class _EngineCollector(Collector):
    """Turns the latest snapshots into metrics when they are asked for."""

    def __init__(self) -> None:
        self.replicas: Sequence[ReplicaStatus] = ()
        self._last: dict[str, Snapshot] = {}
        """The last snapshot of replicas that are not connected now."""
        self._gone = dict.fromkeys((spec.name for spec in _COUNTERS), 0.0)
        self._num_remembered = 256

    def joined(self, replica_id: str, snapshot: Snapshot) -> None:
        before = self._last.pop(replica_id, None)
        if before is not None and before.num_steps > snapshot.num_steps:  # another engine under the same id
            self._add_to_gone(before)

    def left(self, replica_id: str, snapshot: Snapshot) -> None:
        self._last[replica_id] = snapshot
        while len(self._last) > self._num_remembered:
            self._add_to_gone(self._last.pop(next(iter(self._last))))

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        live = [(status.replica_id, status.snapshot) for status in self.replicas if status.snapshot is not None]
        for spec in _GAUGES:
            assert spec.field is not None
            gauge = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
            for replica_id, snapshot in live:
                gauge.add_metric([replica_id], getattr(snapshot, spec.field))
            yield gauge
        ready = GaugeMetricFamily("manta_replica_ready", _BY_NAME["manta_replica_ready"].help, labels=("replica",))
        for status in self.replicas:
            ready.add_metric([status.replica_id], float(status.ready))
        yield ready
        role = GaugeMetricFamily("manta_replica_role", _BY_NAME["manta_replica_role"].help, labels=("replica", "role"))
        for status in self.replicas:
            if status.role is not None:
                role.add_metric([status.replica_id, status.role], 1.0)
        yield role
        yield self._step_times()
        snapshots = [snapshot for _, snapshot in live] + list(self._last.values())
        for spec in _COUNTERS:
            assert spec.field is not None
            total = self._gone[spec.name] + sum(getattr(snapshot, spec.field) for snapshot in snapshots)
            yield CounterMetricFamily(spec.name, spec.help, value=total)

    def _step_times(self) -> Metric:
        spec = _BY_NAME["manta_step_seconds"]
        family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for status in self.replicas:
            times = status.step_times or StepHistogram()
            bounds = [*map(str, spec.buckets), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(times.counts), strict=True))
            family.add_metric([status.replica_id], buckets, times.sum_s)
        return family

    def _add_to_gone(self, snapshot: Snapshot) -> None:
        for spec in _COUNTERS:
            assert spec.field is not None
            self._gone[spec.name] += getattr(snapshot, spec.field)
