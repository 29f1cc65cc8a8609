"""`pools:` in the configuration: what each pool gets, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manta.cluster.routing.roles import Role
from manta.deploy.config import DeployConfig, Pool, load_config, parse_overrides, pools_of
from manta.engine.errors import ConfigError

BOTH = {"pools.prefill.num_replicas": 2, "pools.decode.num_replicas": 3}


def write(folder: Path, text: str) -> str:
    file = folder / "a.yaml"
    file.write_text(text)
    return str(file)


def by_name(config: DeployConfig) -> dict[str, Pool]:
    return {pool.name: pool for pool in pools_of(config)}


def test_without_pools_one_deployment_does_both() -> None:
    (pool,) = pools_of(load_config(None, {"num_replicas": 4, "node_labels": {"zone": "a"}}))
    assert (pool.name, pool.role, pool.num_replicas, pool.node_labels) == ("engine", Role.MIXED, 4, {"zone": "a"})


def test_each_pool_has_its_own_sizes_nodes_and_engine_fields(tmp_path: Path) -> None:
    text = """
engine: {device: cuda, scheduler: {max_num_seqs: 64}}
serving: {node_labels: {zone: a}}
pools:
  prefill: {num_replicas: 2, tensor_parallel_size: 4, gpu: NVIDIA-H200, engine: {max_num_batched_tokens: 16384}}
  decode: {num_replicas: 3, pipeline_parallel_size: auto, node_labels: {zone: b}, gpus_per_rank: 0.5}
"""
    pools = by_name(load_config(write(tmp_path, text)))
    prefill, decode = pools["prefill"], pools["decode"]
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert (prefill.num_replicas, decode.num_replicas) == (2, 3)
    assert (prefill.engine.parallel.tensor_parallel_size, decode.engine.parallel.tensor_parallel_size) == (4, 1)
    assert (prefill.engine.parallel.pipeline_parallel_size, decode.engine.parallel.pipeline_parallel_size) == (
        1,
        "auto",
    )
    assert prefill.node_labels == {"zone": "a", "manta/gpu": "NVIDIA-H200"}
    assert decode.node_labels == {"zone": "b"}
    assert (prefill.gpus_per_rank, decode.gpus_per_rank) == (1.0, 0.5)
    assert prefill.engine.scheduler.max_num_batched_tokens == 16384
    assert decode.engine.scheduler.max_num_batched_tokens is None
    assert prefill.engine.scheduler.max_num_seqs == decode.engine.scheduler.max_num_seqs == 64


@pytest.mark.parametrize("text", ["pools: {prefill: {}, decode: {}}", "pools:\n  prefill:\n  decode:\n"])
def test_a_pool_that_says_nothing_is_a_pool(tmp_path: Path, text: str) -> None:
    assert [pool.num_replicas for pool in pools_of(load_config(write(tmp_path, text)))] == [1, 1]


def test_single_fields_can_be_set_by_their_whole_names() -> None:
    settings = ["pools.prefill.num_replicas=2", "pools.decode.engine={max_num_seqs: 8}"]
    pools = by_name(load_config(None, parse_overrides(settings)))
    assert (pools["prefill"].num_replicas, pools["decode"].num_replicas) == (2, 1)
    assert pools["decode"].engine.scheduler.max_num_seqs == 8


def test_a_leaf_s_name_never_means_a_pool_s_field() -> None:
    config = load_config(None, {"tensor_parallel_size": 2, "num_replicas": 2})
    assert config.engine.parallel.tensor_parallel_size == 2
    assert config.serving.num_replicas == 2
    assert config.pools.prefill is None


def test_labels_in_a_file_are_one_value(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "serving: {node_labels: {manta/gpu: NVIDIA-H200, zone: 'in(a,b)'}}"))
    assert config.serving.node_labels == {"manta/gpu": "NVIDIA-H200", "zone": "in(a,b)"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pools.prefill.num_replicas": 2}, "pools.prefill is there without pools.decode: give both, or neither"),
        ({"pools.decode.num_replicas": 2}, "pools.decode is there without pools.prefill"),
        ({**BOTH, "serving.num_replicas": 2}, "serving.num_replicas = 2: with pools, replicas are counted by pools"),
        (
            {**BOTH, "pools.prefill.engine": {"block_size": 32}, "pools.decode.engine": {"block_size": 64}},
            "cache.block_size is 32 (on auto) in pools.prefill and 64 (on auto) in pools.decode",
        ),
        ({**BOTH, "pools.prefill.engine": {"device": "cpu"}}, "left open (on cpu) in pools.prefill"),
        (
            {**BOTH, "pools.decode.engine": {"dtype": "float16"}},
            "model.dtype is 'auto' in pools.prefill and 'float16' in pools.decode: both pools serve the same model",
        ),
        ({**BOTH, "pools.prefill.engine": {"max_num_batched_tokns": 1}}, "pools.prefill.engine: unknown field"),
        ({**BOTH, "pools.prefill.num_replicas": 0}, "pools.prefill.num_replicas = 0"),
        ({"pools.prefil.num_replicas": 1}, "did you mean 'pools.prefill.num_replicas'?"),
    ],
)
def test_what_cannot_work_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


def test_devices_of_two_kinds_agree_when_both_say_the_block_size() -> None:
    pools = by_name(load_config(None, {**BOTH, "block_size": 16, "pools.prefill.engine": {"device": "cpu"}}))
    assert (pools["prefill"].engine.device, pools["decode"].engine.device) == ("cpu", "auto")
