"""How a deployment's sizes are settled: as configured, or from the GPUs of the cluster's nodes with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from manta.cluster.topology import Node, Topology
from manta.deploy.parallelism import resolve_parallel
from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError

LLAMA_8B = str(Path(__file__).parent.parent.parent / "deploy" / "configs" / "llama_3_1_8b" / "config.json")


def config(**overrides: object) -> EngineConfig:
    fields = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 8192, **overrides}
    return EngineConfig.build(LLAMA_8B, **fields)


def nodes(*labels: dict[str, str], num_gpus: int = 4) -> Topology:
    return Topology(
        tuple(Node(f"n{i}", f"10.0.0.{i}", num_gpus, 0, 32, 32, labels=one) for i, one in enumerate(labels))
    )


def sizes(engine: EngineConfig) -> tuple[object, object]:
    return engine.parallel.tensor_parallel_size, engine.parallel.pipeline_parallel_size


def test_given_sizes_stay_and_nothing_is_asked_of_the_cluster() -> None:
    asked = config(tensor_parallel_size=2, pipeline_parallel_size=3)
    engine, reason = resolve_parallel(asked, Topology(()), uses_gpus=True, labels={})
    assert engine is asked
    assert reason == "tensor parallel 2 x pipeline parallel 3, as configured"


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ({"manta/gpu-memory-mib": "143771"}, 1),
        ({"manta/gpu": "NVIDIA-H200"}, 1),
        ({"ray.io/accelerator-type": "A100"}, 1),
        ({"manta/gpu-memory-mib": "15360"}, 2),
    ],
)
def test_auto_takes_as_many_gpus_as_the_model_needs_of_that_kind(label: dict[str, str], expected: int) -> None:
    asked = config(tensor_parallel_size="auto", pipeline_parallel_size="auto")
    engine, reason = resolve_parallel(asked, nodes(label), uses_gpus=True, labels={})
    assert sizes(engine) == (expected, 1)
    assert reason.startswith(f"tensor parallel {expected} x pipeline parallel 1: ")
    assert "16.1 GB of weights" in reason


def test_auto_looks_at_nodes_with_the_right_labels_only() -> None:
    asked = config(tensor_parallel_size="auto")
    small, large = {"manta/gpu-memory-mib": "8192", "pool": "a"}, {"manta/gpu-memory-mib": "143771", "pool": "b"}
    engine, _ = resolve_parallel(asked, nodes(small, large), uses_gpus=True, labels={"pool": "a"})
    assert sizes(engine) == (4, 1)
    engine, _ = resolve_parallel(asked, nodes(small, large), uses_gpus=True, labels={"pool": "b"})
    assert sizes(engine) == (1, 1)


def test_auto_on_cpus_is_one_rank() -> None:
    engine, reason = resolve_parallel(config(tensor_parallel_size="auto"), nodes({}), uses_gpus=False, labels={})
    assert sizes(engine) == (1, 1)
    assert "no GPU" in reason


def test_auto_needs_to_know_the_memory_of_the_gpus() -> None:
    asked = config(tensor_parallel_size="auto")
    with pytest.raises(ConfigError, match=r"GPUs \(NVIDIA-T1000\) of node 10\.0\.0\.0 have; start nodes with"):
        resolve_parallel(asked, nodes({"manta/gpu": "NVIDIA-T1000"}), uses_gpus=True, labels={})


def test_a_model_that_fits_nowhere_is_refused_with_what_is_missing() -> None:
    asked = config(tensor_parallel_size="auto", pipeline_parallel_size=1)
    with pytest.raises(ConfigError, match=r"parallel sizes auto x 1: needs room for 16\.1 GB of weights"):
        resolve_parallel(asked, nodes({"manta/gpu-memory-mib": "2048"}), uses_gpus=True, labels={})
