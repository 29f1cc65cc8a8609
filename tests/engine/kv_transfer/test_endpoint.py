"""Blocks arrive whole and once over real sockets, whatever the splits; orders are answered; nothing is readable."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack

import pytest
import torch

from manta.engine.kv_transfer.endpoint import KvEndpoint
from manta.engine.kv_transfer.messages import (
    Accepted,
    Failed,
    KvAccept,
    KvOpen,
    KvRange,
    KvRevoke,
    KvStop,
    Received,
    Revoked,
    Sent,
    Stopped,
)
from tests.engine.kv_transfer.kv_gangs import (
    LIMITS,
    QUICK,
    KvGang,
    Proxy,
    expected,
    hand_over,
    longer,
    model_shape,
    nan_blocks,
    random_blocks,
    shards_of,
)

SHAPE = model_shape(num_layers=5, num_heads=9, num_kv_heads=3)
SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 3)]
SOURCE_IDS = [6, 2, 9, 3]
TARGET_IDS = [1, 8, 4, 7]
"""A prompt of 27 tokens in blocks of 7."""


@pytest.mark.parametrize("target_split", SPLITS, ids=lambda split: f"to tp {split[0]} pp {split[1]}")
@pytest.mark.parametrize("source_split", SPLITS, ids=lambda split: f"tp {split[0]} pp {split[1]}")
def test_blocks_arrive_whole_and_others_stay_untouched(source_split: tuple[int, int], target_split: tuple[int, int]):
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    sources = shards_of(SHAPE, tp_size=source_split[0], pp_size=source_split[1])
    targets = shards_of(SHAPE, tp_size=target_split[0], pp_size=target_split[1])
    with KvGang(sources, blocks) as source, KvGang(targets, empty) as target:
        num_bytes = hand_over(source, target, 71, SOURCE_IDS, TARGET_IDS, num_tokens=27)
        wanted = expected(blocks, empty, SOURCE_IDS, TARGET_IDS)
        torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)
        a_block = 2 * 7 * SHAPE.head_dim * 4
        cells = sum((shard.layers[1] - shard.layers[0]) * (shard.kv_heads[1] - shard.kv_heads[0]) for shard in targets)
        assert num_bytes == 4 * cells * a_block


def test_endpoints_that_are_let_go_leave_without_the_collector():
    """With them go caches and buffers."""

    def used() -> list[weakref.ref[KvEndpoint]]:
        blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
        with KvGang(shards_of(SHAPE), blocks) as source, KvGang(shards_of(SHAPE), nan_blocks(blocks)) as target:
            hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27)
            return [weakref.ref(endpoint) for gang in (source, target) for endpoint in gang.endpoints]

    gc.collect()
    gc.disable()
    try:
        assert [endpoint() for endpoint in used()] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("frame_bytes", [1, 1000, 5000])
def test_frames_of_any_size_bring_the_same(frame_bytes: int):
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    limits = longer(LIMITS, frame_bytes=frame_bytes, num_slots=2, num_lanes=3)
    with (
        KvGang(shards_of(SHAPE, tp_size=2), blocks, limits=limits) as source,
        KvGang(shards_of(SHAPE, tp_size=3), empty, limits=limits) as target,
    ):
        for generation in range(3):  # over the same connections
            hand_over(source, target, generation, SOURCE_IDS, TARGET_IDS, num_tokens=27)
        wanted = expected(blocks, empty, SOURCE_IDS, TARGET_IDS)
        torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_type_of_cache_is_moved_bit_by_bit(dtype: torch.dtype):
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7, dtype=dtype)
    empty = torch.zeros_like(blocks)
    with KvGang(shards_of(SHAPE), blocks) as source, KvGang(shards_of(SHAPE, tp_size=2), empty) as target:
        hand_over(source, target, 5, SOURCE_IDS, TARGET_IDS, num_tokens=28)
        wanted = empty.view(torch.uint8).clone()
        wanted[:, :, TARGET_IDS] = blocks.view(torch.uint8)[:, :, SOURCE_IDS]
        for shard, caches in zip(target.shards, target.caches, strict=True):
            for layer, sides in enumerate(caches):
                for side, cache in enumerate(sides.tensors):
                    part = wanted[layer, side][:, :, slice(*shard.kv_heads)]
                    assert torch.equal(cache.view(torch.uint8), part)


@pytest.mark.parametrize("range_ends", [(7, 14, 21), (3, 8, 9, 26), (1,), (20, 21)])
def test_ranges_that_end_inside_blocks_send_each_block_once(range_ends: tuple[int, ...]):
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), blocks) as source, KvGang(shards_of(SHAPE), empty) as target:
        num_bytes = hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27, range_ends=range_ends)
        assert num_bytes == 4 * 2 * 7 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4
        wanted = expected(blocks, empty, SOURCE_IDS, TARGET_IDS)
        torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)


def test_blocks_that_the_target_has_already_are_not_sent():
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), blocks) as source, KvGang(shards_of(SHAPE), empty) as target:
        hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27, first_token=14)
        wanted = expected(blocks, empty, SOURCE_IDS[2:], TARGET_IDS[2:])
        torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)


def test_several_generations_travel_at_once_between_several_engines():
    blocks = random_blocks(SHAPE, num_blocks=64, block_size=7)
    empty = nan_blocks(blocks)
    with ExitStack() as stack:
        sources = [stack.enter_context(KvGang(shards_of(SHAPE, tp_size=2), blocks, limits=QUICK)) for _ in range(2)]
        targets = [stack.enter_context(KvGang(shards_of(SHAPE), empty, limits=QUICK)) for _ in range(2)]
        orders = []
        for generation in range(12):
            source, target = sources[generation % 2], targets[generation // 2 % 2]
            ids = list(range(5 * generation, 5 * generation + 5))
            target.obey(KvAccept(generation, ids, 0, 35))
            orders.append((source, KvOpen(generation, target.peer, ids, ids)))
        for target in targets:
            assert all(isinstance(target.event(), Accepted) for _ in range(6))
        for source, order in orders:
            source.obey(order)
        for source, order in orders:
            source.obey(KvRange(order.generation, 0, 35, True))
        for target in targets:
            assert all(isinstance(target.event(), Received) for _ in range(6))
        for number, target in enumerate(targets):
            ids = [
                i
                for generation in range(12)
                if generation // 2 % 2 == number
                for i in range(5 * generation, 5 * generation + 5)
            ]
            wanted = expected(blocks, empty, ids, ids)
            torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)


def test_checksums_travel_with_the_blocks():
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(SHAPE, tp_size=2), blocks, checksums=True) as source,
        KvGang(shards_of(SHAPE, tp_size=3), empty) as target,
    ):
        hand_over(source, target, 1, SOURCE_IDS, TARGET_IDS, num_tokens=27)
        wanted = expected(blocks, empty, SOURCE_IDS, TARGET_IDS)
        torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)


def test_a_rank_that_has_nothing_to_send_says_so():
    shape = model_shape(num_layers=2, num_heads=8, num_kv_heads=1)
    blocks = random_blocks(shape, num_blocks=4, block_size=4)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(shape, tp_size=2), blocks) as source, KvGang(shards_of(shape), empty) as target:
        hand_over(source, target, 1, [3], [0], num_tokens=4)  # both hold the head, one sends it
        torch.testing.assert_close(target.whole(empty), expected(blocks, empty, [3], [0]), equal_nan=True)


def test_stop_and_revoke_are_answered_for_generations_that_nobody_knows():
    blocks = random_blocks(SHAPE, num_blocks=4, block_size=7)
    with KvGang(shards_of(SHAPE), blocks) as gang:
        gang.obey(KvStop(99))
        gang.obey(KvRevoke(98))
        assert [gang.event(), gang.event()] == [Stopped(99), Revoked(98)]


def test_a_generation_that_is_complete_is_revoked_at_once_and_takes_no_more():
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), blocks) as source, KvGang(shards_of(SHAPE), empty) as target:
        hand_over(source, target, 1, [0], [0], num_tokens=7)
        target.obey(KvRevoke(1))
        assert target.event() == Revoked(1)
        source.obey(KvOpen(1, target.peer, [1], [1]))
        event = source.event()
        assert isinstance(event, Failed)
        assert "takes no more of it" in event.reason
        source.obey(KvStop(1))
        assert source.event() == Stopped(1)


def test_a_generation_with_nothing_to_come_is_received_as_soon_as_it_is_accepted():
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    with KvGang(shards_of(SHAPE), blocks) as target:
        target.obey(KvAccept(4, [1, 2], 14, 14))
        assert [target.event(), target.event()] == [Accepted(4), Received(4, 0)]


def test_keys_and_values_cannot_be_read_on_the_way():
    shape = model_shape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64)
    blocks = torch.full((2, 2, 4, 16, 2, 64), 1.2345)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(shape), blocks) as source,
        KvGang(shards_of(shape), empty) as target,
        Proxy(target.peer.rank_urls[0]) as proxy,
    ):
        target.obey(KvAccept(1, [0], 0, 16))
        assert target.event() == Accepted(1)
        source.obey(KvOpen(1, proxy.peer(target.peer), [3], [0]))
        source.obey(KvRange(1, 0, 16, True))
        assert isinstance(target.event(), Received)
        assert len(proxy.seen) > blocks[:, :, 0].nbytes
        assert torch.tensor([1.2345] * 4).numpy().tobytes() not in proxy.seen
        assert target.key not in proxy.seen


def test_a_closed_endpoint_takes_orders_and_says_nothing():
    blocks = random_blocks(SHAPE, num_blocks=4, block_size=7)
    gang = KvGang(shards_of(SHAPE), blocks)
    gang.endpoints[0].close()
    gang.endpoints[0].close()
    gang.obey(KvStop(1))
    assert not gang.has_news()


def test_sent_is_said_once_all_blocks_were_read():
    blocks = random_blocks(SHAPE, num_blocks=10, block_size=7)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), blocks, limits=QUICK) as source, KvGang(shards_of(SHAPE), empty) as target:
        target.obey(KvAccept(1, TARGET_IDS, 0, 27))
        target.event()
        source.obey(KvOpen(1, target.peer, SOURCE_IDS, TARGET_IDS))
        source.obey(KvRange(1, 0, 27, True))
        assert source.event() == Sent(1)
        for sides in source.caches[0]:
            for side in sides.tensors:
                side[SOURCE_IDS] = -1.0  # as their next owner would
        assert isinstance(target.event(), Received)
        wanted = expected(blocks, empty, SOURCE_IDS, TARGET_IDS)
        torch.testing.assert_close(target.whole(empty), wanted, equal_nan=True, rtol=0, atol=0)
