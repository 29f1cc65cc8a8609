"""Peers that die, freeze, crawl, lie or are cut off: bounded in time, others unharmed, and then it works again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from manta.engine.kv_transfer.frames import Ack, Announce, Drop, Frame, Geometry, Refused, Welcome, checksums
from manta.engine.kv_transfer.messages import (
    Accepted,
    Failed,
    KvAccept,
    KvEvent,
    KvOpen,
    KvRange,
    KvRevoke,
    KvShard,
    KvStop,
    Received,
    Revoked,
    Sent,
    Stopped,
)
from tests.engine.kv_transfer.kv_gangs import (
    QUICK,
    WAIT_S,
    KvGang,
    Proxy,
    RawSender,
    RawTarget,
    expected,
    hand_over,
    longer,
    model_shape,
    nan_blocks,
    random_blocks,
    shards_of,
)
from tests.engine.kv_transfer.kv_process import BLOCK_SIZE, NUM_BLOCKS, SHAPE, KvProcess

SMALL = model_shape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4)
GEOMETRY = Geometry(4, 4, "float32")
A_BLOCK = 2 * 4 * 2 * 4 * 4
"""Bytes of keys and values of one block of one layer of SMALL."""
MANY = list(range(NUM_BLOCKS))
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE


def small_gang(**options: Any) -> tuple[KvGang, torch.Tensor]:
    blocks = nan_blocks(random_blocks(SMALL, num_blocks=8, block_size=4))
    return KvGang(shards_of(SMALL), blocks, limits=longer(QUICK, silence_s=60.0), **options), blocks


def a_frame(sequence: int, generation: int, *, layer: int = 0, block: int = 0, **changes: object) -> Frame:
    values = {
        "layers": (layer, layer + 1),
        "kv_heads": (0, 2),
        "blocks": (block, block + 1),
        "num_bytes": A_BLOCK,
    }
    return Frame(sequence, generation, **{**values, **changes})  # type: ignore[arg-type]


def failed(event: KvEvent, generation: int, text: str) -> None:
    assert isinstance(event, Failed), event
    assert event.generation == generation
    assert text in event.reason


def wait_for_bytes(target: KvGang) -> None:
    """Until the first bytes of a transfer were written."""
    end_s = time.monotonic() + WAIT_S
    while not target.endpoints[0].num_received_bytes:
        assert time.monotonic() < end_s, "nothing came"
        time.sleep(0.005)


def test_frames_of_a_generation_that_is_revoked_in_mid_transfer_are_drained_and_change_nothing():
    gang, before = small_gang()
    with gang, RawSender(gang.peer.rank_urls[0], gang.key) as sender:
        sender.hello(GEOMETRY)
        assert isinstance(sender.answer(), Welcome)
        gang.obey(KvAccept(1, [5, 6], 0, 8))
        assert gang.event() == Accepted(1)
        sender.say(Announce(1))
        sender.say(a_frame(1, 1), b"\1" * A_BLOCK)
        assert sender.answer() == Ack(1)
        gang.obey(KvRevoke(1))
        assert gang.event() == Revoked(1)
        written = gang.whole(before).clone()
        assert not torch.equal(written[0, :, 5], before[0, :, 5])
        assert sender.answer() == Drop(1, "it was withdrawn")
        sender.say(a_frame(2, 1, block=1), b"\2" * A_BLOCK)
        assert sender.answer() == Ack(2)  # read, thrown away
        torch.testing.assert_close(gang.whole(before), written, equal_nan=True, rtol=0, atol=0)
        gang.obey(KvAccept(2, [5, 6], 0, 4))  # the same connection serves the next one
        assert gang.event() == Accepted(2)
        for layer in range(2):
            sender.say(a_frame(3 + layer, 2, layer=layer), b"\3" * A_BLOCK)
        assert gang.event() == Received(2, 2 * A_BLOCK)


def test_a_corrupted_frame_fails_its_generation_and_is_not_written():
    gang, before = small_gang()
    with gang, RawSender(gang.peer.rank_urls[0], gang.key) as sender:
        sender.hello(GEOMETRY)
        sender.answer()
        gang.obey(KvAccept(1, [5], 0, 4))
        assert gang.event() == Accepted(1)
        payload = bytearray(b"\1" * A_BLOCK)
        sums = checksums(memoryview(payload), num_layers=1, num_blocks=1)
        payload[17] ^= 4
        sender.say(a_frame(1, 1, checksums=sums), bytes(payload))
        failed(gang.event(), 1, "checksums")
        assert sender.answer() == Ack(1)
        assert isinstance(sender.answer(), Drop)
        torch.testing.assert_close(gang.whole(before), before, equal_nan=True, rtol=0, atol=0)
        gang.obey(KvRevoke(1))
        assert gang.event() == Revoked(1)


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        ({"blocks": (1, 2)}, A_BLOCK),
        ({"blocks": (-1, 0)}, A_BLOCK),
        ({"blocks": (0, 0)}, A_BLOCK),
        ({"layers": (1, 3)}, A_BLOCK),
        ({"kv_heads": (0, 3)}, A_BLOCK),
        ({"num_bytes": A_BLOCK - 1}, A_BLOCK - 1),
        ({}, A_BLOCK - 1),
        ({"slot": 0}, A_BLOCK),
    ],
)
def test_a_frame_that_is_no_part_of_what_was_accepted_is_not_written(changes: dict[str, Any], num_bytes: int):
    gang, before = small_gang()
    with gang, RawSender(gang.peer.rank_urls[0], gang.key) as sender:
        sender.hello(GEOMETRY)
        sender.answer()
        gang.obey(KvAccept(1, [5], 0, 4))
        assert gang.event() == Accepted(1)
        sender.say(a_frame(1, 1, **changes), b"\1" * num_bytes)
        failed(gang.event(), 1, "Frame(")
        torch.testing.assert_close(gang.whole(before), before, equal_nan=True, rtol=0, atol=0)


def test_the_same_frame_twice_is_never_more_than_was_accepted():
    gang, _ = small_gang()
    with gang, RawSender(gang.peer.rank_urls[0], gang.key) as sender:
        sender.hello(GEOMETRY)
        sender.answer()
        gang.obey(KvAccept(1, [5], 0, 4))
        assert gang.event() == Accepted(1)
        sender.say(a_frame(1, 1), b"\1" * A_BLOCK)
        sender.say(a_frame(2, 1), b"\1" * A_BLOCK)
        failed(gang.event(), 1, "still to come")


def test_a_peer_with_blocks_of_another_kind_is_refused_by_name():
    other = model_shape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8)
    blocks = random_blocks(other, num_blocks=8, block_size=4)
    gang, _ = small_gang()
    with gang, KvGang(shards_of(other), blocks, limits=QUICK) as source:
        gang.obey(KvAccept(1, [5], 0, 4))
        source.obey(KvOpen(1, gang.peer, [0], [5]))
        failed(source.event(), 1, "head_dim=8")


def test_a_target_whose_shards_are_of_a_deeper_model_is_refused_by_name():
    gang, _ = small_gang()
    with gang:
        peer = msgspec.structs.replace(gang.peer, shards=[KvShard((0, 3), (0, 2))])
        gang.obey(KvOpen(1, peer, [0], [5]))
        failed(gang.event(), 1, "the same model")
        gang.obey(KvStop(1))
        assert gang.event() == Stopped(1)


def test_who_has_another_key_is_not_let_in_and_disturbs_nobody():
    blocks = random_blocks(SMALL, num_blocks=8, block_size=4)
    gang, before = small_gang()
    with gang, KvGang(shards_of(SMALL), blocks, limits=QUICK) as source, KvGang(shards_of(SMALL), blocks) as other:
        gang.obey(KvAccept(1, [5], 0, 4))
        assert gang.event() == Accepted(1)
        source.obey(KvOpen(1, msgspec.structs.replace(gang.peer, key=other.key), [0], [5]))
        failed(source.event(), 1, "is lost")
        gang.obey(KvRevoke(1))
        assert gang.event() == Revoked(1)
        hand_over(source, gang, 2, [0], [5], num_tokens=4)
        torch.testing.assert_close(gang.whole(before), expected(blocks, before, [0], [5]), equal_nan=True)


def test_what_is_no_message_is_refused_and_the_endpoint_goes_on():
    gang, _ = small_gang()
    with gang, RawSender(gang.peer.rank_urls[0], gang.key) as sender:
        sender.say(b"nonsense")
        assert isinstance(sender.answer(), Refused)
        sender.hello(GEOMETRY)
        assert isinstance(sender.answer(), Welcome)


def test_a_target_that_takes_nothing_bounds_what_is_sent_and_delays_nobody_else():
    blocks = random_blocks(SMALL, num_blocks=8, block_size=4)
    gang, before = small_gang()
    patient = longer(QUICK, frame_bytes=A_BLOCK, stall_s=60.0)
    with gang, KvGang(shards_of(SMALL), blocks, limits=patient) as source, RawTarget() as slow:
        source.obey(KvOpen(1, slow.peer(source.peer), list(range(8)), list(range(8))))
        slow.message()
        slow.say(Welcome(1 << 20, None))
        source.obey(KvRange(1, 0, 32, True))
        assert [slow.frame().sequence for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]
        hand_over(source, gang, 2, [0, 1], [5, 6], num_tokens=8)  # Sent(2) comes first: 1 is stuck
        torch.testing.assert_close(gang.whole(before), expected(blocks, before, [0, 1], [5, 6]), equal_nan=True)
        assert slow.frame(timeout_s=0.3) is None  # three buffers, three frames
        slow.say(Ack(2))
        assert slow.frame().sequence == 4  # type: ignore[union-attr]
        source.obey(KvStop(1))
        assert source.event() == Stopped(1)
        slow.say(Ack(1))
        assert slow.frame(timeout_s=0.3) is None


def test_a_target_that_takes_nothing_for_too_long_is_given_up():
    blocks = random_blocks(SMALL, num_blocks=8, block_size=4)
    with KvGang(shards_of(SMALL), blocks, limits=longer(QUICK, frame_bytes=A_BLOCK)) as source, RawTarget() as slow:
        source.obey(KvOpen(1, slow.peer(source.peer), list(range(8)), list(range(8))))
        slow.message()
        slow.say(Welcome(1 << 20, None))
        source.obey(KvRange(1, 0, 32, True))
        failed(source.event(), 1, "took no frame for 1 s")
        source.obey(KvStop(1))
        assert source.event() == Stopped(1)


def test_a_target_that_does_not_answer_or_is_not_there_is_given_up():
    blocks = random_blocks(SMALL, num_blocks=8, block_size=4)
    with KvGang(shards_of(SMALL), blocks, limits=QUICK) as source:
        with RawTarget() as silent:
            source.obey(KvOpen(1, silent.peer(source.peer), [0], [0]))
            failed(source.event(), 1, "does not answer")
            gone = silent.peer(source.peer)
        source.obey(KvOpen(2, gone, [0], [0]))
        failed(source.event(), 2, "is lost")


def test_a_connection_that_is_cut_fails_both_ends_and_the_pair_works_again_at_once():
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    empty = nan_blocks(blocks)
    with (
        KvGang(shards_of(SHAPE), blocks, limits=QUICK) as source,
        KvGang(shards_of(SHAPE), empty, limits=QUICK) as target,
        Proxy(target.peer.rank_urls[0]) as proxy,
    ):
        target.obey(KvAccept(1, MANY, 0, NUM_TOKENS))
        assert target.event() == Accepted(1)
        source.obey(KvOpen(1, proxy.peer(target.peer), MANY, MANY))
        source.obey(KvRange(1, 0, BLOCK_SIZE, False))
        wait_for_bytes(target)
        proxy.goes_on.clear()  # from now on nothing passes
        source.obey(KvRange(1, BLOCK_SIZE, NUM_TOKENS, True))
        proxy.cut()
        failed(source.event(), 1, "is lost")
        failed(target.event(), 1, "not heard of")
        source.obey(KvStop(1))
        assert source.event() == Stopped(1)
        target.obey(KvRevoke(1))
        assert target.event() == Revoked(1)
        hand_over(source, target, 2, MANY, MANY, num_tokens=NUM_TOKENS)
        torch.testing.assert_close(target.whole(empty), blocks, equal_nan=True, rtol=0, atol=0)


def test_a_link_that_lets_nothing_through_and_stays_open_is_noticed_at_both_ends():
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with (
        KvGang(shards_of(SHAPE), blocks, limits=QUICK) as source,
        KvGang(shards_of(SHAPE), nan_blocks(blocks), limits=QUICK) as target,
        Proxy(target.peer.rank_urls[0]) as proxy,
    ):
        target.obey(KvAccept(1, MANY, 0, NUM_TOKENS))
        assert target.event() == Accepted(1)
        source.obey(KvOpen(1, proxy.peer(target.peer), MANY, MANY))
        source.obey(KvRange(1, 0, BLOCK_SIZE, False))
        wait_for_bytes(target)
        proxy.goes_on.clear()
        source.obey(KvRange(1, BLOCK_SIZE, NUM_TOKENS, True))
        failed(source.event(), 1, "is lost")
        failed(target.event(), 1, "not heard of")


def begin(source: KvGang | KvProcess, target: KvGang | KvProcess, generation: int) -> None:
    """A transfer of which the first block is sent, and the rest is still to be computed."""
    target.obey(KvAccept(generation, MANY, 0, NUM_TOKENS))
    assert target.event() == Accepted(generation)
    source.obey(KvOpen(generation, target.peer, MANY, MANY))
    source.obey(KvRange(generation, 0, BLOCK_SIZE, False))


def kill(process: KvProcess) -> None:
    process.process.kill()
    assert process.process.wait() == -signal.SIGKILL


def freeze(process: KvProcess) -> None:
    os.kill(process.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("fault", [kill, freeze])
def test_a_sender_that_dies_in_mid_transfer_fails_it_in_bounded_time_and_another_takes_over(
    fault: Callable[[KvProcess], None],
):
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    empty = nan_blocks(blocks)
    with KvGang(shards_of(SHAPE), empty, limits=QUICK) as target:
        with KvProcess() as source:
            begin(source, target, 1)
            wait_for_bytes(target)
            fault(source)
            failed(target.event(), 1, "not heard of")
            target.obey(KvRevoke(1))
            assert target.event() == Revoked(1)
        with KvGang(shards_of(SHAPE), blocks, limits=QUICK) as other:
            hand_over(other, target, 2, MANY, MANY, num_tokens=NUM_TOKENS)
            torch.testing.assert_close(target.whole(empty), blocks, equal_nan=True, rtol=0, atol=0)


def test_a_sender_that_was_frozen_and_wakes_up_is_told_and_sends_again_over_a_new_link():
    empty = nan_blocks(random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    with KvGang(shards_of(SHAPE), empty, limits=QUICK) as target, KvProcess() as source:
        begin(source, target, 1)
        wait_for_bytes(target)
        freeze(source)
        failed(target.event(), 1, "not heard of")
        target.obey(KvRevoke(1))
        assert target.event() == Revoked(1)
        os.kill(source.process.pid, signal.SIGCONT)
        failed(source.event(), 1, "is lost")
        source.obey(KvStop(1))
        assert source.event() == Stopped(1)
        begin(source, target, 2)
        source.obey(KvRange(2, BLOCK_SIZE, NUM_TOKENS, True))
        assert source.event() == Sent(2)
        assert isinstance(target.event(), Received)


@pytest.mark.parametrize("fault", [kill, freeze])
def test_a_target_that_dies_in_mid_transfer_fails_it_in_bounded_time_and_another_takes_over(
    fault: Callable[[KvProcess], None],
):
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with KvGang(shards_of(SHAPE), blocks, limits=QUICK) as source:
        with KvProcess() as target:
            begin(source, target, 1)
            fault(target)
            source.obey(KvRange(1, BLOCK_SIZE, NUM_TOKENS, True))
            failed(source.event(), 1, "is lost")
            source.obey(KvStop(1))
            assert source.event() == Stopped(1)
        with KvProcess() as other:
            begin(source, other, 2)
            source.obey(KvRange(2, BLOCK_SIZE, NUM_TOKENS, True))
            assert source.event() == Sent(2)
            event = other.event()
            assert isinstance(event, Received), event


def test_an_error_of_the_endpoint_itself_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture):
    gang, _ = small_gang()
    with gang:
        gang.obey(KvAccept(1, [5], 0, 4))
        assert gang.event() == Accepted(1)
        gang.obey(KvOpen(1, gang.peer, [1000], [5]))  # a block that there is not
        gang.obey(KvRange(1, 0, 4, True))
        gang.obey(KvRevoke(2))
        gang.obey(KvStop(3))
        assert {gang.event(), gang.event()} == {Revoked(2), Stopped(3)}
        while "The KV transfers of this rank end" not in caplog.text:
            time.sleep(0.005)
        gang.obey(KvRevoke(1))
        gang.obey(KvStop(1))
        gang.obey(KvAccept(4, [5], 0, 4))
        assert [gang.event(), gang.event()] == [Revoked(1), Stopped(1)]
        failed(gang.event(), 4, "its log says why")
