"""The table of metrics and what an edge shows of it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from manta.engine.request import FinishReason
from manta.engine.stats import Snapshot
from manta.replicas.edge.client import ChoiceRecord, ReplicaStatus, RequestRecord
from manta.replicas.metrics import METRICS, EdgeMetrics


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def record(*, ttft_s: float | None = 0.2, tpot_s: float | None = 0.02) -> RequestRecord:
    choice = ChoiceRecord(FinishReason.STOP, 11, ttft_s, tpot_s)
    return RequestRecord("completions", True, 7, 0, queue_s=0.001, e2e_s=0.4, choices=(choice,))


def test_every_row_of_the_table_is_shown_with_its_kind_and_labels() -> None:
    metrics = EdgeMetrics("e")
    metrics.request_finished(record())
    metrics.request_refused("completions", 429, "overloaded")
    metrics.handoff_ended("handed_over")
    metrics.replica_chosen(path="direct", waited_s=0.0)
    metrics.decision_took(0.00004)
    metrics.first_token_came(estimated_s=0.1, actual_s=0.2, num_believed_tokens=64, num_cached_tokens=48)
    metrics.request_not_admitted("research", "deadline")
    metrics.tokens_used("research", 100)
    text = metrics.render([ReplicaStatus("r", ready=True, snapshot=Snapshot())], num_waiting={"research": 3})
    shown = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for spec in METRICS:
        family = shown.pop(spec.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (spec.kind, spec.help)
        assert family.samples, spec.name
        assert all(set(sample.labels) - {"le"} == set(spec.labels) for sample in family.samples)
    assert not shown


def test_waiting_requests_are_shown_by_tenant_and_settle_at_zero() -> None:
    metrics = EdgeMetrics("e")
    edge, research = ("edge", "e"), ("tenant", "research")
    busy = samples(metrics.render([], num_waiting={"research": 2}, num_waiting_to_move=1, num_in_flight=4))
    assert busy["manta_admission_waiting", frozenset({edge, research})] == 2
    assert busy["manta_edge_requests_waiting", frozenset({edge})] == 3
    assert busy["manta_edge_requests_in_flight", frozenset({edge})] == 4
    idle = samples(metrics.render([]))
    assert idle["manta_admission_waiting", frozenset({edge, research})] == 0
    assert idle["manta_edge_requests_waiting", frozenset({edge})] == 0
    assert idle["manta_edge_requests_in_flight", frozenset({edge})] == 0


def test_estimates_are_compared_with_what_came_of_them() -> None:
    metrics = EdgeMetrics("e")
    metrics.first_token_came(estimated_s=0.1, actual_s=0.2, num_believed_tokens=64, num_cached_tokens=48)
    metrics.first_token_came(estimated_s=None, actual_s=0.4, num_believed_tokens=0, num_cached_tokens=16)
    shown = samples(metrics.render([]))
    edge = ("edge", "e")
    assert shown["manta_routing_actual_to_estimated_sum", frozenset({edge})] == 2.0
    assert shown["manta_routing_estimated_seconds_count", frozenset({edge})] == 1
    assert shown["manta_routing_actual_seconds_count", frozenset({edge})] == 2
    assert shown["manta_routing_cached_tokens_total", frozenset({edge, ("kind", "believed")})] == 64
    assert shown["manta_routing_cached_tokens_total", frozenset({edge, ("kind", "actual")})] == 64


def test_first_token_time_is_recorded_once_a_choice_and_never_without_a_token() -> None:
    metrics = EdgeMetrics("e")
    metrics.request_finished(record(ttft_s=0.2))
    metrics.request_finished(record(ttft_s=None, tpot_s=None))
    shown = samples(metrics.render([]))
    edge = frozenset({("edge", "e")})
    assert shown["manta_time_to_first_token_seconds_count", edge] == 1
    assert shown["manta_time_to_first_token_seconds_sum", edge] == 0.2
    assert shown["manta_request_seconds_count", edge] == 2


def test_counters_never_fall_whatever_replicas_do() -> None:
    metrics = EdgeMetrics("e")

    def total(*live: tuple[str, int]) -> float:
        replicas = [ReplicaStatus(name, ready=True, snapshot=Snapshot(num_generated_tokens=n)) for name, n in live]
        return samples(metrics.render(replicas))["manta_generation_tokens_total", frozenset()]

    assert total(("a", 10)) == 10
    metrics.replica_left("a", Snapshot(num_generated_tokens=12, num_steps=5))
    assert total() == 12
    metrics.replica_joined("a", Snapshot(num_generated_tokens=14, num_steps=6))  # the same engine again
    assert total(("a", 14)) == 14
    metrics.replica_left("a", Snapshot(num_generated_tokens=20, num_steps=9))
    metrics.replica_joined("a", Snapshot(num_steps=0))  # another engine under its name
    assert total(("a", 1)) == 21
    for i in range(1000):
        metrics.replica_left(f"x{i}", Snapshot(num_generated_tokens=1))
    assert total(("a", 1)) == 1021
