"""The table of metrics and what an edge shows of it."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from manta.cluster.scaling import PoolStatus, ReasonCode, ScalingStatus
from manta.cluster.slo import Slo
from manta.cluster.spec import GangSpec, PoolSpec
from manta.engine.request import FinishReason
from manta.engine.stats import EngineInfo, Snapshot
from manta.replicas.edge.client import ChoiceRecord, ReplicaStatus, RequestRecord
from manta.replicas.engine_times import EngineTimes
from manta.replicas.metric_aliases import vllm_aliases
from manta.replicas.metric_families import merge, render_text
from manta.replicas.metrics import EdgeMetrics
from manta.replicas.metrics_table import BY_NAME, METRICS
from manta.replicas.scaling_metrics import CostMeter
from manta.replicas.step_histogram import StepHistogram

INFO = EngineInfo(
    model_name="m", max_model_len=64, vocab_size=8, block_size=16, num_blocks=4, max_num_seqs=2, max_num_waiting=2,
    device="cpu", dtype="float32", startup_s={"weights": 1.5}, memory_ledger_bytes={"kv_cache": 4096},
)  # fmt: skip

STATUS = ScalingStatus(
    time_s=0.0,
    pools=(PoolStatus(name="engine", desired=3, num_ready=2, num_starting=1, gpus_per_replica=2.0),),
    forecast_requests_s=12.5,
    arrivals_requests_s=10.0,
    attainment=0.995,
    cold_start_s=4.0,
    gpus_used=6.0,
    gpu_budget=8.0,
    num_decided={"engine": {"forecast": 2}},
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def labels(**given: str) -> frozenset[tuple[str, str]]:
    return frozenset(given.items())


def record(
    *,
    ttft_s: float | None = 0.2,
    tpot_s: float | None = 0.02,
    reason: FinishReason = FinishReason.STOP,
) -> RequestRecord:
    choice = ChoiceRecord(reason, 11, ttft_s, tpot_s)
    return RequestRecord("completions", True, 7, 0, queue_s=0.001, e2e_s=0.4, choices=(choice,))


def busy_metrics(edge_id: str = "e") -> EdgeMetrics:
    """With something in every row."""
    clock = Clock()
    pool = PoolSpec("engine", GangSpec(tp_size=2), 1)
    metrics = EdgeMetrics(
        edge_id, slo=Slo(ttft_s=0.5, tpot_s=0.05), pools=[pool], dollars_per_gpu_hour=3.6, clock=clock
    )
    metrics.request_finished(record())
    metrics.request_refused("completions", 429, "overloaded")
    metrics.handoff_ended("handed_over")
    metrics.replica_chosen(path="direct", waited_s=0.0)
    metrics.decision_took(0.00004)
    metrics.first_token_came(estimated_s=0.1, actual_s=0.2, num_believed_tokens=64, num_cached_tokens=48)
    metrics.request_not_admitted("research", "deadline")
    metrics.tokens_used("research", 100)
    metrics.scaling_learned(STATUS)
    metrics.replica_joined("r", Snapshot(), INFO)
    metrics.render([ReplicaStatus("r", ready=True, snapshot=Snapshot())])
    clock.now_s += 10
    return metrics


def busy_page(edge_id: str = "e") -> list[Any]:
    return busy_metrics(edge_id).families(
        [ReplicaStatus("r", ready=True, snapshot=Snapshot(num_generated_tokens=1000))], num_waiting={"research": 3}
    )


def test_every_row_of_the_table_is_shown_with_its_kind_and_labels() -> None:
    text = render_text(busy_page())
    shown = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for spec in METRICS:
        family = shown.pop(spec.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (spec.kind, spec.help)
        assert family.samples, spec.name
        assert all(set(sample.labels) - {"le"} == set(spec.labels) for sample in family.samples)
    assert not shown


def test_the_table_keeps_prometheus_rules_for_names_and_units() -> None:
    assert len(BY_NAME) == len(METRICS)
    for spec in METRICS:
        assert spec.name.startswith("manta_"), spec.name
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert bool(spec.buckets) == (spec.kind == "histogram"), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets))
        stem = spec.name.removesuffix("_total")
        if spec.unit in ("seconds", "bytes", "dollars"):
            assert stem.endswith(f"_{spec.unit}"), spec.name


def test_waiting_requests_are_shown_by_tenant_and_settle_at_zero() -> None:
    metrics = EdgeMetrics("e")
    busy = samples(metrics.render([], num_waiting={"research": 2}, num_waiting_to_move=1, num_in_flight=4))
    assert busy["manta_admission_waiting", labels(edge="e", tenant="research")] == 2
    assert busy["manta_edge_requests_waiting", labels(edge="e")] == 3
    assert busy["manta_edge_requests_in_flight", labels(edge="e")] == 4
    idle = samples(metrics.render([]))
    assert idle["manta_admission_waiting", labels(edge="e", tenant="research")] == 0
    assert idle["manta_edge_requests_waiting", labels(edge="e")] == 0
    assert idle["manta_edge_requests_in_flight", labels(edge="e")] == 0


def test_estimates_are_compared_with_what_came_of_them() -> None:
    metrics = EdgeMetrics("e")
    metrics.first_token_came(estimated_s=0.1, actual_s=0.2, num_believed_tokens=64, num_cached_tokens=48)
    metrics.first_token_came(estimated_s=None, actual_s=0.4, num_believed_tokens=0, num_cached_tokens=16)
    shown = samples(metrics.render([]))
    assert shown["manta_routing_actual_to_estimated_sum", labels(edge="e")] == 2.0
    assert shown["manta_routing_estimated_seconds_count", labels(edge="e")] == 1
    assert shown["manta_routing_actual_seconds_count", labels(edge="e")] == 2
    assert shown["manta_routing_cached_tokens_total", labels(edge="e", kind="believed")] == 64
    assert shown["manta_routing_cached_tokens_total", labels(edge="e", kind="actual")] == 64


def test_first_token_time_is_recorded_once_a_choice_and_never_without_a_token() -> None:
    metrics = EdgeMetrics("e")
    metrics.request_finished(record(ttft_s=0.2))
    metrics.request_finished(record(ttft_s=None, tpot_s=None))
    shown = samples(metrics.render([]))
    assert shown["manta_time_to_first_token_seconds_count", labels(edge="e")] == 1
    assert shown["manta_time_to_first_token_seconds_sum", labels(edge="e")] == 0.2
    assert shown["manta_request_seconds_count", labels(edge="e")] == 2


def test_gaps_between_tokens_count_once_a_stream_and_end_with_the_last_stream() -> None:
    clock = Clock()
    metrics = EdgeMetrics("e", clock=clock)
    metrics.tokens_came("r", num_going_on=0, has_more=True)
    clock.now_s += 0.02
    metrics.tokens_came("r", num_going_on=3, has_more=True)
    clock.now_s += 0.02
    metrics.tokens_came("r", num_going_on=1, has_more=False)
    clock.now_s += 30
    metrics.tokens_came("r", num_going_on=1, has_more=False)  # of a stream that began meanwhile
    shown = samples(metrics.render([]))
    assert shown["manta_inter_token_seconds_count", labels(edge="e")] == 4
    assert abs(shown["manta_inter_token_seconds_sum", labels(edge="e")] - 0.08) < 1e-9


def test_outcomes_say_which_limit_was_missed_and_what_is_left_of_the_error_budget() -> None:
    metrics = EdgeMetrics("e", slo=Slo(ttft_s=0.5, tpot_s=0.05, target=0.9))
    for _ in range(36):
        metrics.request_finished(record())
    metrics.request_finished(record(ttft_s=0.6, tpot_s=1.0))
    metrics.request_finished(record(tpot_s=0.06))
    metrics.request_finished(record(reason=FinishReason.CANCELLED))
    metrics.request_refused("completions", 503, "unavailable")
    metrics.request_refused("completions", 400, "invalid")
    metrics.request_finished(record(reason=FinishReason.ERROR))
    shown = samples(metrics.render([]))
    outcomes = {
        outcome: shown["manta_slo_requests_total", labels(edge="e", outcome=outcome)]
        for outcome in ("met", "late_ttft", "late_tpot", "failed")
    }
    assert outcomes == {"met": 36, "late_ttft": 1, "late_tpot": 1, "failed": 2}
    left = shown["manta_slo_error_budget_remaining_ratio", labels(edge="e")]
    assert abs(left - 0.0) < 1e-9  # 4 of 40 missed, and one in ten may
    assert shown["manta_slo_limit_seconds", labels(limit="ttft")] == 0.5


def test_counters_never_fall_whatever_replicas_do() -> None:
    metrics = EdgeMetrics("e")

    def total(*live: tuple[str, int]) -> float:
        replicas = [ReplicaStatus(name, ready=True, snapshot=Snapshot(num_generated_tokens=n)) for name, n in live]
        return samples(metrics.render(replicas))["manta_generation_tokens_total", labels(pool="engine")]

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


def test_histograms_of_engines_keep_what_replicas_counted_that_are_gone() -> None:
    metrics = EdgeMetrics("e")
    steps, times = StepHistogram(), EngineTimes()
    steps.add(0.02, 3)
    times.add("queue_s", 0.2)
    metrics.replica_left("a", Snapshot(), steps, times)
    shown = samples(metrics.render([ReplicaStatus("b", ready=True, snapshot=Snapshot(), step_times=steps)]))
    assert shown["manta_step_seconds_count", labels(pool="engine")] == 6
    assert shown["manta_engine_queue_seconds_bucket", labels(pool="engine", le="0.25")] == 1
    assert shown["manta_engine_queue_seconds_bucket", labels(pool="engine", le="0.1")] == 0


def test_replica_churn_adds_no_series() -> None:
    pools = {f"p{i}": "prefill" for i in range(3000)} | {f"d{i}": "decode" for i in range(3000)}
    specs = [PoolSpec("prefill", GangSpec(), 2), PoolSpec("decode", GangSpec(), 1)]
    metrics = EdgeMetrics("e", pools=specs, pool_of=pools.get)
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    sizes = []
    for turn in range(1000):
        names = [f"p{turn}", f"p{turn + 1000}", f"d{turn}"]
        for name in names:
            metrics.replica_joined(name, Snapshot(), INFO)
        if turn % 100 == 0:
            seen |= samples(metrics.render([ReplicaStatus(name, True, snapshot=Snapshot()) for name in names])).keys()
            sizes.append(len(seen))
        for name in names:
            metrics.replica_left(name, Snapshot(num_steps=1))
    assert sizes == [sizes[0]] * 10
    replicas = {dict(given)["replica"] for _, given in seen if "replica" in dict(given)}
    assert replicas == {"0", "1"}
    assert not any(name in str(seen) for name in ("p999", "d999", "p0'"))


def test_scaling_is_shown_with_every_reason_from_the_beginning() -> None:
    shown = samples(render_text(busy_page()))
    assert shown["manta_scaling_desired_replicas", labels(pool="engine")] == 3
    assert shown["manta_scaling_replicas", labels(pool="engine", state="starting")] == 1
    assert shown["manta_scaling_gpus", labels(state="budget")] == 8
    assert shown["manta_scaling_decisions_total", labels(pool="engine", reason="forecast")] == 2
    for reason in ReasonCode:
        assert ("manta_scaling_decisions_total", labels(pool="engine", reason=reason)) in shown


def test_without_an_autoscaler_what_is_configured_is_desired() -> None:
    metrics = EdgeMetrics("e", pools=[PoolSpec("engine", GangSpec(tp_size=2), 3)])
    shown = samples(metrics.render([ReplicaStatus("r", ready=True, snapshot=Snapshot())]))
    assert shown["manta_scaling_desired_replicas", labels(pool="engine")] == 3
    assert shown["manta_scaling_replicas", labels(pool="engine", state="ready")] == 1
    assert shown["manta_scaling_gpus", labels(state="used")] == 2


def test_cost_is_price_times_gpu_hours_over_tokens_of_five_minutes() -> None:
    cost = CostMeter(dollars_per_gpu_hour=3.6)
    cost.learn(0.0, num_gpus=2, num_tokens=0)
    assert cost.dollars_per_million_tokens() is None
    cost.learn(100.0, num_gpus=2, num_tokens=1_000_000)
    assert cost.dollars_per_million_tokens() == 0.2  # 200 GPU seconds at a tenth of a cent
    cost.learn(1000.0, num_gpus=1, num_tokens=1_000_000)
    cost.learn(1300.0, num_gpus=1, num_tokens=1_500_000)
    assert cost.gpu_s == 1400
    price = cost.dollars_per_million_tokens()
    assert price is not None
    assert abs(price - 0.6) < 1e-9
    assert CostMeter(None).dollars_per_million_tokens() is None


def test_edges_stand_side_by_side_and_what_they_all_show_stands_once() -> None:
    one, other = busy_metrics("a"), busy_metrics("b")
    other.replica_left("old", Snapshot(num_generated_tokens=500))  # before the first edge began
    replicas = [ReplicaStatus("r", ready=True, snapshot=Snapshot(num_generated_tokens=1000))]
    shown = samples(render_text(merge([one.families(replicas), other.families(replicas)])))
    assert shown["manta_requests_total", labels(edge="a", endpoint="completions", stream="true")] == 1
    assert shown["manta_requests_total", labels(edge="b", endpoint="completions", stream="true")] == 1
    assert shown["manta_generation_tokens_total", labels(pool="engine")] == 1500
    assert shown["manta_scaling_desired_replicas", labels(pool="engine")] == 3
    assert shown["manta_replicas", labels(pool="engine", role="mixed", state="ready")] == 1


def test_vllm_s_names_show_the_whole_service_as_one_engine() -> None:
    page = merge([busy_page("a"), busy_page("b")])
    shown = samples(render_text(vllm_aliases(page, "m")))
    engine = {"model_name": "m", "engine": "0"}
    assert shown["vllm:generation_tokens_total", labels(**engine)] == 1000
    assert shown["vllm:num_requests_waiting", labels(**engine)] == 0
    assert shown["vllm:time_to_first_token_seconds_count", labels(**engine)] == 2
    assert shown["vllm:request_success_total", labels(**engine, finished_reason="stop")] == 2
    assert not any(name.startswith("manta_") for name, _ in shown)
    idle = samples(render_text(vllm_aliases(EdgeMetrics("e").families([]), "m")))
    assert idle["vllm:num_requests_running", labels(**engine)] == 0, "a scaler at zero replicas reads 0, not nothing"
