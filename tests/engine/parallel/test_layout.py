"""How models are split over ranks: heads, columns, vocabularies and layers, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.parallel.layout import ShardLayout, shard_parameters, stage_layers
from manta.engine.parallel.place import RankPlace

SMOLLM2 = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
LLAMA_8B = replace(
    SMOLLM2,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    tie_word_embeddings=False,
)


def parts(shape: ModelShape, tp_size: int) -> list[ShardLayout]:
    return [ShardLayout.of(shape, RankPlace(rank, tp_size)) for rank in range(tp_size)]


def joined(ranges: list[range]) -> list[int]:
    return [index for part in ranges for index in part]


@pytest.mark.parametrize(
    ("tp_size", "heads", "kv_heads"),
    [
        (2, [(0, 6), (6, 9)], [(0, 2), (2, 3)]),
        (3, [(0, 3), (3, 6), (6, 9)], [(0, 1), (1, 2), (2, 3)]),
        (4, [(0, 2), (2, 3), (3, 6), (6, 9)], [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (6, [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9)], [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]),
    ],
)
def test_nine_heads_of_three_groups(tp_size: int, heads: list[tuple[int, int]], kv_heads: list[tuple[int, int]]):
    found = parts(SMOLLM2, tp_size)
    assert [(part.heads.start, part.heads.stop) for part in found] == heads
    assert [(part.kv_heads.start, part.kv_heads.stop) for part in found] == kv_heads


@pytest.mark.parametrize(
    "counts", [(q, kv) for kv in (1, 2, 3, 4, 8) for q in (kv, 2 * kv, 3 * kv, 8 * kv)], ids=lambda c: f"{c[0]}-{c[1]}"
)
def test_every_split_covers_all_and_keeps_a_rank_s_heads_with_their_kv_heads(counts: tuple[int, int]):
    num_heads, num_kv_heads = counts
    shape = replace(SMOLLM2, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=1000, vocab_size=1003)
    group_size = num_heads // num_kv_heads
    for tp_size in range(1, num_heads + 1):
        found = parts(shape, tp_size)
        assert joined([part.heads for part in found]) == list(range(num_heads))
        assert joined([part.intermediate for part in found]) == list(range(1000))
        assert joined([part.vocab for part in found]) == list(range(1003))
        assert {part.vocab_sizes for part in found} == {tuple(len(part.vocab) for part in found)}
        for part in found:
            assert len(part.heads) % len(part.kv_heads) == 0
            own_group = len(part.heads) // len(part.kv_heads)
            kv_of_head = [part.kv_heads[index // own_group] for index in range(len(part.heads))]
            assert kv_of_head == [head // group_size for head in part.heads]
            assert min(len(part.heads), len(part.intermediate), len(part.vocab)) > 0


def test_even_splits_are_even():
    for part in parts(LLAMA_8B, 8):
        assert (len(part.heads), len(part.kv_heads), len(part.intermediate)) == (4, 1, 1792)
        assert len(part.vocab) in (16000, 16064)


@pytest.mark.parametrize("tp_size", [2, 3, 4, 6])
def test_ranks_with_fewer_heads_take_more_of_the_feed_forward_block(tp_size: int):
    held = [shard_parameters(SMOLLM2, part) for part in parts(SMOLLM2, tp_size)]
    assert max(held) <= 1.04 * min(held)


def test_a_rank_alone_holds_everything():
    for shape in (SMOLLM2, LLAMA_8B):
        assert shard_parameters(shape, ShardLayout.whole(shape)) == shape.num_parameters


@pytest.mark.parametrize(
    ("shape", "pp_size", "counts"),
    [(SMOLLM2, 2, [15, 15]), (SMOLLM2, 3, [8, 15, 7]), (LLAMA_8B, 2, [16, 16]), (LLAMA_8B, 4, [7, 9, 9, 7])],
)
def test_layers_are_balanced_with_the_embedding_and_the_head(shape: ModelShape, pp_size: int, counts: list[int]):
    stages = stage_layers(shape, pp_size)
    assert joined(stages) == list(range(shape.num_layers))
    assert [len(stage) for stage in stages] == counts
    layouts = [ShardLayout.of(shape, RankPlace(rank, 1, pp_size)) for rank in range(pp_size)]
    held = [shard_parameters(shape, layout) for layout in layouts]
    assert max(held) - min(held) <= shape.num_parameters / shape.num_layers
    assert [layout.has_embedding for layout in layouts] == [True] + [False] * (pp_size - 1)
    assert [layout.has_head for layout in layouts] == [False] * (pp_size - 1) + [True]


def test_five_layers_make_two_stages_and_five():
    small = replace(SMOLLM2, num_layers=5, vocab_size=64)
    assert [len(stage) for stage in stage_layers(small, 2)] == [3, 2]
    assert [len(stage) for stage in stage_layers(small, 5)] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "tp_size", "pp_size", "message"),
    [
        ({"num_heads": 8, "num_kv_heads": 3}, 1, 1, "8 query heads cannot be divided among 3 KV heads"),
        ({}, 10, 1, r"tensor_parallel_size = 10: the model's 9 query heads .* cannot be divided"),
        ({"intermediate_size": 3}, 4, 1, "an intermediate size of 3"),
        ({"num_layers": 3}, 1, 4, "pipeline_parallel_size = 4: the model has 3 layers"),
    ],
)
def test_splits_that_cannot_be_are_refused_with_the_numbers(
    changes: dict[str, int], tp_size: int, pp_size: int, message: str
):
    with pytest.raises(ConfigError, match=message):
        ShardLayout.of(replace(SMOLLM2, **changes), RankPlace(0, tp_size, pp_size))


def test_ranks_are_numbered_stage_by_stage():
    place = RankPlace(5, tp_size=2, pp_size=3)
    assert (place.tp_rank, place.pp_rank, place.world_size) == (1, 2, 6)
    assert (place.is_first_stage, place.is_last_stage, place.is_driver, place.samples) == (False, True, False, False)
    assert (list(place.stage_ranks), place.sampling_rank) == ([4, 5], 4)
    assert RankPlace.at(tp_rank=1, pp_rank=2, tp_size=2, pp_size=3) == place
