"""What a rank builds: its layers' caches for its heads, as many blocks as everybody, only its weights; or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manta.engine.config import EngineConfig
from manta.engine.errors import ConfigError
from manta.engine.model_runner import BuiltRunner, build_model_runner
from manta.engine.model_source import ModelSource
from manta.engine.parallel.groups import Groups
from manta.engine.parallel.layout import ShardLayout, shard_parameters
from manta.engine.parallel.place import RankPlace
from tests.engine.parallel.ranks import on_ranks
from tests.engine.parallel.shards import build_shard, random_shape


def built_by(shape: Any, *, tp_size: int = 1, pp_size: int = 1, **overrides: Any) -> list[BuiltRunner]:
    def work(place: RankPlace, groups: Groups) -> BuiltRunner:
        return build_shard(shape, place, groups, **overrides)

    return on_ranks(work, tp_size=tp_size, pp_size=pp_size)


def test_all_ranks_take_as_many_blocks_as_the_one_with_the_least_room():
    first, second = built_by(random_shape(q=9, kv=3), tp_size=2, cpu_cache_gib=0.01)  # two KV heads and one
    assert first.num_blocks == second.num_blocks
    assert first.max_model_len == second.max_model_len
    assert "fit 0.01 GiB" in first.notes[0]
    assert second.notes[0].startswith(f"{first.num_blocks} blocks, as many as the rank with the least room holds")
    assert first.memory_ledger_bytes["kv_cache"] == 2 * second.memory_ledger_bytes["kv_cache"]


def test_caches_are_those_of_the_rank_s_layers_and_kv_heads():
    shape = random_shape(q=8, kv=2, num_layers=5)
    ranks = built_by(shape, tp_size=2, pp_size=2, num_blocks=7)
    assert [len(built.runner.caches) for built in ranks] == [3, 3, 2, 2]
    assert {keys.shape for built in ranks for keys, *_ in built.runner.caches} == {(7, 16, 1, 16)}


def test_a_rank_holds_the_weights_of_its_part():
    shape = random_shape(q=8, kv=2)
    for rank, built in enumerate(built_by(shape, tp_size=2, pp_size=3)):
        layout = ShardLayout.of(shape, RankPlace(rank, 2, 3))
        assert built.memory_ledger_bytes["weights"] == 4 * shard_parameters(shape, layout)


@pytest.mark.parametrize(
    ("sizes", "place", "message"),
    [
        ({"q": 8, "kv": 3}, RankPlace(0), "8 query heads cannot be divided among 3 KV heads"),
        ({"q": 8, "kv": 8}, RankPlace(0, 64), "more ranks"),
        ({"q": 8, "kv": 4, "num_layers": 3}, RankPlace(0, 1, 4), "3 layers"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_is_read(sizes: dict[str, int], place: RankPlace, message: str):
    groups = Groups(place, "gloo", None, None, None)
    config = EngineConfig.build("random", device="cpu")
    with pytest.raises(ConfigError, match=message):
        build_model_runner(
            config,
            ModelSource("missing", "safetensors", Path("/nowhere"), None),
            random_shape(**sizes),
            place=place,
            groups=groups,
        )
