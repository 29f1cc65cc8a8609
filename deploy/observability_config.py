"""Configuration of what is shown of a deployment, and where it goes. Knows no engine and no Ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from manta.engine.config import Section


class ObservabilityConfig(Section):
    """Metrics, Prometheus and traces."""

    full_names_only = True

    metrics_aliases: Literal["none", "vllm"] = Field(
        default="none", description="vllm: the public /metrics shows vLLM's names, too"
    )
    prometheus: Literal["auto", "always", "never"] = Field(
        default="auto", description="a Prometheus beside `manta serve`; auto: where its binary is installed"
    )
    prometheus_port: int | None = Field(
        default=None, ge=1, le=65535, description="default: serving.port + 1000, or a free one if that is taken"
    )
    prometheus_dir: str | None = Field(
        default=None, min_length=1, description="where its data stays; default: a folder that ends with `manta serve`"
    )
    prometheus_retention: str = Field(
        default="15d", pattern=r"^[0-9]+(ms|s|m|h|d|w|y)$", description="how long it keeps data"
    )
    scrape_interval_s: float = Field(default=5.0, ge=0.1, le=300, description="how often Prometheus asks")
    gpu_dollars_per_hour: float | None = Field(
        default=None, gt=0, description="price of a GPU, for manta_cost_per_million_tokens_dollars"
    )
    traces_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="where OpenTelemetry traces go, by OTLP/HTTP: http://127.0.0.1:4318/v1/traces; default: nowhere",
    )
    traces_share: float = Field(
        default=1.0, gt=0, le=1, description="of requests that are traced; those whose caller traces them always are"
    )
