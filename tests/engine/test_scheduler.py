"""The scheduler, step by step, with literal numbers: blocks of 4 tokens, a budget of 32 unless said otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manta.engine.plan import StepPlan, StepResult
from manta.engine.prefix_cache import BlockHasher, PrefixCache
from manta.engine.request import FinishReason, RefusalReason, RequestDelta
from manta.engine.scheduler import Scheduler
from tests.engine.engines import make_scheduler, request


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check()
    return plan


def finish(scheduler: Scheduler, plan: StepPlan, *token_ids: int) -> list[RequestDelta]:
    deltas = scheduler.update(plan, StepResult(list(token_ids)))
    scheduler.check()
    return deltas


def rows(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return [(row.start, row.num_tokens, row.samples) for row in plan.rows]


def test_a_prompt_that_fits_the_budget_is_computed_in_one_step_and_samples():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1] * 10))
    plan = schedule(scheduler)
    assert rows(plan) == [(0, 10, True)]
    assert len(plan.new[0].block_ids) == 3


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples():
    scheduler = make_scheduler(budget=8)
    scheduler.add(request("a", [1] * 20))
    chunks = []
    for _ in range(3):
        plan = schedule(scheduler)
        chunks += rows(plan)
        finish(scheduler, plan, *([7] if plan.rows[0].samples else []))
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_the_next_step_is_planned_before_the_token_is_known():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 2, 3]))
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert [(r.start, r.num_tokens, r.is_decode) for r in second.rows] == [(3, 1, True)]
    [delta] = finish(scheduler, first, 7)
    assert delta.token_ids == [7]


def test_no_token_beyond_max_tokens_is_ever_computed():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 2, 3], max_tokens=2))
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert scheduler.schedule() is None
    finish(scheduler, first, 7)
    [delta] = finish(scheduler, second, 8)
    assert delta.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_unfinished


def test_the_surplus_token_after_an_eos_is_dropped_and_never_published():
    scheduler = make_scheduler(eos=(99,))
    scheduler.add(request("a", [1, 2, 3], max_tokens=8))
    first, second = schedule(scheduler), schedule(scheduler)
    [delta] = finish(scheduler, first, 99)
    assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, 99)
    assert finish(scheduler, second, 5) == []
    assert scheduler.cache.pool.num_used == 0
    assert scheduler.cache.num_cached_blocks == 0
    assert scheduler.num_generated_tokens == 1


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({"ignore_eos": True}, 99, None),
        ({"stop_token_ids": (5,)}, 5, FinishReason.STOP),
        ({"stop_token_ids": (5,), "ignore_eos": True}, 5, FinishReason.STOP),
        ({"min_tokens": 2}, 99, None),
        ({}, 5, None),
    ],
)
def test_what_ends_a_request(params: dict[str, Any], token: int, reason: FinishReason | None):
    scheduler = make_scheduler(eos=(99,))
    scheduler.add(request("a", [1, 2, 3], max_tokens=8, **params))
    [delta] = finish(scheduler, schedule(scheduler), token)
    assert delta.finish_reason is reason


def test_a_step_that_decodes_takes_only_so_many_prompt_tokens_as_is_allowed():
    scheduler = make_scheduler(max_mixed_prefill_tokens=6)
    scheduler.add(request("a", [1] * 20))
    assert rows(schedule(scheduler)) == [(0, 20, True)]  # nobody decodes yet
    scheduler.add(request("b", [2] * 10))
    assert rows(schedule(scheduler)) == [(20, 1, True), (0, 6, False)]
    assert rows(schedule(scheduler)) == [(21, 1, True), (6, 4, True)]


def test_decodes_come_before_prefills_and_share_the_budget():
    scheduler = make_scheduler(budget=8)
    scheduler.add(request("a", [1] * 4))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.add(request("b", [2] * 20))
    assert rows(schedule(scheduler)) == [(4, 1, True), (0, 7, False)]


def test_requests_that_arrive_together_share_the_blocks_of_a_common_prefix():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(request(name, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    plan = schedule(scheduler)
    assert rows(plan) == [(0, 9, True), (8, 1, True), (8, 1, True)]
    shared = {tuple(new.block_ids[:2]) for new in plan.new}
    assert len(shared) == 1
    assert scheduler.cache.pool.num_used == 2 + 3


def test_a_fully_cached_prompt_still_computes_its_last_block():
    scheduler = make_scheduler()
    scheduler.add(request("a", list(range(8)), max_tokens=1))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.add(request("b", list(range(8)), max_tokens=1))
    plan = schedule(scheduler)
    assert rows(plan) == [(4, 4, True)]
    [delta] = finish(scheduler, plan, 7)
    assert delta.num_cached_tokens == 4


def test_generated_tokens_are_cached_once_they_are_known():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 2, 3], max_tokens=6))
    for token in (11, 12, 13, 14, 15, 16):
        finish(scheduler, schedule(scheduler), token)
    scheduler.add(request("b", [1, 2, 3, 11, 12, 13, 14, 15, 99]))
    assert rows(schedule(scheduler)) == [(8, 1, True)]


def test_another_salt_finds_nothing():
    scheduler = make_scheduler()
    scheduler.add(request("a", list(range(9)), max_tokens=1, salt="tenant-a"))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.add(request("b", list(range(9)), salt="tenant-b"))
    assert rows(schedule(scheduler)) == [(0, 9, True)]


def test_without_prefix_caching_nothing_is_shared():
    scheduler = make_scheduler(prefix_caching=False)
    for name in "ab":
        scheduler.add(request(name, list(range(9))))
    assert rows(schedule(scheduler)) == [(0, 9, True), (0, 9, True)]


def test_prompt_logprobs_compute_every_position_whatever_is_cached():
    scheduler = make_scheduler()
    scheduler.add(request("a", list(range(9)), max_tokens=1))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.add(request("b", list(range(9)), prompt_logprobs=0))
    plan = schedule(scheduler)
    assert rows(plan) == [(0, 9, True)]
    assert plan.rows[0].prompt_logprobs_start == 0


def test_lower_priority_values_run_first_and_equal_ones_by_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0)):
        scheduler.add(request(name, [1, 2], priority=priority, max_tokens=1))
    order = []
    while scheduler.has_unfinished:
        order += [delta.request_id for delta in finish(scheduler, schedule(scheduler), 7)]
    assert order == ["first", "second", "late"]


def test_the_youngest_is_preempted_when_blocks_run_out_and_recomputed_later():
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    for name, first in (("old", 1), ("young", 2)):
        scheduler.add(request(name, [first] * 7, max_tokens=6))
    finish(scheduler, schedule(scheduler), 10, 20)
    finish(scheduler, schedule(scheduler), 11, 21)
    plan = schedule(scheduler)  # both need a third block; one is free
    assert scheduler.num_preemptions == 1
    assert [row.start for row in plan.rows] == [8]
    finish(scheduler, plan, 12)
    tokens = {"old": [10, 11, 12], "young": [20, 21]}
    while scheduler.has_unfinished:
        plan = schedule(scheduler)
        sampled = [30] * sum(row.samples for row in plan.rows)
        for delta in finish(scheduler, plan, *sampled):
            tokens[delta.request_id] += delta.token_ids
    assert tokens == {"old": [10, 11, 12, 30, 30, 30], "young": [20, 21, 30, 30, 30, 30]}
    assert scheduler.num_prompt_tokens == 14


def test_a_request_preempted_with_a_token_in_flight_waits_for_that_token():
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    for name, first in (("old", 1), ("young", 2)):
        scheduler.add(request(name, [first] * 7, max_tokens=6))
    first = schedule(scheduler)
    second = schedule(scheduler)
    finish(scheduler, first, 10, 20)
    third = schedule(scheduler)
    assert scheduler.num_preemptions == 1
    [_, young] = finish(scheduler, second, 11, 21)
    assert young.token_ids == [21]
    finish(scheduler, third, 12)


def test_running_requests_grow_before_new_ones_are_admitted():
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    scheduler.add(request("a", [1] * 8, max_tokens=8))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.add(request("b", [2] * 5))
    plan = schedule(scheduler)
    assert [row.start for row in plan.rows] == [8]
    assert scheduler.num_waiting == 1


def test_slots_limit_how_many_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, [1, 2]))
    assert len(schedule(scheduler).rows) == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        ([1] * 60, 4, None),
        ([1] * 60, 5, RefusalReason.TOO_LONG),
        ([1] * 64, None, RefusalReason.TOO_LONG),
        ([1] * 63, None, None),
        ([1] * 500, 1, RefusalReason.TOO_LONG),
        ([], 1, RefusalReason.INVALID),
        ([1000], 1, RefusalReason.INVALID),
        ([-1], 1, RefusalReason.INVALID),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: list[int], max_tokens: int | None, reason: RefusalReason | None):
    scheduler = make_scheduler(max_model_len=64)
    refusal = scheduler.add(request("a", prompt, max_tokens=max_tokens))
    assert (refusal and refusal.reason) == reason
    if reason is RefusalReason.TOO_LONG:
        assert refusal is not None
        assert "64" in refusal.message
        assert str(len(prompt)) in refusal.message


def test_a_full_queue_refuses_with_overload():
    scheduler = make_scheduler(max_num_seqs=1, max_num_waiting=2)
    refusals = [scheduler.add(request(name, [1, 2])) for name in "abcd"]
    assert [r and r.reason for r in refusals] == [None, None, None, RefusalReason.OVERLOADED]
    assert scheduler.num_refused == 1


def test_an_id_that_is_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1]))
    refusal = scheduler.add(request("a", [2]))
    assert refusal is not None
    assert refusal.reason is RefusalReason.INVALID


def test_a_request_without_room_for_output_ends_after_its_prompt():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1, 2, 3], max_tokens=0))
    plan = schedule(scheduler)
    assert rows(plan) == [(0, 3, False)]
    [delta] = finish(scheduler, plan)
    assert (delta.token_ids, delta.finish_reason, delta.num_cached_tokens) == ([], FinishReason.LENGTH, 0)


def test_output_made_elsewhere_counts_as_output():
    scheduler = make_scheduler()
    resumed = request("a", [1, 2, 3], max_tokens=4)
    resumed.output_token_ids = [7, 8]
    scheduler.add(resumed)
    plan = schedule(scheduler)
    assert rows(plan) == [(0, 5, True)]
    assert plan.new[0].num_prompt_tokens == 3
    [first] = finish(scheduler, plan, 9)
    [last] = finish(scheduler, schedule(scheduler), 10)
    assert (first.finish_reason, last.finish_reason) == (None, FinishReason.LENGTH)


def test_a_resumed_request_that_has_all_its_output_is_refused():
    scheduler = make_scheduler()
    resumed = request("a", [1, 2, 3], max_tokens=2)
    resumed.output_token_ids = [7, 8]
    refusal = scheduler.add(resumed)
    assert refusal is not None
    assert refusal.reason is RefusalReason.INVALID


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "in flight", "decoding"])
def test_cancelling_frees_everything_at_any_moment(moment: str):
    scheduler = make_scheduler(budget=4)
    scheduler.add(request("a", [1] * 6))
    plans = []
    if moment != "waiting":
        plans.append(schedule(scheduler))
    if moment in ("in flight", "decoding"):
        finish(scheduler, plans.pop())
        plans.append(schedule(scheduler))
    if moment == "decoding":
        finish(scheduler, plans.pop(), 7)
        plans.append(schedule(scheduler))
    assert scheduler.cancel("a")
    for plan in plans:
        assert finish(scheduler, plan, *[7] * sum(row.samples for row in plan.rows)) == []
    assert scheduler.cache.pool.num_used == 0
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_cancelled) == (0, 0, 1)
    assert not scheduler.cancel("a")


def test_a_cancelled_request_does_not_hold_up_the_queue():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "abc":
        scheduler.add(request(name, [1, 2], max_tokens=1))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.cancel("b")
    [delta] = finish(scheduler, schedule(scheduler), 7)
    assert delta.request_id == "c"


def test_freed_slots_are_told_before_they_are_used_again():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", [1, 2], max_tokens=1))
    first = schedule(scheduler)
    finish(scheduler, first, 7)
    scheduler.add(request("b", [3, 4]))
    second = schedule(scheduler)
    assert second.freed_slots == [first.new[0].slot] == [second.new[0].slot]


def test_a_resumed_request_of_which_all_but_one_token_is_cached_is_no_decode_among_prefills():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1] * 8, max_tokens=8))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.cancel("a")
    scheduler.add(request("b", [2] * 10))
    resumed = request("c", [1] * 6, max_tokens=8)
    resumed.output_token_ids = [1, 1, 7]
    scheduler.add(resumed)
    plan = schedule(scheduler)
    assert [(row.start, row.num_tokens, row.is_decode) for row in plan.rows] == [(0, 10, False), (8, 1, False)]


def test_steps_are_quiet_until_somebody_ends_needs_a_block_or_fills_one():
    scheduler = make_scheduler()  # blocks of 4
    scheduler.add(request("a", [1] * 5, max_tokens=20))
    assert scheduler.num_quiet_steps() == 0
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.num_quiet_steps() == 1  # 6 of 8 computed: the 7th is quiet, the 8th fills a block
    finish(scheduler, first, 7)
    finish(scheduler, second, 7)
    assert scheduler.num_quiet_steps() == 1
    scheduler.add(request("b", [1]))
    assert scheduler.num_quiet_steps() == 0


def test_steps_are_quiet_while_the_one_that_waits_has_no_room():
    scheduler = make_scheduler(num_blocks=4, max_model_len=12)
    scheduler.add(request("a", [1] * 5, max_tokens=4))
    schedule(scheduler)
    scheduler.add(request("b", [2] * 11, max_tokens=1))
    schedule(scheduler)
    assert scheduler.num_waiting == 1
    assert scheduler.num_quiet_steps() == 1


def test_repeating_a_quiet_step_equals_scheduling_it_again():
    found = []
    for repeats in (False, True):
        scheduler = make_scheduler(block_size=32)
        scheduler.add(request("a", [1] * 5, max_tokens=9))
        scheduler.add(request("b", [2] * 3, max_tokens=30))
        finish(scheduler, schedule(scheduler), 7, 7)
        plan = schedule(scheduler)
        assert scheduler.num_quiet_steps() == 7
        if repeats:
            scheduler.repeat(6, 7)
        else:
            for _ in range(6):
                plan, before = schedule(scheduler), plan
                finish(scheduler, before, 7, 7)
        assert scheduler.num_quiet_steps() == 1
        deltas = finish(scheduler, plan, 7, 7)
        last = schedule(scheduler)
        deltas += finish(scheduler, last, 7, 7)
        numbers = scheduler.num_context_tokens, scheduler.num_generated_tokens
        found.append((deltas, rows(last), numbers, scheduler.cache.pool.num_used))
    assert found[0] == found[1]
    assert [delta.request_id for delta in found[0][0] if delta.finish_reason is not None] == ["a"]


def test_token_ids_are_not_looked_at_where_only_lengths_count():
    limits = replace(make_scheduler().limits, vocab_size=None)
    scheduler = Scheduler(limits, PrefixCache(8), BlockHasher(4, domain="test"))
    assert scheduler.add(request("a", [10**9])) is None


def load(scheduler: Scheduler) -> tuple[int, int]:
    """Tokens that are still to be computed beside decodes, and tokens that the last step's decodes read."""
    return scheduler.num_prefill_tokens, scheduler.num_context_tokens


def test_all_tokens_of_waiting_requests_are_still_to_be_computed():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1] * 10))
    resumed = request("b", [2] * 5)
    resumed.output_token_ids = [7, 8]
    scheduler.add(resumed)
    assert load(scheduler) == (17, 0)
    schedule(scheduler)
    assert load(scheduler) == (0, 0)


def test_what_a_step_leaves_of_a_begun_prompt_is_still_to_be_computed():
    scheduler = make_scheduler(budget=8)
    scheduler.add(request("a", [1] * 20))
    scheduler.add(request("b", [2] * 6))
    left = []
    for _ in range(4):
        schedule(scheduler)
        left.append(load(scheduler))
    # 8 of a; 8 of a; the last 4 of a with 4 of b; a decode over 21 tokens with the last 2 of b
    assert left == [(12 + 6, 0), (4 + 6, 0), (2, 0), (0, 21)]


def test_cached_tokens_are_not_to_be_computed_once_a_request_has_begun():
    scheduler = make_scheduler(budget=8)
    scheduler.add(request("a", [1] * 8, max_tokens=1))
    finish(scheduler, schedule(scheduler), 7)
    scheduler.add(request("b", [1] * 8 + [2] * 12))
    assert load(scheduler) == (20, 0)
    schedule(scheduler)
    assert load(scheduler) == (20 - 8 - 8, 0)


def test_decodes_read_all_tokens_before_them_and_their_own():
    scheduler = make_scheduler()
    scheduler.add(request("a", [1] * 4))
    scheduler.add(request("b", [2] * 9))
    finish(scheduler, schedule(scheduler), 7, 7)
    contexts = []
    for _ in range(2):
        finish(scheduler, schedule(scheduler), 7, 7)
        contexts.append(load(scheduler))
    assert contexts == [(0, 5 + 10), (0, 6 + 11)]


def test_prompts_that_no_budget_was_left_for_are_counted():
    scheduler = make_scheduler(budget=4, max_num_seqs=4)
    for name in "abc":
        scheduler.add(request(name, [1]))
    scheduler.add(request("d", [2] * 9))
    finish(scheduler, schedule(scheduler), 7, 7, 7)  # and 1 of the 9
    assert load(scheduler) == (8, 0)
    finish(scheduler, schedule(scheduler), 7, 7, 7)
    assert load(scheduler) == (7, 3 * 2)


def test_a_cancelled_request_leaves_nothing_to_be_computed():
    scheduler = make_scheduler(budget=8, max_num_seqs=1)
    scheduler.add(request("a", [1] * 20))
    scheduler.add(request("b", [2] * 5))
    plan = schedule(scheduler)
    scheduler.cancel("b")
    assert load(scheduler) == (12, 0)
    scheduler.cancel("a")
    assert scheduler.schedule() is None
    assert load(scheduler) == (0, 0)
    assert finish(scheduler, plan) == []


def test_a_preempted_request_has_all_its_tokens_to_be_computed_again():
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2, max_model_len=16)
    scheduler.add(request("a", [1] * 7, max_tokens=8))
    scheduler.add(request("b", [2] * 3, max_tokens=8))
    for _ in range(2):
        finish(scheduler, schedule(scheduler), 7, 7)
    assert load(scheduler) == (0, 8 + 4)
    schedule(scheduler)  # a needs a third block, b has three prompt tokens and two more
    assert scheduler.num_preemptions == 1
    assert load(scheduler) == (5, 9)


def test_an_engine_without_requests_has_nothing_to_compute_and_reads_nothing():
    scheduler = make_scheduler(budget=8)
    for name in "abcd":
        scheduler.add(request(name, [ord(name)] * 11, max_tokens=5))
    while (plan := scheduler.schedule()) is not None:
        finish(scheduler, plan, *[7] * sum(row.samples for row in plan.rows))
    assert load(scheduler) == (0, 0)
    assert not scheduler.has_unfinished
