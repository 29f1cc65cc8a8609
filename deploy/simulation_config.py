"""Configuration of `manta simulate`: replicas, workload, cold starts, failures. Knows no simulator.

Such a file has `simulate:`, and `slo:` and `autoscaling:` as a file for `manta serve` has them. It is none itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from manta.engine.config import Section, validated
from manta.engine.errors import ConfigError

from .autoscaling_config import AutoscalingConfig, SloConfig
from .config import CONFIGS_DIR, config_file, read_yaml


class ReplicaConfig(Section):
    """What one replica is."""

    gpu: str = Field(default="h100", description="of the table in engine/hardware.py")
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    weight_bits: float | None = Field(default=None, gt=0, description="of linear layers; default: the dtype's")
    activation_bits: int = Field(default=16, description="of what enters matrix products: 8 uses the faster units")
    kv_dtype: str | None = Field(default=None, description="of KV entries, as fp8; default: the dtype")
    memory_fraction: float = Field(default=0.9, gt=0, le=1, description="of GPU memory, for weights and KV")
    max_num_seqs: int = Field(default=256, ge=1)
    max_num_batched_tokens: int = Field(default=8192, ge=128)
    tpot_target_ms: float | None = Field(
        default=None, gt=0, description="steps with decodes take no more prompt tokens than keep them below this"
    )
    block_size: int = Field(default=64, ge=1, description="tokens; 512 for traces that name blocks of it")

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class LengthsConfig(Section):
    """A lognormal distribution, clipped. Tokens."""

    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    low: int = Field(default=1, ge=1)
    high: int = Field(default=32_768, ge=1)


class WorkloadConfig(Section):
    """Requests: a trace's, or made up with arrivals of one kind and lengths of a distribution or a trace."""

    trace: str | None = Field(default=None, description="a name of bench/data or a file (.jsonl, .csv, .gz)")
    arrivals: Literal["trace", "poisson", "bursty", "diurnal", "spike", "rates"] = Field(
        default="trace", description="`trace`: as the trace has them; the others are made up"
    )
    rate: float | None = Field(default=None, gt=0, description="requests/s on average (of `spike`: before it)")
    rate_scales: tuple[float, ...] = Field(
        default=(1.0,), min_length=1, description="each is simulated; a trace's requests are copied, a little shifted"
    )
    shift_s: float = Field(default=5.0, ge=0, description="by which copies of a trace's requests are shifted at most")
    begin_s: float = Field(default=0.0, ge=0, description="of the trace that is used")
    duration_s: float | None = Field(default=None, gt=0, description="default: the whole trace, else 1,800 s")
    prompt: LengthsConfig | None = Field(default=None, description="default: as in the trace")
    output: LengthsConfig | None = Field(default=None, description="default: as in the trace")
    spike_factor: float = Field(default=50.0, ge=1)
    spike_begins_s: float = Field(default=300.0, ge=0)
    spike_lasts_s: float = Field(default=120.0, gt=0)
    burst_factor: float = Field(default=8.0, ge=1, description="rate of a burst over that of calm")
    burst_s: float = Field(default=20.0, gt=0, description="a burst lasts so long on average")
    calm_s: float = Field(default=100.0, gt=0)
    day_s: float = Field(default=3600.0, gt=0, description="of `diurnal`: one period")
    least_share: float = Field(default=0.1, ge=0, le=1, description="of `diurnal`: the least rate over the highest")
    rates: str | None = Field(default=None, description="of `rates`: a name of bench/data or a CSV file of t_s, rate")
    faster: float = Field(default=1.0, gt=0, description="of `rates`: the table's time passes so many times as fast")

    @model_validator(mode="after")
    def all_there(self) -> WorkloadConfig:
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("give a trace, or arrivals of another kind with a rate")
        if self.arrivals != "trace" and self.rate is None:
            raise ValueError(f"arrivals {self.arrivals!r} need a rate")
        if self.arrivals == "rates" and self.rates is None:
            raise ValueError("arrivals 'rates' need `rates`, a table of them")
        if self.trace is None and (self.prompt is None or self.output is None):
            raise ValueError("without a trace, prompt and output need distributions: {median, sigma, low, high}")
        return self


class FailureConfig(Section):
    """Replicas that die."""

    at_s: float = Field(ge=0)
    num_replicas: int = Field(default=1, ge=1)
    pool: str | None = None


class SimulateConfig(Section):
    """One simulated fleet under one load."""

    model: str = Field(default="", description="folder or config.json of the model; its weights are not needed")
    replica: ReplicaConfig = ReplicaConfig()
    prefill_replica: ReplicaConfig | None = Field(
        default=None, description="with it prompts have replicas of their own, and `replica` is what decodes"
    )
    workload: WorkloadConfig = Field(default=WorkloadConfig(trace="azure2023_conv"))
    cold_start: dict[str, float] = Field(
        default={"place": 2.0, "import": 6.0, "weights": 20.0, "graphs": 6.0}, description="seconds by phase"
    )
    cold_start_spread: float = Field(default=0.0, ge=0, lt=1, description="starts take up to this share more or less")
    failures: tuple[FailureConfig, ...] = ()
    delay_s: float = Field(default=0.5, ge=0, description="from a snapshot to a change of the fleet")
    drain_grace_s: float = Field(default=30.0, ge=0)
    max_held: int = Field(default=4096, ge=0, description="requests that wait at the edge")
    max_hold_s: float = Field(default=120.0, gt=0)
    seed: int = 0

    @field_validator("cold_start")
    @classmethod
    def phases_take_time(cls, value: dict[str, float]) -> dict[str, float]:
        if not value or min(value.values()) < 0 or sum(value.values()) <= 0:
            raise ValueError("give seconds for at least one phase, as {weights: 20}")
        return value


class SimulationFile(Section):
    """All of such a file."""

    simulate: SimulateConfig = SimulateConfig()
    slo: SloConfig = SloConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()


def load_simulation(target: str, changes: dict[str, Any]) -> SimulationFile:
    """A YAML file or the name of a bundled one; `changes` are fields of `simulate.workload`. Raises ConfigError."""
    file = config_file(target)
    if file is None:
        known = ", ".join(sorted(path.stem for path in CONFIGS_DIR.glob("autoscale-*.yaml")))
        raise ConfigError(f"--config {target!r}: there is no such file; bundled ones are {known}", field="--config")
    tree = read_yaml(file)
    section = tree.get("simulate")
    if not isinstance(section, dict):
        raise ConfigError(f"{file} has no section `simulate`: it is no configuration of a simulation", field="simulate")
    workload = section.setdefault("workload", {})
    if isinstance(workload, dict):
        workload.update(changes)
    found = validated(SimulationFile, tree)
    if not found.simulate.model:
        raise ConfigError(f"{file}: simulate.model is missing: a folder or config.json", field="simulate.model")
    if found.slo.ttft_s is None and found.slo.tpot_s is None:
        raise ConfigError(f"{file}: give slo.ttft_s or slo.tpot_s: without limits nothing can be missed", field="slo")
    return found


def with_trace(trace: Path | None) -> dict[str, Any]:
    """Changes of a workload for `--trace`."""
    return {} if trace is None else {"trace": str(trace), "arrivals": "trace"}
