"""Every target gets each of its layers and heads from one source, however both sides are split."""

from __future__ import annotations

from collections import Counter

import pytest

from manta.engine.errors import ConfigError
from manta.engine.kv_transfer.layout import Part, parts_between
from manta.engine.kv_transfer.messages import KvShard
from manta.engine.model_shape import ModelShape
from tests.engine.kv_transfer.kv_gangs import model_shape, shards_of

SHAPES = {
    "nine heads of three": model_shape(num_layers=7, num_heads=9, num_kv_heads=3),
    "eight of eight": model_shape(num_layers=5, num_heads=8, num_kv_heads=8),
    "32 of eight": model_shape(num_layers=3, num_heads=32, num_kv_heads=8),
    "fourteen of two": model_shape(num_layers=4, num_heads=14, num_kv_heads=2),
    "eight of one": model_shape(num_layers=3, num_heads=8, num_kv_heads=1),
}
SPLITS = [(tp_size, pp_size) for tp_size in range(1, 9) for pp_size in range(1, 4)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_target_gets_each_layer_of_each_of_its_heads_exactly_once(shape: ModelShape):
    all_shards = [shards_of(shape, tp_size=tp_size, pp_size=pp_size) for tp_size, pp_size in SPLITS]
    for sources in all_shards:
        for targets in all_shards:
            got: Counter[tuple[int, int, int]] = Counter()
            for part in parts_between(sources, targets):
                held = sources[part.source]
                for layer in range(*part.layers):
                    assert held.layers[0] <= layer < held.layers[1]
                    for head in range(*part.kv_heads):
                        assert held.kv_heads[0] <= head < held.kv_heads[1]
                        got[part.target, layer, head] += 1
            wanted = {
                (rank, layer, head)
                for rank, shard in enumerate(targets)
                for layer in range(*shard.layers)
                for head in range(*shard.kv_heads)
            }
            assert got == dict.fromkeys(wanted, 1)


def test_one_rank_sends_three_a_head_each():
    shape = SHAPES["nine heads of three"]
    assert parts_between(shards_of(shape), shards_of(shape, tp_size=3)) == [
        Part(0, 0, (0, 7), (0, 1)),
        Part(0, 1, (0, 7), (1, 2)),
        Part(0, 2, (0, 7), (2, 3)),
    ]


def test_heads_of_one_source_that_lie_side_by_side_go_in_one_part():
    sources = [KvShard((0, 2), (0, 2)), KvShard((0, 2), (2, 3))]
    targets = [KvShard((0, 2), (0, 3))]
    assert parts_between(sources, targets) == [Part(0, 0, (0, 2), (0, 2)), Part(1, 0, (0, 2), (2, 3))]


def test_ranks_that_hold_the_same_head_share_the_work():
    sources = [KvShard((0, 4), (0, 1)), KvShard((0, 4), (0, 1))]
    targets = [KvShard((0, 4), (0, 1))] * 4
    senders = Counter(part.source for part in parts_between(sources, targets))
    assert senders == {0: 2, 1: 2}


def test_stages_that_end_at_other_layers_meet_in_the_middle():
    sources = [KvShard((0, 3), (0, 2)), KvShard((3, 5), (0, 2))]
    targets = [KvShard((0, 2), (0, 2)), KvShard((2, 5), (0, 2))]
    assert parts_between(sources, targets) == [
        Part(0, 0, (0, 2), (0, 2)),
        Part(0, 1, (2, 3), (0, 2)),
        Part(1, 1, (3, 5), (0, 2)),
    ]


def test_a_target_with_more_layers_than_the_source_is_refused_by_name():
    with pytest.raises(ConfigError, match="layers 2 to 3 of KV heads 0 to 0"):
        parts_between([KvShard((0, 2), (0, 1))], [KvShard((0, 4), (0, 1))])
