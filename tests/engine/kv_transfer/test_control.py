"""Messages between cores, and events from threads, arrive, wake and stay private."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from manta.engine.kv_transfer.control import UNUSED_S, EventInbox, KvControl
from manta.engine.kv_transfer.messages import (
    Accepted,
    Begin,
    Failed,
    GivenUp,
    Granted,
    KvPeer,
    KvShard,
    NotGranted,
    Received,
    Sending,
    Withdrawn,
)
from manta.engine.kv_transfer.ranks import FollowerEvents, GangRanks
from tests.engine.parallel.gangs import LocalStore, members, wait_for

KEY = b"k" * 32


@contextmanager
def cores() -> Iterator[tuple[KvControl, KvControl, KvPeer]]:
    """P's, D's, and what P knows of D."""
    p, d = KvControl(b"p" * 32, host="127.0.0.1"), KvControl(KEY, host="127.0.0.1")
    peer = KvPeer(
        control_url=d.url,
        rank_urls=[],
        shards=[KvShard((0, 1), (0, 1))],
        model="m",
        block_size=16,
        head_dim=8,
        dtype="float32",
        key=KEY,
    )
    try:
        yield p, d, peer
    finally:
        p.close()
        d.close()


def all_of(take: Callable[[], Iterator[tuple[object, object]]], count: int) -> list[tuple[object, object]]:
    found: list[tuple[object, object]] = []
    wait_for(lambda: found.extend(take()) or len(found) >= count)
    return found


def is_readable(control: KvControl, timeout_ms: int) -> bool:
    poller = zmq.Poller()
    for socket in control.pollables:
        poller.register(socket, zmq.POLLIN)
    return bool(poller.poll(timeout_ms))


def test_what_is_asked_is_answered_to_whoever_asked():
    with cores() as (p, d, peer):
        asked = [Begin("t", 10), Sending(2**62), GivenUp("t", "it was cancelled")]
        for message in asked:
            p.ask(peer, message)
        assert is_readable(d, 10_000)
        found = all_of(d.asked, 3)
        assert [message for _, message in found] == asked
        assert not is_readable(d, 0)
        (address,) = {address for address, _ in found}
        assert isinstance(address, bytes)
        answers = [Granted("t", 2**62, [1, 2], 16), NotGranted("t", "there is no room"), Withdrawn(7, "released")]
        for answer in answers:
            d.answer(address, answer)
        assert is_readable(p, 10_000)
        assert all_of(p.answers, 3) == [(peer, answer) for answer in answers]


def test_who_does_not_know_the_key_is_not_heard():
    with cores() as (p, d, peer):
        p.ask(msgspec.structs.replace(peer, key=b"x" * 32), Begin("t", 10))
        assert not is_readable(d, 300)
        assert list(d.asked()) == []


def test_an_answer_to_somebody_who_is_gone_is_dropped():
    with cores() as (_, d, _peer):
        d.answer(b"nobody", NotGranted("t", "there is no room"))


def test_connections_that_nobody_uses_are_closed():
    with cores() as (p, d, peer):
        p.ask(peer, Begin("t", 10))
        all_of(d.asked, 1)
        assert len(p.pollables) == 2
        used_at_s = p._dealers[peer.control_url].used_at_s
        p.close_unused(used_at_s + UNUSED_S - 1)
        assert len(p.pollables) == 2
        p.close_unused(used_at_s + UNUSED_S)
        assert len(p.pollables) == 1
        p.ask(peer, Begin("u", 10))
        assert [message for _, message in all_of(d.asked, 1)] == [Begin("u", 10)]


@pytest.mark.parametrize("name", ["model", "block_size", "dtype", "head_dim"])
def test_a_mismatch_names_what_differs(name: str):
    with cores() as (_, _d, peer):
        other = msgspec.structs.replace(peer, **{name: "x" if isinstance(getattr(peer, name), str) else 99})
        found = peer.mismatch(other)
        assert found is not None
        assert name in found
        assert peer.mismatch(peer) is None


def test_a_different_split_of_the_same_model_is_no_mismatch_but_other_heads_are():
    with cores() as (_, _d, peer):
        whole = msgspec.structs.replace(peer, shards=[KvShard((0, 4), (0, 6))])
        split = msgspec.structs.replace(peer, shards=[KvShard((0, 4), (0, 3)), KvShard((0, 4), (3, 6))])
        assert whole.mismatch(split) is None
        other = msgspec.structs.replace(peer, shards=[KvShard((0, 4), (0, 5))])
        assert other.mismatch(split) == "num_kv_heads is 5 on one side and 6 on the other"


def test_a_peer_does_not_show_its_secret():
    with cores() as (_, _d, peer):
        assert "kkk" not in repr(peer)


def test_events_wake_the_core_and_come_in_order():
    inbox = EventInbox()
    poller = zmq.Poller()
    poller.register(inbox.fd, zmq.POLLIN)
    assert not poller.poll(0)
    inbox.put(0, Accepted(1))
    inbox.put(2, Received(1, 100))
    assert poller.poll(0)
    assert inbox.take() == [(0, Accepted(1)), (2, Received(1, 100))]
    assert (inbox.take(), poller.poll(0)) == ([], [])
    inbox.close()
    inbox.put(0, Accepted(2))
    assert inbox.take() == []
    with pytest.raises(OSError):
        os.eventfd_read(inbox.fd)


def test_events_of_followers_come_with_their_rank():
    first, second, third = members(3)
    store = LocalStore()
    ranks = GangRanks(first, store)
    followers = [FollowerEvents(member, store) for member in (second, third)]
    for number, follower in enumerate(followers, start=1):
        follower.say_url(f"tcp://follower:{number}")
        follower.put(Failed(7, f"of {number}"))
    ranks.inbox.put(0, Accepted(7))
    assert ranks.follower_urls() == ["tcp://follower:1", "tcp://follower:2"]
    found: list[tuple[int, object]] = []
    wait_for(lambda: found.extend(ranks.events()) or len(found) == 3)
    assert sorted(found, key=lambda one: one[0]) == [(0, Accepted(7)), (1, Failed(7, "of 1")), (2, Failed(7, "of 2"))]
    assert len(ranks.pollables) == 2
    for follower in followers:
        follower.close()
    ranks.close()
