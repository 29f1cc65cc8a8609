"""Leases, event by event: who may write into which blocks until when, two ranks, generations from 100 on."""

from __future__ import annotations

from typing import Any

from manta.engine.kv_transfer.leases import Leases, LeaseTimes
from manta.engine.kv_transfer.messages import (
    Accepted,
    Begin,
    Failed,
    Granted,
    KvAccept,
    KvOrder,
    KvRevoke,
    NotGranted,
    Received,
    Revoked,
    ToPrefill,
    Withdrawn,
)
from manta.engine.set_aside import Reserved

TOKENS = [7] * 10
TIMES = LeaseTimes(expected_s=100.0, early_s=2.0, lease_s=30.0, wait_s=5.0)


class Desk:
    """Writes down what is asked for. Blocks of 4 tokens; `num_cached` of a reservation's tokens are there already."""

    def __init__(self, *, has_room: bool = True, num_cached: int = 0) -> None:
        self.has_room = has_room
        self.num_cached = num_cached
        self.orders: list[KvOrder] = []
        self.answers: list[tuple[bytes, ToPrefill]] = []
        self.freed: list[list[int]] = []
        self.settled: dict[str, list[int] | None] = {}
        self._next_block = 0

    def reserve(self, token_ids: list[int], salt: str | None) -> Reserved | None:
        if not self.has_room:
            return None
        first, self._next_block = self._next_block, self._next_block + len(token_ids) // 4 + 1
        return Reserved(token_ids, list(range(first, self._next_block)), [], self.num_cached)

    def give_back(self, reserved: Reserved) -> None:
        self.freed.append(reserved.block_ids)

    def order(self, order: KvOrder) -> None:
        self.orders.append(order)

    def answer(self, peer: bytes, message: ToPrefill) -> None:
        self.answers.append((peer, message))

    def settle(self, request_id: str, reserved: Reserved | None) -> None:
        assert request_id not in self.settled
        self.settled[request_id] = None if reserved is None else reserved.block_ids


def make(**desk: Any) -> tuple[Leases, Desk]:
    told = Desk(**desk)
    return Leases(told, num_ranks=2, first_generation=100, times=TIMES), told


def begun(**desk: Any) -> tuple[Leases, Desk]:
    """Expected and begun at 0 s; both ranks accept, so that it is granted."""
    leases, told = make(**desk)
    leases.expect("t", TOKENS, None, 0.0)
    leases.begin(b"p", Begin("t", 10), 0.0)
    for rank in (0, 1):
        leases.happened(rank, Accepted(100), 0.0)
    leases.check()
    return leases, told


def receive(leases: Leases, now_s: float = 1.0) -> None:
    for rank in (0, 1):
        leases.happened(rank, Received(100), now_s)
    leases.check()


def revoked(leases: Leases) -> None:
    for rank in (0, 1):
        leases.happened(rank, Revoked(100), 50.0)
    leases.check()


def test_blocks_are_granted_when_every_rank_takes_frames():
    leases, told = make()
    leases.expect("t", TOKENS, None, 0.0)
    assert leases.num_leases == 0
    leases.begin(b"p", Begin("t", 10), 0.0)
    assert told.orders == [KvAccept(100, [0, 1, 2], 0, 10)]
    leases.happened(1, Accepted(100), 0.0)
    assert told.answers == []
    leases.happened(0, Accepted(100), 0.0)
    assert told.answers == [(b"p", Granted("t", 100, [0, 1, 2], 0))]
    assert leases.num_leases == 1


def test_a_request_gets_its_blocks_when_every_rank_has_all_bytes():
    leases, told = begun()
    leases.take("t", "r", [*TOKENS, 1], 1.0)
    leases.happened(0, Received(100), 1.0)
    assert told.settled == {}
    leases.happened(1, Received(100), 1.0)
    assert told.settled == {"r": [0, 1, 2]}
    assert leases.is_idle
    assert leases.num_leases == 0


def test_a_request_that_comes_later_gets_them_at_once():
    leases, told = begun()
    receive(leases)
    leases.take("t", "r", [*TOKENS, 1], 2.0)
    assert told.settled == {"r": [0, 1, 2]}
    assert leases.is_idle


def test_what_is_cached_already_need_not_come():
    leases, told = begun(num_cached=8)
    assert told.orders == [KvAccept(100, [0, 1, 2], 8, 10)]
    assert told.answers == [(b"p", Granted("t", 100, [0, 1, 2], 8))]
    leases, told = make(num_cached=8)
    leases.expect("t", [7] * 8, None, 0.0)
    leases.begin(b"p", Begin("t", 8), 0.0)
    assert told.orders == []
    assert told.answers == [(b"p", Granted("t", 100, [0, 1, 2], 8))]
    leases.take("t", "r", [7] * 9, 0.0)
    assert told.settled == {"r": [0, 1, 2]}


def test_without_room_nothing_is_granted_and_the_request_is_computed():
    leases, told = make(has_room=False)
    leases.expect("t", TOKENS, None, 0.0)
    leases.begin(b"p", Begin("t", 10), 0.0)
    assert told.answers == [(b"p", NotGranted("t", "there is no room"))]
    leases.take("t", "r", [*TOKENS, 1], 1.0)
    assert told.settled == {"r": None}
    assert leases.is_idle


def test_an_unknown_ticket_is_computed():
    leases, told = make()
    leases.take("t", "r", [*TOKENS, 1], 0.0)
    assert told.settled == {"r": None}


def test_a_begin_that_comes_before_it_is_expected_waits_for_that():
    leases, told = make()
    leases.begin(b"p", Begin("t", 10), 0.0)
    assert told.answers == []
    leases.expect("t", TOKENS, None, 1.0)
    assert told.orders == [KvAccept(100, [0, 1, 2], 0, 10)]
    leases.begin(b"p", Begin("u", 10), 0.0)
    leases.expire(2.0)
    assert told.answers == [(b"p", NotGranted("u", "it is not expected"))]


def test_a_second_begin_is_refused_and_disturbs_nothing():
    leases, told = begun()
    leases.begin(b"q", Begin("t", 10), 0.0)
    assert told.answers[1:] == [(b"q", NotGranted("t", "it was begun already"))]
    leases.given_up(b"q", "t", "never mind")
    receive(leases)
    leases.take("t", "r", [*TOKENS, 1], 2.0)
    assert told.settled == {"r": [0, 1, 2]}


def test_a_begin_of_another_length_is_refused():
    leases, told = make()
    leases.expect("t", TOKENS, None, 0.0)
    leases.begin(b"p", Begin("t", 11), 0.0)
    assert told.answers == [(b"p", NotGranted("t", "10 tokens are expected, not 11"))]
    assert leases.is_idle


def test_a_request_with_other_tokens_is_computed_and_the_blocks_are_let_go():
    for token_ids in ([8, *TOKENS], TOKENS, [7] * 9):
        leases, told = begun()
        leases.take("t", "r", token_ids, 0.0)
        assert told.settled == {"r": None}
        assert told.orders[1:] == [KvRevoke(100)]


def test_revoked_blocks_are_free_only_when_every_rank_has_said_that_it_writes_no_more():
    leases, told = begun()
    leases.release("t")
    assert told.orders[1:] == [KvRevoke(100)]
    assert told.answers[1:] == [(b"p", Withdrawn(100, "it was released"))]
    leases.happened(0, Received(100), 1.0)
    leases.happened(0, Revoked(100), 1.0)
    assert told.freed == []
    assert leases.num_leases == 1
    leases.happened(1, Revoked(100), 1.0)
    assert told.freed == [[0, 1, 2]]
    assert leases.is_idle


def test_complete_blocks_are_free_at_once():
    leases, told = begun()
    receive(leases)
    leases.release("t")
    assert told.freed == [[0, 1, 2]]
    assert len(told.orders) == 1


def test_a_release_before_all_ranks_accept_tells_the_other_side_that_nothing_is_granted():
    leases, told = make()
    leases.expect("t", TOKENS, None, 0.0)
    leases.begin(b"p", Begin("t", 10), 0.0)
    leases.release("t")
    assert told.answers == [(b"p", NotGranted("t", "it was released"))]
    leases.happened(0, Accepted(100), 0.0)
    assert len(told.answers) == 1
    revoked(leases)
    assert told.freed == [[0, 1, 2]]


def test_a_released_ticket_is_forgotten_at_any_moment():
    leases, told = make()
    leases.release("t")
    leases.begin(b"p", Begin("t", 10), 0.0)
    leases.release("t")
    assert told.answers == [(b"p", NotGranted("t", "it was released"))]
    leases.expect("t", TOKENS, None, 0.0)
    leases.release("t")
    assert leases.is_idle


def test_a_failure_lets_the_waiting_request_be_computed_at_once():
    leases, told = begun()
    leases.take("t", "r", [*TOKENS, 1], 0.0)
    leases.happened(1, Failed(100, "the link is cut"), 1.0)
    assert told.settled == {"r": None}
    assert told.freed == []
    revoked(leases)
    assert told.freed == [[0, 1, 2]]


def test_what_the_other_side_gives_up_is_computed_at_once():
    leases, told = begun()
    leases.take("t", "r", [*TOKENS, 1], 0.0)
    leases.given_up(b"p", "t", "it was cancelled")
    assert told.settled == {"r": None}
    leases, told = begun()
    receive(leases)
    leases.given_up(b"p", "t", "too late")
    leases.take("t", "r", [*TOKENS, 1], 2.0)
    assert told.settled == {"r": [0, 1, 2]}


def test_a_cancelled_request_is_not_settled_and_its_blocks_are_let_go():
    leases, told = begun()
    leases.take("t", "r", [*TOKENS, 1], 0.0)
    leases.cancelled("r")
    assert told.settled == {}
    revoked(leases)
    assert told.freed == [[0, 1, 2]]
    leases.cancelled("r")


def test_a_lease_is_over_when_nothing_is_heard_of_the_other_side():
    leases, told = begun()
    leases.expire(29.0)
    leases.heard(100, 29.0)
    leases.expire(58.0)
    assert len(told.orders) == 1
    leases.expire(59.0)
    assert told.orders[1:] == [KvRevoke(100)]
    assert leases.num_expired == 1
    revoked(leases)
    assert leases.is_idle


def test_a_complete_lease_is_over_when_no_request_takes_it():
    leases, told = begun()
    receive(leases, now_s=10.0)
    leases.expire(39.0)
    assert told.freed == []
    leases.expire(40.0)
    assert told.freed == [[0, 1, 2]]


def test_a_request_waits_only_so_long():
    leases, told = begun()
    leases.take("t", "r", [*TOKENS, 1], 10.0)
    leases.heard(100, 14.0)
    leases.expire(14.9)
    assert told.settled == {}
    leases.expire(15.0)
    assert told.settled == {"r": None}


def test_what_is_expected_and_never_begun_is_forgotten():
    leases, told = make()
    leases.expect("t", TOKENS, None, 0.0)
    leases.take("t", "r", [*TOKENS, 1], 50.0)
    leases.expire(55.0)
    assert told.settled == {"r": None}
    leases.expect("u", TOKENS, None, 0.0)
    leases.expire(100.0)
    assert leases.is_idle
    assert (told.orders, told.freed) == ([], [])


def test_a_second_request_with_the_ticket_is_computed():
    leases, told = begun()
    leases.take("t", "r", [*TOKENS, 1], 0.0)
    leases.take("t", "s", [*TOKENS, 1], 0.0)
    assert told.settled == {"s": None}
    receive(leases)
    assert told.settled == {"s": None, "r": [0, 1, 2]}


def test_generations_are_never_used_twice_and_events_of_old_ones_are_ignored():
    leases, told = begun()
    leases.release("t")
    leases.expect("t", TOKENS, None, 1.0)
    leases.begin(b"p", Begin("t", 10), 1.0)
    assert told.orders[-1] == KvAccept(101, [3, 4, 5], 0, 10)
    leases.happened(0, Accepted(100), 1.0)
    leases.happened(1, Accepted(100), 1.0)
    receive(leases)
    assert not isinstance(told.answers[-1][1], Granted)
    revoked(leases)
    assert told.freed == [[0, 1, 2]]
