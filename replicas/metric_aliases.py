"""Metrics under vLLM's names beside ours, for its dashboards and KEDA recipes. Knows one page of metrics and no edge.

One engine, "0", stands for the whole service: the numbers of all replicas and edges added up. They are on the public
port's page alone, which every edge answers alike, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from .metrics_table import BY_NAME, Kind


@dataclass(frozen=True)
class Alias:
    """A metric of vLLM's, and which of ours it is."""

    name: str
    source: str
    how: Literal["sum", "mean"] = "sum"
    keeps: Mapping[str, str] | None = None
    """Labels that stay, ours to vLLM's."""

    @property
    def kind(self) -> Kind:
        return BY_NAME[self.source].kind


VLLM = (
    Alias("vllm:num_requests_running", "manta_requests_running"),
    Alias("vllm:num_requests_waiting", "manta_requests_waiting"),
    Alias("vllm:kv_cache_usage_perc", "manta_kv_cache_usage", how="mean"),
    Alias("vllm:gpu_cache_usage_perc", "manta_kv_cache_usage", how="mean"),
    Alias("vllm:num_preemptions", "manta_preemptions_total"),
    Alias("vllm:prompt_tokens", "manta_prompt_tokens_total"),
    Alias("vllm:generation_tokens", "manta_generation_tokens_total"),
    Alias("vllm:prefix_cache_queries", "manta_prompt_tokens_total"),
    Alias("vllm:prefix_cache_hits", "manta_cached_prompt_tokens_total"),
    Alias("vllm:request_success", "manta_choices_total", keeps={"finish_reason": "finished_reason"}),
    Alias("vllm:time_to_first_token_seconds", "manta_time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "manta_inter_token_seconds"),
    Alias("vllm:time_per_output_token_seconds", "manta_inter_token_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "manta_time_per_output_token_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "manta_request_seconds"),
    Alias("vllm:request_queue_time_seconds", "manta_engine_queue_seconds"),
    Alias("vllm:request_prompt_tokens", "manta_request_prompt_tokens"),
    Alias("vllm:request_generation_tokens", "manta_request_completion_tokens"),
    Alias("vllm:iteration_tokens_total", "manta_batch_tokens"),
)
"""vLLM's time_per_output_token_seconds is its old name for the gap between two tokens."""


def vllm_aliases(page: Iterable[Metric], model_name: str) -> list[Metric]:
    """Families under vLLM's names, made from a page of ours."""
    families = {family.name: family for family in page}
    found = []
    for alias in VLLM:
        source = families.get(alias.source) or families.get(alias.source.removesuffix("_total"))
        if source is not None:
            found.append(_family(alias, source, model_name))
    return found


def _family(alias: Alias, source: Metric, model_name: str) -> Metric:
    family = Metric(alias.name, f"As {alias.source}: {source.documentation}", alias.kind)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    num_of: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for sample in source.samples:
        suffix = sample.name.removeprefix(source.name)
        labels = {"model_name": model_name, "engine": "0"}
        labels |= {theirs: sample.labels[ours] for ours, theirs in (alias.keeps or {}).items()}
        if "le" in sample.labels:
            labels["le"] = sample.labels["le"]
        key = suffix, tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + sample.value
        num_of[key] = num_of.get(key, 0) + 1
    for (suffix, labels), total in sums.items():
        value = total / num_of[suffix, labels] if alias.how == "mean" else total
        family.samples.append(Sample(alias.name + suffix, dict(labels), value))
    if not family.samples and alias.kind == "gauge":  # no replica is there: nothing runs and nothing waits
        family.add_sample(alias.name, {"model_name": model_name, "engine": "0"}, 0.0)
    return family
