"""Sends, event by event: which blocks stay and what is sent of them, two ranks, prompts of 10 tokens."""

from __future__ import annotations

from manta.engine.kv_transfer.messages import (
    Begin,
    Failed,
    GivenUp,
    Granted,
    KvOpen,
    KvOrder,
    KvPeer,
    KvRange,
    KvShard,
    KvStop,
    NotGranted,
    Sending,
    SendKv,
    Sent,
    Stopped,
    ToDecode,
    Withdrawn,
)
from manta.engine.kv_transfer.sends import Sends, SendTimes

PEER = KvPeer(
    control_url="tcp://d:1",
    rank_urls=["tcp://d:2"],
    shards=[KvShard((0, 1), (0, 1))],
    model="m",
    block_size=4,
    head_dim=8,
    dtype="float32",
    key=b"k" * 32,
)
BLOCKS = [5, 6, 7]
GRANTED = Granted("t", 100, [1, 2, 3], 0)


class Desk:
    """Writes down what is asked for."""

    def __init__(self) -> None:
        self.held: list[list[int]] = []
        self.orders: list[KvOrder] = []
        self.asked: list[ToDecode] = []

    def hold(self, block_ids: list[int]) -> None:
        self.held.append(block_ids)

    def let_go(self, block_ids: list[int]) -> None:
        self.held.remove(block_ids)

    def order(self, order: KvOrder) -> None:
        self.orders.append(order)

    def ask(self, peer: KvPeer, message: ToDecode) -> None:
        assert peer is PEER
        self.asked.append(message)


def begun(*, num_cached: int = 0) -> tuple[Sends, Desk]:
    """A sequence that has its first step at 0 s."""
    desk = Desk()
    sends = Sends(desk, num_ranks=2, times=SendTimes(answer_s=10.0, send_s=30.0, renew_s=1.0))
    sends.begin(1, SendKv("t", PEER), BLOCKS, num_tokens=10, num_cached=num_cached, now_s=0.0)
    assert desk.asked == [Begin("t", 10)]
    sends.check()
    return sends, desk


def happened(sends: Sends, *kinds: type[Sent] | type[Stopped]) -> None:
    for rank in (0, 1):
        for kind in kinds:
            sends.happened(rank, kind(100))
    sends.check()


def test_what_is_computed_after_the_grant_goes_with_its_step():
    sends, desk = begun()
    sends.answered(GRANTED, 0.0)
    assert desk.orders == [KvOpen(100, PEER, BLOCKS, [1, 2, 3])]
    assert sends.computed(1, 6, 0.0) == KvRange(100, 0, 6, is_last=False)
    assert sends.computed(1, 10, 0.0) == KvRange(100, 6, 10, is_last=True)
    sends.check()
    assert desk.held == [BLOCKS]
    sends.happened(0, Sent(100))
    assert desk.held == [BLOCKS]
    sends.happened(1, Sent(100))
    assert desk.held == []
    assert (sends.num_sent, sends.num_held) == (1, 0)


def test_what_was_computed_before_the_grant_is_sent_when_it_comes():
    sends, desk = begun()
    assert sends.computed(1, 10, 0.0) is None
    sends.answered(GRANTED, 0.0)
    assert desk.orders[1:] == [KvRange(100, 0, 10, is_last=True)]


def test_what_is_cached_here_needs_no_step():
    sends, desk = begun(num_cached=8)
    sends.answered(GRANTED, 0.0)
    assert desk.orders[1:] == [KvRange(100, 0, 8, is_last=False)]
    assert sends.computed(1, 10, 0.0) == KvRange(100, 8, 10, is_last=True)


def test_what_the_other_side_has_is_not_sent():
    sends, desk = begun(num_cached=4)
    sends.answered(Granted("t", 100, [1, 2, 3], 8), 0.0)
    assert desk.orders == [KvOpen(100, PEER, BLOCKS, [1, 2, 3])]
    assert sends.computed(1, 6, 0.0) is None
    assert sends.computed(1, 10, 0.0) == KvRange(100, 8, 10, is_last=True)
    sends, desk = begun()
    sends.answered(Granted("t", 100, [1, 2, 3], 10), 0.0)
    assert (desk.orders, desk.held, sends.num_sent) == ([], [], 1)


def test_more_blocks_than_the_tokens_need_are_not_written():
    sends, desk = begun()
    sends.answered(Granted("t", 100, [1, 2, 3, 4], 0), 0.0)
    assert desk.orders == [KvOpen(100, PEER, BLOCKS, [1, 2, 3])]


def test_without_a_grant_nothing_is_held():
    sends, desk = begun()
    sends.answered(NotGranted("t", "there is no room"), 0.0)
    assert (desk.held, sends.num_given_up) == ([], 1)
    assert sends.computed(1, 10, 0.0) is None


def test_a_grant_that_comes_too_late_is_declined():
    sends, desk = begun()
    sends.expire(10.0)
    assert desk.held == []
    assert desk.asked[1:] == [GivenUp("t", "no answer came")]
    sends.answered(GRANTED, 11.0, peer=PEER)
    assert desk.asked[2:] == [GivenUp("t", "the grant came too late")]
    assert desk.orders == []


def test_a_cancelled_request_stops_its_ranks_before_its_blocks_are_free():
    sends, desk = begun()
    sends.answered(GRANTED, 0.0)
    sends.computed(1, 6, 0.0)
    sends.abandoned(1, "it was cancelled")
    sends.check()
    assert desk.orders[1:] == [KvStop(100)]
    assert desk.asked[1:] == [GivenUp("t", "it was cancelled")]
    assert sends.computed(1, 10, 0.0) is None
    happened(sends, Sent)
    assert desk.held == [BLOCKS]
    happened(sends, Stopped)
    assert desk.held == []


def test_a_request_that_is_cancelled_without_an_answer_holds_nothing():
    sends, desk = begun()
    sends.abandoned(1, "it was cancelled")
    assert (desk.held, desk.orders) == ([], [])
    assert desk.asked[1:] == [GivenUp("t", "it was cancelled")]


def test_what_the_other_side_withdraws_is_stopped():
    sends, desk = begun()
    sends.answered(GRANTED, 0.0)
    sends.withdrawn(Withdrawn(100, "it was released"))
    sends.withdrawn(Withdrawn(100, "it was released"))
    assert desk.orders[1:] == [KvStop(100)]
    assert len(desk.asked) == 1
    happened(sends, Stopped)
    assert desk.held == []
    sends.withdrawn(Withdrawn(100, "it was released"))


def test_a_failure_is_told_and_stopped():
    sends, desk = begun()
    sends.answered(GRANTED, 0.0)
    sends.happened(1, Failed(100, "the link is cut"))
    sends.happened(0, Failed(100, "the link is cut"))
    assert desk.asked[1:] == [GivenUp("t", "the link is cut")]
    happened(sends, Stopped)
    assert (desk.held, sends.num_sent, sends.num_given_up) == ([], 0, 1)


def test_the_other_side_hears_now_and_then_that_it_goes_on():
    sends, desk = begun()
    sends.answered(GRANTED, 0.0)
    for now_s in (0.5, 1.0, 1.5, 2.0):
        sends.expire(now_s)
    assert desk.asked[1:] == [Sending(100), Sending(100)]


def test_a_transfer_that_does_not_end_is_stopped():
    sends, desk = begun()
    sends.answered(GRANTED, 0.0)
    sends.expire(100.0)
    assert KvStop(100) not in desk.orders
    sends.computed(1, 10, 100.0)
    sends.expire(129.0)
    assert KvStop(100) not in desk.orders
    sends.expire(130.0)
    assert desk.orders[-1] == KvStop(100)


def test_a_ticket_that_is_begun_already_is_not_begun_again():
    sends, desk = begun()
    sends.begin(2, SendKv("t", PEER), [8, 9, 10], num_tokens=10, num_cached=0, now_s=0.0)
    sends.check()
    assert desk.held == [BLOCKS]
    assert len(desk.asked) == 1
