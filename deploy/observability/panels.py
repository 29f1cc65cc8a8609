"""The dashboards as plain data: panels with queries over the table of metrics. Pure; knows no Grafana."""

# ruff: noqa: E501  (a panel is a line)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manta.replicas.metrics_table import BY_NAME, Unit

from .queries import increase, mean, mean_of, metrics_in, most, now, quantile, rate

Form = Literal["timeseries", "stat", "bars"]


@dataclass(frozen=True)
class Query:
    """One line, or one for each value of the labels that it leaves."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    queries: tuple[Query, ...]
    unit: Unit | str
    """Of the values; a text is a unit of Grafana's."""
    form: Form = "timeseries"
    width: int = 8
    """Of 24."""
    note: str = ""
    """What the metrics' own words do not say."""

    @property
    def metrics(self) -> list[str]:
        """The table's metrics that it shows."""
        return list(dict.fromkeys(name for query in self.queries for name in metrics_in(query.expression)))

    @property
    def description(self) -> str:
        """The note, and the table's words for each metric."""
        return "\n\n".join([*([self.note] if self.note else []), *(f"{n}: {BY_NAME[n].help}" for n in self.metrics)])


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard. Its uid stays the same, so that it is replaced and links to it last."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


PER_SECOND = "reqps"
TOKENS_PER_SECOND = "short"
EVENTS_PER_SECOND = "ops"
BYTES_PER_SECOND = "Bps"

GOOD = increase("manta_slo_requests_total", match='outcome="met"', window="$__range")
ALL = increase("manta_slo_requests_total", window="$__range")
GOOD_NOW = rate("manta_slo_requests_total", match='outcome="met"')
ALL_NOW = rate("manta_slo_requests_total")
TARGET = 'max(manta_slo_target_ratio{job=~"$job"})'


def _quantiles(title: str, name: str, *, limit: str | None = None, width: int = 8, by: str | None = None) -> Panel:
    """Median, 95th and 99th percentile; with the objective's limit beside it where there is one."""
    labels, where = ((by,), f" {{{{{by}}}}}") if by else ((), "")
    queries = [Query(quantile(share / 100, name, *labels), f"p{share}{where}") for share in (50, 95, 99)]
    if limit is not None:
        queries.append(Query(now("manta_slo_limit_seconds", match=f'limit="{limit}"'), "limit"))
    return Panel(title, tuple(queries), BY_NAME[name].unit, width=width)


OVERVIEW = Board(
    "manta-overview",
    "Manta: overview",
    "Whether the objective is kept, what it costs, and what is asked of the service.",
    (
        Row(
            "The objective",
            (
                Panel("Attainment", (Query(f"{GOOD} / {ALL}", "attainment"),), Unit.RATIO, "stat", 4, "Over the time shown: sequences that kept both limits."),
                Panel("Error budget left", (Query(f"1 - (1 - {GOOD} / {ALL}) / (1 - {TARGET})", "left"),), Unit.RATIO, "stat", 4, "Over the time shown; below 0 more was missed than the objective allows."),
                Panel("Budget since the edge began", (Query(f"min({now('manta_slo_error_budget_remaining_ratio', 'edge')})", "left"),), Unit.RATIO, "stat", 4, "Of the edge that missed most."),
                Panel("GPUs", (Query(now("manta_scaling_gpus", match='state="used"'), "used"),), Unit.GPUS, "stat", 4),
                Panel("Cost of a million tokens", (Query(now("manta_cost_per_million_tokens_dollars"), "dollars"),), Unit.DOLLARS, "stat", 4),
                Panel("GPU hours", (Query(increase("manta_gpu_seconds_total", window="$__range") + " / 3600", "GPU hours"),), "short", "stat", 4, "Over the time shown."),
                Panel("Attainment now", (Query(f"{GOOD_NOW} / {ALL_NOW}", "attainment"), Query(TARGET, "objective")), Unit.RATIO),
                _quantiles("TTFT", "manta_time_to_first_token_seconds", limit="ttft"),
                _quantiles("TPOT", "manta_time_per_output_token_seconds", limit="tpot"),
                Panel("Outcomes", (Query(rate("manta_slo_requests_total", "outcome"), "{{outcome}}"),), PER_SECOND, "bars"),
                _quantiles("ITL", "manta_inter_token_seconds"),
                _quantiles("End to end", "manta_request_seconds"),
            ),
        ),
        Row(
            "Requests",
            (
                Panel("Requests", (Query(rate("manta_requests_total", "endpoint", "stream"), "{{endpoint}} stream={{stream}}"),), PER_SECOND),
                Panel("Answers by how they ended", (Query(rate("manta_choices_total", "finish_reason"), "{{finish_reason}}"),), PER_SECOND, "bars"),
                Panel("Error answers", (Query(rate("manta_requests_refused_total", "status", "code"), "{{status}} {{code}}"),), PER_SECOND, "bars"),
                Panel("Tokens", (Query(rate("manta_prompt_tokens_total"), "prompt"), Query(rate("manta_cached_prompt_tokens_total"), "of those cached"), Query(rate("manta_generation_tokens_total"), "generated")), TOKENS_PER_SECOND, note="Tokens a second."),
                Panel("In flight and waiting", (Query(now("manta_edge_requests_in_flight"), "at replicas"), Query(now("manta_edge_requests_waiting"), "wait in edges"), Query(now("manta_requests_waiting"), "wait in replicas")), Unit.REQUESTS),
                _quantiles("Reading, template, tokens", "manta_request_queue_seconds"),
                _quantiles("Prompt tokens", "manta_request_prompt_tokens"),
                _quantiles("Generated tokens", "manta_request_completion_tokens"),
                Panel("Replicas", (Query(now("manta_scaling_desired_replicas", "pool"), "{{pool}} desired"), Query(now("manta_scaling_replicas", "pool", "state"), "{{pool}} {{state}}")), Unit.REPLICAS),
            ),
        ),
    ),
)  # fmt: skip

AUTOSCALING = Board(
    "manta-autoscaling",
    "Manta: autoscaling",
    "Load, forecast, target, what there is, and why. Decisions are annotations on every panel.",
    (
        Row(
            "From load to replicas",
            (
                Panel("Arrivals and forecast", (Query(now("manta_scaling_arrivals_requests_per_second"), "arrivals"), Query(now("manta_scaling_forecast_requests_per_second"), "forecast")), PER_SECOND, width=12),
                Panel("Desired and actual", (Query(now("manta_scaling_desired_replicas", "pool"), "{{pool}} desired"), Query(now("manta_scaling_replicas", "pool", "state"), "{{pool}} {{state}}")), Unit.REPLICAS, width=12),
                Panel("Decisions by reason", (Query(increase("manta_scaling_decisions_total", "pool", "reason") + " > 0", "{{pool}} {{reason}}"), Query(increase("manta_scaling_decisions_total"), "all")), Unit.EVENTS, "bars", 12, "Over each interval."),
                Panel("GPUs and budget", (Query(now("manta_scaling_gpus", "state"), "{{state}}"),), Unit.GPUS, width=12),
                Panel("Attainment as the autoscaler sees it", (Query(now("manta_scaling_attainment_ratio"), "attainment"), Query(TARGET, "objective")), Unit.RATIO),
                Panel("Waiting", (Query(now("manta_edge_requests_waiting"), "in edges"), Query(now("manta_requests_waiting", "pool"), "in {{pool}}")), Unit.REQUESTS),
                Panel("KV cache", (Query(mean_of("manta_kv_cache_usage", "pool"), "{{pool}}"),), Unit.RATIO),
            ),
        ),
        Row(
            "Starts and cost",
            (
                Panel("Expected start", (Query(now("manta_scaling_cold_start_seconds"), "expected"),), Unit.SECONDS),
                Panel("Phases of the last start", (Query(now("manta_startup_phase_seconds", "pool", "phase"), "{{pool}} {{phase}}"),), Unit.SECONDS, "bars"),
                Panel("Replicas by state", (Query(now("manta_replicas", "pool", "state"), "{{pool}} {{state}}"),), Unit.REPLICAS),
                Panel("GPU seconds a second", (Query(rate("manta_gpu_seconds_total"), "held"),), Unit.GPUS),
                Panel("Cost of a million tokens", (Query(now("manta_cost_per_million_tokens_dollars"), "dollars"),), Unit.DOLLARS),
                Panel("Replicas lost", (Query(increase("manta_replicas_lost_total"), "lost"), Query(increase("manta_requests_moved_total"), "streams moved")), Unit.EVENTS, "bars"),
            ),
        ),
    ),
)  # fmt: skip

ENGINE = Board(
    "manta-engine",
    "Manta: engine",
    "Steps, batches, KV cache and times of the engines, as they measure them themselves.",
    (
        Row(
            "Steps",
            (
                Panel("Step time", (Query(quantile(0.5, "manta_step_seconds", "pool"), "{{pool}} p50"), Query(quantile(0.99, "manta_step_seconds", "pool"), "{{pool}} p99"), Query(quantile(0.5, "manta_step_predicted_seconds", "pool"), "{{pool}} p50 predicted")), Unit.SECONDS),
                Panel("Measured to predicted", (Query(f"({mean('manta_step_seconds', 'pool')}) / ({mean('manta_step_predicted_seconds', 'pool')})", "{{pool}}"),), Unit.RATIO, note="Means of step times; 1 where the model is right."),
                Panel("Last step", (Query(now("manta_last_step_seconds", "pool", "replica"), "{{pool}} {{replica}}"),), Unit.SECONDS),
                Panel("Steps", (Query(rate("manta_engine_steps_total", "pool"), "{{pool}}"),), EVENTS_PER_SECOND),
                Panel("Tokens of a step", (Query(mean("manta_batch_tokens", "pool"), "{{pool}} mean"), Query(quantile(0.99, "manta_batch_tokens", "pool"), "{{pool}} p99")), Unit.TOKENS),
                Panel("Decodes in a step", (Query(mean("manta_batch_sequences", "pool"), "{{pool}} mean"), Query(quantile(0.99, "manta_batch_sequences", "pool"), "{{pool}} p99")), Unit.SEQUENCES),
            ),
        ),
        Row(
            "Load",
            (
                Panel("Running", (Query(now("manta_requests_running", "pool", "replica"), "{{pool}} {{replica}}"),), Unit.SEQUENCES),
                Panel("Waiting", (Query(now("manta_requests_waiting", "pool", "replica"), "{{pool}} {{replica}}"),), Unit.SEQUENCES),
                Panel("KV cache", (Query(now("manta_kv_cache_usage", "pool", "replica"), "{{pool}} {{replica}}"), Query(most("manta_kv_cache_usage"), "fullest")), Unit.RATIO),
                Panel("Tokens", (Query(rate("manta_prompt_tokens_total", "pool"), "{{pool}} prompt"), Query(rate("manta_generation_tokens_total", "pool"), "{{pool}} generated")), TOKENS_PER_SECOND, note="Tokens a second."),
                Panel("Preemptions", (Query(rate("manta_preemptions_total", "pool"), "{{pool}}"),), EVENTS_PER_SECOND),
                Panel("Ends", (Query(rate("manta_engine_finished_total", "pool"), "{{pool}} finished"), Query(rate("manta_engine_cancelled_total", "pool"), "{{pool}} cancelled"), Query(rate("manta_engine_refused_total", "pool"), "{{pool}} refused")), PER_SECOND),
            ),
        ),
        Row(
            "Times at the engine",
            (
                _quantiles("Queue", "manta_engine_queue_seconds", by="pool"),
                _quantiles("TTFT", "manta_engine_time_to_first_token_seconds"),
                _quantiles("TPOT", "manta_engine_time_per_output_token_seconds"),
                _quantiles("ITL", "manta_engine_inter_token_seconds"),
                _quantiles("End to end", "manta_engine_request_seconds"),
                Panel("The framework's share of TTFT", (Query(f"{mean('manta_time_to_first_token_seconds')} - {mean('manta_engine_time_to_first_token_seconds')}", "edge less engine"),), Unit.SECONDS, note="Mean at the edge less mean at the engine: reading, waiting in the edge, routing, the way."),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel("Ready", (Query(now("manta_replica_ready", "pool", "replica"), "{{pool}} {{replica}}"),), Unit.FLAG),
                Panel("Memory at start-up", (Query(now("manta_memory_ledger_bytes", "pool", "part"), "{{pool}} {{part}}"),), Unit.BYTES, "bars"),
                Panel("Phases of start-up", (Query(now("manta_startup_phase_seconds", "pool", "phase"), "{{pool}} {{phase}}"),), Unit.SECONDS, "bars"),
            ),
        ),
    ),
)  # fmt: skip

ROUTER = Board(
    "manta-router",
    "Manta: router and cache",
    "Where requests go, what the router believed, what the prefix cache gave, and who had to wait.",
    (
        Row(
            "Choices",
            (
                Panel("Replicas chosen", (Query(rate("manta_routing_decisions_total", "path"), "{{path}}"),), PER_SECOND),
                _quantiles("Time of a choice", "manta_routing_decision_seconds"),
                Panel("Estimate and actual", (Query(quantile(0.5, "manta_routing_estimated_seconds"), "estimated p50"), Query(quantile(0.5, "manta_routing_actual_seconds"), "actual p50"), Query(quantile(0.95, "manta_routing_estimated_seconds"), "estimated p95"), Query(quantile(0.95, "manta_routing_actual_seconds"), "actual p95")), Unit.SECONDS),
                _quantiles("Actual to estimated", "manta_routing_actual_to_estimated"),
                Panel("Streams moved", (Query(rate("manta_requests_moved_total"), "moved"),), EVENTS_PER_SECOND),
                Panel("Roles", (Query(now("manta_replica_role", "role"), "{{role}}"),), Unit.REPLICAS),
            ),
        ),
        Row(
            "Prefix cache",
            (
                Panel("Hit rate", (Query(f"{rate('manta_cached_prompt_tokens_total')} / {rate('manta_prompt_tokens_total')}", "of prompt tokens"),), Unit.RATIO),
                Panel("Believed and actual", (Query(rate("manta_routing_cached_tokens_total", "kind"), "{{kind}}"),), TOKENS_PER_SECOND, note="Cached tokens a second."),
                Panel("Index", (Query(now("manta_prefix_index_blocks", "edge"), "{{edge}}"),), Unit.BLOCKS),
                Panel("Resyncs", (Query(increase("manta_prefix_index_resyncs_total"), "resyncs"),), Unit.EVENTS, "bars"),
            ),
        ),
        Row(
            "Admission",
            (
                Panel("Refused", (Query(rate("manta_admission_refused_total", "tenant", "reason"), "{{tenant}} {{reason}}"),), PER_SECOND, "bars"),
                Panel("Waiting", (Query(now("manta_admission_waiting", "tenant"), "{{tenant}}"),), Unit.REQUESTS),
                _quantiles("Wait", "manta_admission_wait_seconds"),
                Panel("Tokens of tenants", (Query(rate("manta_tenant_tokens_total", "tenant"), "{{tenant}}"),), TOKENS_PER_SECOND, note="Tokens a second."),
            ),
        ),
    ),
)  # fmt: skip

POOLS = Board(
    "manta-pools",
    "Manta: prefill and decode pools",
    "Hand-overs of KV and the load of either pool.",
    (
        Row(
            "Hand-overs",
            (
                Panel("By outcome", (Query(rate("manta_handoffs_total", "outcome"), "{{outcome}}"),), PER_SECOND, "bars"),
                Panel("Prompts whose KV went", (Query(rate("manta_kv_sent_total"), "sent"), Query(rate("manta_kv_received_total"), "received"), Query(rate("manta_kv_recomputed_total"), "recomputed")), PER_SECOND),
                Panel("KV", (Query(rate("manta_kv_bytes_total"), "received"),), BYTES_PER_SECOND),
                Panel("Leases", (Query(now("manta_kv_leases", "pool"), "{{pool}}"),), Unit.EVENTS),
                Panel("Over both", (Query(rate("manta_routing_decisions_total", "path"), "{{path}}"),), PER_SECOND),
                Panel("Replicas by role", (Query(now("manta_replicas", "pool", "role", "state"), "{{pool}} as {{role}} {{state}}"),), Unit.REPLICAS),
            ),
        ),
        Row(
            "Pools",
            (
                Panel("Running", (Query(now("manta_requests_running", "pool"), "{{pool}}"),), Unit.SEQUENCES),
                Panel("KV cache", (Query(mean_of("manta_kv_cache_usage", "pool"), "{{pool}}"),), Unit.RATIO),
                Panel("Tokens", (Query(rate("manta_prompt_tokens_total", "pool"), "{{pool}} prompt"), Query(rate("manta_generation_tokens_total", "pool"), "{{pool}} generated")), TOKENS_PER_SECOND, note="Tokens a second."),
                _quantiles("Queue", "manta_engine_queue_seconds", by="pool"),
                _quantiles("TTFT at the engine", "manta_engine_time_to_first_token_seconds"),
                _quantiles("ITL at the engine", "manta_engine_inter_token_seconds", by="pool"),
            ),
        ),
    ),
)  # fmt: skip

BOARDS = (OVERVIEW, AUTOSCALING, ENGINE, ROUTER, POOLS)

DECISIONS = increase("manta_scaling_decisions_total", "pool", "reason", window="$__interval") + " > 0"
"""When the autoscaler decided something, for annotations."""
