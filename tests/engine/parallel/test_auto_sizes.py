"""What `auto` proposes for models and GPUs, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manta.engine.model_shape import ModelShape
from manta.engine.parallel.auto_sizes import CannotFit, NodeGpus, ParallelSizes, choose_sizes
from tests.shapes import LLAMA_8B

LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, num_heads=64, intermediate_size=28672)
LLAMA_405B = replace(LLAMA_8B, num_layers=126, hidden_size=16384, num_heads=128, intermediate_size=53248)
H200, A100, L4 = NodeGpus(8, 140e9), NodeGpus(8, 80e9), NodeGpus(8, 24e9)


@pytest.mark.parametrize(
    ("shape", "nodes", "sizes"),
    [
        (LLAMA_8B, [H200], (1, 1)),
        (LLAMA_8B, [NodeGpus(8, 40e9)], (1, 1)),
        (LLAMA_8B, [L4], (2, 1)),
        (LLAMA_70B, [H200], (2, 1)),
        (LLAMA_70B, [A100], (4, 1)),
        (LLAMA_70B, [L4, L4], (8, 2)),
        (LLAMA_70B, [NodeGpus(1, 140e9)] * 3, (1, 2)),
        (LLAMA_405B, [H200] * 2, (8, 2)),
        (LLAMA_405B, [A100] * 8, (8, 2)),
        (LLAMA_405B, [NodeGpus(6, 140e9)] * 3, (4, 3)),
        (LLAMA_8B, [], (1, 1)),
    ],
)
def test_the_fewest_gpus_are_taken_in_one_node_where_they_fit(
    shape: ModelShape, nodes: list[NodeGpus], sizes: tuple[int, int]
):
    found = choose_sizes(shape, nodes, bytes_per_element=2, max_model_len=8192)
    assert isinstance(found, ParallelSizes), found
    assert (found.tp_size, found.pp_size) == sizes


def test_the_reason_has_the_numbers():
    found = choose_sizes(LLAMA_70B, [A100], bytes_per_element=2, max_model_len=8192)
    assert isinstance(found, ParallelSizes)
    assert found.reason == (
        "141.1 GB of weights and a cache of at least 8192 tokens need 4 GPUs of one node: 35.3 GB of weights on each, "
        "in the 72.0 GB that may be used of each"
    )


def test_a_long_context_takes_more_gpus():
    short = choose_sizes(LLAMA_8B, [A100], bytes_per_element=2, max_model_len=8192)
    long = choose_sizes(LLAMA_8B, [NodeGpus(8, 36e9)], bytes_per_element=2, max_model_len=131072)
    assert isinstance(short, ParallelSizes)
    assert isinstance(long, ParallelSizes)
    assert (short.tp_size, long.tp_size) == (1, 2)


def test_only_splits_that_are_even_are_proposed():
    nine_heads = replace(LLAMA_8B, num_heads=9, num_kv_heads=3, head_dim=448, intermediate_size=14337)
    found = choose_sizes(nine_heads, [NodeGpus(8, 16e9)], bytes_per_element=2, max_model_len=2048)
    assert isinstance(found, ParallelSizes)
    assert (found.tp_size, found.pp_size) == (3, 1)


def test_a_size_that_is_given_stays():
    found = choose_sizes(LLAMA_8B, [H200, H200], bytes_per_element=2, max_model_len=8192, pp_size=2)
    assert isinstance(found, ParallelSizes)
    assert (found.tp_size, found.pp_size) == (1, 2)


def test_what_does_not_fit_is_told_with_the_numbers():
    found = choose_sizes(LLAMA_405B, [L4, L4], bytes_per_element=2, max_model_len=8192)
    assert isinstance(found, CannotFit)
    assert "needs room for 811.7 GB of weights and a cache of at least 8192 tokens" in found.missing
    assert "16 GPUs (at most 8 in one node)" in found.missing
    found = choose_sizes(LLAMA_8B, [NodeGpus(6, 140e9)], bytes_per_element=2, tp_size=8)
    assert isinstance(found, CannotFit)
    assert "blocks of GPUs in one node for tensor 8, and there are 6 GPUs" in found.missing
