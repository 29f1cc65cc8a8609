"""Blocks beside those of running sequences, and how the scheduler lets requests start from them: blocks of 4 tokens."""

from __future__ import annotations

from manta.engine.scheduler import Scheduler
from tests.engine.engines import make_scheduler, request
from tests.engine.test_scheduler import finish, rows, schedule

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def start_provided(scheduler: Scheduler, name: str = "a", token: int = 50, **params: int) -> None:
    """A request whose prompt, TOKENS, was computed elsewhere, with its first token."""
    resumed = request(name, TOKENS, **params)
    resumed.output_token_ids = [token]
    reserved = scheduler.reserve(TOKENS, salt=None)
    assert reserved is not None
    assert scheduler.add(resumed, is_ready=False) is None
    assert scheduler.make_ready(name, reserved)


def test_a_reservation_has_blocks_for_all_tokens_and_the_next():
    scheduler = make_scheduler(num_blocks=8)
    for length, num_blocks in ((1, 1), (3, 1), (4, 2), (7, 2), (8, 3)):
        reserved = scheduler.reserve([7] * length, salt=None)
        assert reserved is not None
        assert (len(reserved.block_ids), reserved.num_cached_tokens) == (num_blocks, 0)
        scheduler.check()
        scheduler.set_aside.give_back(reserved)
        scheduler.check()
    assert scheduler.cache.pool.num_used == 0


def test_a_request_starts_behind_the_tokens_that_are_there_already():
    scheduler = make_scheduler()
    start_provided(scheduler)
    plan = schedule(scheduler)
    assert rows(plan) == [(9, 1, True)]
    assert plan.new[0].token_ids == [*TOKENS, 50]
    assert len(plan.new[0].block_ids) == 3
    [delta] = finish(scheduler, plan, 51)
    assert (delta.token_ids, delta.num_cached_tokens) == ([51], 0)
    assert scheduler.set_aside.num_blocks == 0


def test_what_is_cached_is_shared_and_what_came_is_published_when_the_request_starts():
    scheduler = make_scheduler()
    scheduler.add(request("before", TOKENS[:6], max_tokens=1))
    finish(scheduler, schedule(scheduler), 7)
    reserved = scheduler.reserve(TOKENS, salt=None)
    assert reserved is not None
    assert reserved.num_cached_tokens == 4
    assert scheduler.cache.num_cached_blocks == 1
    scheduler.set_aside.give_back(reserved)
    start_provided(scheduler)
    schedule(scheduler)
    assert scheduler.cache.num_cached_blocks == 2


def test_a_whole_prompt_may_be_cached():
    scheduler = make_scheduler()
    scheduler.add(request("before", TOKENS[:8], max_tokens=1))
    finish(scheduler, schedule(scheduler), 7)
    reserved = scheduler.reserve(TOKENS[:8], salt=None)
    assert reserved is not None
    assert (reserved.num_cached_tokens, len(reserved.block_ids)) == (8, 3)
    other = scheduler.reserve(TOKENS[:8], salt="other")
    assert other is not None
    assert other.num_cached_tokens == 0


def test_nothing_is_reserved_from_the_room_that_running_sequences_may_need():
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(request("a", [1, 2, 3]))
    schedule(scheduler)
    assert scheduler.reserve([7] * 15, salt=None) is None
    assert scheduler.reserve([7] * 11, salt=None) is not None


def test_those_that_will_run_are_left_room_to_grow():
    scheduler = make_scheduler(num_blocks=4)
    reserved = scheduler.reserve([7] * 3, salt=None)
    assert reserved is not None
    assert scheduler.reserve([7] * 11, salt=None) is None
    scheduler.add(request("a", [1] * 12, max_tokens=1))
    assert scheduler.schedule() is None
    scheduler.set_aside.give_back(reserved)
    assert rows(schedule(scheduler)) == [(0, 12, True)]


def test_nothing_is_reserved_while_a_request_waits_for_blocks():
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(request("a", [1] * 14))
    schedule(scheduler)
    scheduler.add(request("b", [2] * 9))
    schedule(scheduler)
    assert scheduler.num_waiting == 1
    assert scheduler.reserve([3], salt=None) is None
    scheduler.cancel("b")
    scheduler.schedule()
    assert scheduler.reserve([3], salt=None) is not None


def test_a_request_with_blocks_passes_those_that_wait_for_blocks():
    scheduler = make_scheduler(num_blocks=6)
    start_provided(scheduler)
    scheduler.add(request("big", [1] * 20, priority=-1))
    plan = schedule(scheduler)
    assert rows(plan) == [(9, 1, True)]
    assert scheduler.num_waiting == 1


def test_a_request_that_is_not_ready_waits_and_counts_as_one_token():
    scheduler = make_scheduler()
    resumed = request("a", TOKENS)
    resumed.output_token_ids = [50]
    assert scheduler.add(resumed, is_ready=False) is None
    assert scheduler.schedule() is None
    assert (scheduler.num_waiting, scheduler.num_prefill_tokens) == (1, 1)
    assert not scheduler.make_ready("a", None)
    assert scheduler.num_prefill_tokens == 10
    assert rows(schedule(scheduler)) == [(0, 10, True)]
    assert (scheduler.num_waiting, scheduler.num_prefill_tokens) == (0, 0)


def test_cancelling_gives_the_blocks_back_at_any_moment():
    for moment in ("not ready", "ready", "running"):
        scheduler = make_scheduler()
        if moment == "not ready":
            scheduler.add(request("a", TOKENS), is_ready=False)
        else:
            start_provided(scheduler)
        plan = schedule(scheduler) if moment == "running" else None
        assert scheduler.cancel("a")
        scheduler.check()
        assert scheduler.cache.pool.num_used == 0
        assert (scheduler.num_waiting, scheduler.num_prefill_tokens) == (0, 0)
        if plan is not None:
            finish(scheduler, plan, 51)
        assert scheduler.schedule() is None


def test_a_preempted_sequence_that_started_so_is_computed_as_any_other():
    scheduler = make_scheduler(num_blocks=5)
    other = scheduler.reserve([3], salt=None)
    assert other is not None
    start_provided(scheduler, max_tokens=9)
    lost = []
    scheduler.on_lost = lambda sequence: lost.append(sequence.request.request_id)
    for token in range(51, 58):
        finish(scheduler, schedule(scheduler), token)
    assert lost == []
    assert scheduler.schedule() is None  # position 16 needs a fifth block
    assert lost == ["a"]
    scheduler.set_aside.give_back(other)
    scheduler.cache.pool.evict_all()
    assert rows(schedule(scheduler)) == [(0, 17, True)]


def test_held_blocks_outlive_their_sequence_and_are_cached_when_they_are_let_go():
    scheduler = make_scheduler()
    scheduler.add(request("a", TOKENS, max_tokens=1))
    plan = schedule(scheduler)
    block_ids = list(scheduler.sequences_of(plan)[0].block_ids)
    scheduler.set_aside.hold(block_ids)
    finish(scheduler, plan, 7)
    assert scheduler.cache.pool.num_used == 3
    scheduler.set_aside.hold(block_ids)
    scheduler.set_aside.let_go(block_ids)
    scheduler.check()
    scheduler.set_aside.let_go(block_ids)
    scheduler.check()
    assert scheduler.cache.pool.num_used == 0
    assert scheduler.cache.num_cached_blocks == 2


def test_tokens_that_the_blocks_have_no_room_for_are_computed_as_any_others():
    scheduler = make_scheduler()
    resumed = request("a", TOKENS, max_tokens=9)
    resumed.output_token_ids = [50, 51, 52, 53]
    reserved = scheduler.reserve(TOKENS, salt=None)
    scheduler.add(resumed, is_ready=False)
    assert not scheduler.make_ready("a", reserved)
    scheduler.check()
    assert scheduler.set_aside.num_blocks == 0
    assert rows(schedule(scheduler)) == [(0, 13, True)]
