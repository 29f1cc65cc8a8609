"""Every metric in one table: name, kind, unit, labels, buckets, help. Pure; dashboards, rules and docs are made from it.

No label carries the id of a request or of an engine replica. `replica` is a position, 0 to the number of live replicas
of the pool less 1, in the order of their ids, which is that of /ready: replicas may come and go for a year, and no new
series begins. `edge` is the id of an edge's process; those are few and stay.
"""

# ruff: noqa: E501  (a row is a line)

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from .step_histogram import BOUNDS_S

LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_TIME_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.045, 0.06, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
DECISION_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0, 10.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Kind = Literal["gauge", "counter", "histogram"]


class Unit(enum.StrEnum):
    """What a metric counts. Base units throughout: never milliseconds, mebibytes or per cent."""

    REQUESTS = "requests"
    SEQUENCES = "sequences"
    TOKENS = "tokens"
    STEPS = "steps"
    BLOCKS = "blocks"
    REPLICAS = "replicas"
    GPUS = "GPUs"
    EVENTS = "events"
    SECONDS = "seconds"
    BYTES = "bytes"
    RATIO = "ratio"
    """1 is all of it."""
    REQUESTS_PER_SECOND = "requests/second"
    DOLLARS = "dollars"
    FLAG = "0 or 1"


class Scope(enum.StrEnum):
    """Whose numbers they are, and so how those of several edges go together."""

    EDGE = "edge"
    """Of the edge that shows them: add them up."""
    FLEET = "fleet"
    """Of the engines or of the autoscaler, of which every edge shows the same: take one, the greatest."""


class Group(enum.StrEnum):
    """Chapters of the table; the value is the heading in the docs."""

    REQUESTS = "Requests, at the edge"
    SLO = "The objective"
    ENGINE = "Engines"
    REPLICAS = "Replicas"
    ROUTING = "Routing, admission and prefix cache"
    HANDOFF = "Prefill and decode pools"
    SCALING = "Autoscaling and cost"


@dataclass(frozen=True)
class MetricSpec:
    """One row of the table."""

    name: str
    kind: Kind
    unit: Unit
    group: Group
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    scope: Scope = Scope.FLEET
    field: str | None = None
    """The number of a Snapshot, or the histogram of EngineTimes, that it shows."""


def _engine(name: str, kind: Kind, unit: Unit, help: str, field: str, *, buckets: tuple[float, ...] = ()) -> MetricSpec:
    """Of a live replica for a gauge, else over all that the pool ever had."""
    labels = ("pool", "replica") if kind == "gauge" else ("pool",)
    group = Group.HANDOFF if field.startswith("num_kv_") else Group.ENGINE
    return MetricSpec(name, kind, unit, group, help, labels, buckets, Scope.FLEET, field)


def _edge(
    name: str, kind: Kind, unit: Unit, group: Group, help: str, *labels: str, buckets: tuple[float, ...] = ()
) -> MetricSpec:
    return MetricSpec(name, kind, unit, group, help, ("edge", *labels), buckets, Scope.EDGE)


def _fleet(name: str, kind: Kind, unit: Unit, group: Group, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, kind, unit, group, help, labels)


METRICS: tuple[MetricSpec, ...] = (
    _edge("manta_requests_total", "counter", Unit.REQUESTS, Group.REQUESTS, "Requests that are over.", "endpoint", "stream"),
    _edge("manta_choices_total", "counter", Unit.SEQUENCES, Group.REQUESTS, "Sequences by how they ended.", "endpoint", "finish_reason"),
    _edge("manta_requests_refused_total", "counter", Unit.REQUESTS, Group.REQUESTS, "Error answers.", "endpoint", "status", "code"),
    _edge("manta_time_to_first_token_seconds", "histogram", Unit.SECONDS, Group.REQUESTS, "Arrival to first token (TTFT).", buckets=LATENCY_S),
    _edge("manta_time_per_output_token_seconds", "histogram", Unit.SECONDS, Group.REQUESTS, "Mean gap of a sequence's tokens after the first (TPOT).", buckets=TOKEN_TIME_S),
    _edge("manta_inter_token_seconds", "histogram", Unit.SECONDS, Group.REQUESTS, "Each gap between two tokens of a stream, as they come to the edge (ITL).", buckets=BOUNDS_S),
    _edge("manta_request_seconds", "histogram", Unit.SECONDS, Group.REQUESTS, "Arrival to last token (E2E).", buckets=LATENCY_S),
    _edge("manta_request_queue_seconds", "histogram", Unit.SECONDS, Group.REQUESTS, "Arrival to submission: reading, template, tokens.", buckets=LATENCY_S),
    _edge("manta_request_prompt_tokens", "histogram", Unit.TOKENS, Group.REQUESTS, "Prompt tokens of a request.", buckets=TOKEN_BUCKETS),
    _edge("manta_request_completion_tokens", "histogram", Unit.TOKENS, Group.REQUESTS, "Generated tokens of a request.", buckets=TOKEN_BUCKETS),
    _edge("manta_edge_requests_in_flight", "gauge", Unit.SEQUENCES, Group.REQUESTS, "Sequences of the edge that replicas have."),
    _edge("manta_edge_requests_waiting", "gauge", Unit.REQUESTS, Group.REQUESTS, "Requests that wait in the edge for a replica."),
    _edge("manta_requests_moved_total", "counter", Unit.SEQUENCES, Group.REQUESTS, "Streams that went on elsewhere, as their replica died or left."),

    _edge("manta_slo_requests_total", "counter", Unit.SEQUENCES, Group.SLO, "Sequences by how they stood to the objective: met, late_ttft, late_tpot, failed.", "outcome"),
    _edge("manta_slo_error_budget_remaining_ratio", "gauge", Unit.RATIO, Group.SLO, "Share of the allowed misses that is left, since the edge began; below 0 it is overdrawn."),
    _fleet("manta_slo_target_ratio", "gauge", Unit.RATIO, Group.SLO, "Share of sequences that are to keep the limits."),
    _fleet("manta_slo_limit_seconds", "gauge", Unit.SECONDS, Group.SLO, "The limits: ttft, tpot. A limit that is not set is not shown.", "limit"),

    _engine("manta_requests_running", "gauge", Unit.SEQUENCES, "Sequences that run there.", "num_running"),
    _engine("manta_requests_waiting", "gauge", Unit.SEQUENCES, "Sequences that wait there.", "num_waiting"),
    _engine("manta_kv_cache_usage", "gauge", Unit.RATIO, "Share of the KV blocks that sequences hold.", "kv_cache_usage"),
    _engine("manta_last_step_seconds", "gauge", Unit.SECONDS, "Duration of the last step.", "last_step_s"),
    _engine("manta_step_seconds", "histogram", Unit.SECONDS, "End of a step to the end of the next.", "step_s", buckets=BOUNDS_S),
    _engine("manta_step_predicted_seconds", "histogram", Unit.SECONDS, "The same steps as the step-time model predicts them.", "predicted_s", buckets=BOUNDS_S),
    _engine("manta_batch_tokens", "histogram", Unit.TOKENS, "Tokens that a step computed.", "batch_tokens", buckets=TOKEN_BUCKETS),
    _engine("manta_batch_sequences", "histogram", Unit.SEQUENCES, "Decodes in a step.", "batch_sequences", buckets=SEQUENCE_BUCKETS),
    _engine("manta_engine_queue_seconds", "histogram", Unit.SECONDS, "Submission to the first step that computes it.", "queue_s", buckets=LATENCY_S),
    _engine("manta_engine_time_to_first_token_seconds", "histogram", Unit.SECONDS, "Submission to first token, at the engine.", "ttft_s", buckets=LATENCY_S),
    _engine("manta_engine_time_per_output_token_seconds", "histogram", Unit.SECONDS, "Mean gap of a sequence's tokens after the first, at the engine.", "tpot_s", buckets=TOKEN_TIME_S),
    _engine("manta_engine_inter_token_seconds", "histogram", Unit.SECONDS, "Each gap between two tokens of a sequence, at the engine.", "itl_s", buckets=BOUNDS_S),
    _engine("manta_engine_request_seconds", "histogram", Unit.SECONDS, "Submission to last token, at the engine.", "e2e_s", buckets=LATENCY_S),
    _engine("manta_engine_steps_total", "counter", Unit.STEPS, "Steps.", "num_steps"),
    _engine("manta_prompt_tokens_total", "counter", Unit.TOKENS, "Prompt tokens of admitted sequences.", "num_prompt_tokens"),
    _engine("manta_cached_prompt_tokens_total", "counter", Unit.TOKENS, "Of those, found in the prefix cache.", "num_cached_tokens"),
    _engine("manta_generation_tokens_total", "counter", Unit.TOKENS, "Tokens generated.", "num_generated_tokens"),
    _engine("manta_preemptions_total", "counter", Unit.EVENTS, "Times that a sequence lost its blocks and was computed again.", "num_preemptions"),
    _engine("manta_engine_finished_total", "counter", Unit.SEQUENCES, "Sequences that finished.", "num_finished"),
    _engine("manta_engine_cancelled_total", "counter", Unit.SEQUENCES, "Sequences that were cancelled.", "num_cancelled"),
    _engine("manta_engine_refused_total", "counter", Unit.SEQUENCES, "Sequences that engines refused.", "num_refused"),

    _fleet("manta_replicas", "gauge", Unit.REPLICAS, Group.REPLICAS, "Replicas by what they do: connecting, ready, draining.", "pool", "role", "state"),
    _fleet("manta_replica_ready", "gauge", Unit.FLAG, Group.REPLICAS, "1 for a replica that takes new work.", "pool", "replica"),
    _fleet("manta_replica_role", "gauge", Unit.FLAG, Group.REPLICAS, "1 for the role that a replica has.", "pool", "replica", "role"),
    _edge("manta_replicas_lost_total", "counter", Unit.EVENTS, Group.REPLICAS, "Replicas whose channel broke."),
    _fleet("manta_startup_phase_seconds", "gauge", Unit.SECONDS, Group.REPLICAS, "Phases of start-up, of the replica that came last.", "pool", "phase"),
    _fleet("manta_memory_ledger_bytes", "gauge", Unit.BYTES, Group.REPLICAS, "What memory went to at start-up, on each rank, of the replica that came last.", "pool", "part"),

    _edge("manta_routing_decisions_total", "counter", Unit.SEQUENCES, Group.ROUTING, "Replicas chosen: direct, or detour over a prefill replica.", "path"),
    _edge("manta_routing_decision_seconds", "histogram", Unit.SECONDS, Group.ROUTING, "Time that a choice took.", buckets=DECISION_S),
    _edge("manta_routing_estimated_seconds", "histogram", Unit.SECONDS, Group.ROUTING, "Choice to first token, as estimated.", buckets=LATENCY_S),
    _edge("manta_routing_actual_seconds", "histogram", Unit.SECONDS, Group.ROUTING, "The same as it turned out.", buckets=LATENCY_S),
    _edge("manta_routing_actual_to_estimated", "histogram", Unit.RATIO, Group.ROUTING, "Their ratio, each time.", buckets=RATIOS),
    _edge("manta_routing_cached_tokens_total", "counter", Unit.TOKENS, Group.ROUTING, "Cached prompt tokens: believed when it was routed, actual when it ran.", "kind"),
    _edge("manta_prefix_index_blocks", "gauge", Unit.BLOCKS, Group.ROUTING, "Cached blocks that the edge knows of."),
    _edge("manta_prefix_index_resyncs_total", "counter", Unit.EVENTS, Group.ROUTING, "Complete lists asked for after a gap."),
    _edge("manta_admission_refused_total", "counter", Unit.SEQUENCES, Group.ROUTING, "Sequences not taken.", "tenant", "reason"),
    _edge("manta_admission_waiting", "gauge", Unit.REQUESTS, Group.ROUTING, "Requests that wait in the edge.", "tenant"),
    _edge("manta_admission_wait_seconds", "histogram", Unit.SECONDS, Group.ROUTING, "Wait in the edge.", buckets=LATENCY_S),
    _edge("manta_tenant_tokens_total", "counter", Unit.TOKENS, Group.ROUTING, "Prompt and generated tokens.", "tenant"),

    _edge("manta_handoffs_total", "counter", Unit.SEQUENCES, Group.HANDOFF, "Sequences sent over a prefill replica, by what came of it.", "outcome"),
    _engine("manta_kv_leases", "gauge", Unit.EVENTS, "Sets of blocks held for a hand-over.", "num_kv_leases"),
    _engine("manta_kv_sent_total", "counter", Unit.SEQUENCES, "Prompts whose KV went to another replica.", "num_kv_sent"),
    _engine("manta_kv_received_total", "counter", Unit.SEQUENCES, "Prompts whose KV came and was used.", "num_kv_received"),
    _engine("manta_kv_recomputed_total", "counter", Unit.SEQUENCES, "Prompts whose KV did not come in time.", "num_kv_recomputed"),
    _engine("manta_kv_bytes_total", "counter", Unit.BYTES, "Bytes of KV that came.", "num_kv_bytes"),

    _fleet("manta_scaling_desired_replicas", "gauge", Unit.REPLICAS, Group.SCALING, "What the autoscaler wants; without it, what is configured.", "pool"),
    _fleet("manta_scaling_replicas", "gauge", Unit.REPLICAS, Group.SCALING, "What there is: starting, ready, draining.", "pool", "state"),
    _fleet("manta_scaling_decisions_total", "counter", Unit.EVENTS, Group.SCALING, "Decisions of the autoscaler by their reason code.", "pool", "reason"),
    _fleet("manta_scaling_forecast_requests_per_second", "gauge", Unit.REQUESTS_PER_SECOND, Group.SCALING, "Arrivals expected when a replica that starts now is ready."),
    _fleet("manta_scaling_arrivals_requests_per_second", "gauge", Unit.REQUESTS_PER_SECOND, Group.SCALING, "Arrivals lately, as the autoscaler counts them."),
    _fleet("manta_scaling_attainment_ratio", "gauge", Unit.RATIO, Group.SCALING, "Share of late requests within the objective, as the autoscaler counts them."),
    _fleet("manta_scaling_cold_start_seconds", "gauge", Unit.SECONDS, Group.SCALING, "How long the autoscaler expects a start to take."),
    _fleet("manta_scaling_gpus", "gauge", Unit.GPUS, Group.SCALING, "GPUs: used, and the budget where there is one.", "state"),
    _fleet("manta_gpu_seconds_total", "counter", Unit.SECONDS, Group.SCALING, "GPUs that ready replicas held, times how long, since the oldest edge began."),
    _fleet("manta_cost_per_million_tokens_dollars", "gauge", Unit.DOLLARS, Group.SCALING, "GPUs' price over the last five minutes, for a million generated tokens; needs observability.gpu_dollars_per_hour."),
)  # fmt: skip

BY_NAME = {spec.name: spec for spec in METRICS}
"""The rows by name."""
