"""What a router believes about a replica, in literal numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from manta.cluster.routing.pace import Pace
from manta.cluster.routing.replica_view import LEAST_STEP_S, ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.stats import EngineInfo, Snapshot
from manta.engine.step_costs import StepCosts

COSTS = StepCosts(overhead_s=0.0, weights_s=1.0, token_s=0.01, pair_s=0.0, context_token_s=0.001)


def view(**sizes: Any) -> ReplicaView:
    defaults: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 1000,
        "max_num_seqs": 8,
        "tokens_a_step": 200,
        "max_requests": 16,
        "costs": COSTS,
    }
    return ReplicaView("x", **(defaults | sizes))


def pace(one: ReplicaView) -> Pace:
    found = one.pace(None)
    assert found is not None
    return found


def test_a_request_counts_until_it_ends_whether_or_not_a_snapshot_has_it():
    one = view()
    one.sent("r", 100, 100, 0.0)
    assert one.num_requests == 1
    one.learn(Snapshot(num_running=3), 0.1)  # may have been on its way before
    assert one.num_requests == 4
    one.learn(Snapshot(num_running=4), 0.2)
    assert one.num_requests == 4
    one.began("r")
    assert (one.num_requests, one.num_own, one.num_begun) == (4, 1, 1)
    one.learn(Snapshot(), 0.3)
    assert one.num_requests == 1
    one.ended("r")
    one.ended("r")
    one.ended("unknown")
    assert (one.num_requests, one.num_own) == (0, 0)


def test_an_idle_replica_begins_at_once():
    idle = pace(view())
    assert (idle.queue_s, idle.slot_s, idle.num_decodes, idle.free_blocks) == (0.0, 0.0, 0, 1000)
    assert (idle.chunk, idle.chunk_s, idle.step_s) == (200, 2.0, 1.0)
    assert not idle.has_prompts_waiting


def test_prompts_ahead_are_counted_in_steps_beside_the_decodes():
    one = view()
    one.learn(Snapshot(num_running=4, num_context_tokens=500, num_prefill_tokens=784, last_step_s=2.0), 0.0)
    busy = pace(one)
    # A step takes 196 prompt tokens and 4 decodes in 2 s, and the decodes read for 0.5 s; 784 tokens are 4 steps.
    assert (busy.num_decodes, busy.chunk, busy.chunk_s) == (4, 196, 2.5)
    assert busy.step_s == 1.5
    assert busy.queue_s == pytest.approx(4 * 2.5 + 1.5 * 1.5)
    assert busy.has_prompts_waiting


def test_a_prompt_that_was_just_sent_delays_the_next_one_by_its_uncached_part():
    one = view()
    one.sent("r", 400, 1000, 0.0)
    assert pace(one).queue_s == pytest.approx(4.0)
    assert pace(one).free_blocks == 1000 - 25


def test_of_its_own_waiting_requests_only_the_uncached_part_is_ahead():
    one = view()
    one.sent("r", 200, 1000, 0.0)
    for now_s in (0.1, 0.2):
        one.learn(Snapshot(num_waiting=1, num_prefill_tokens=1000, last_step_s=1.0), now_s)
    assert pace(one).queue_s == pytest.approx(2.0 + 1.5)


def test_of_the_requests_of_others_a_part_is_expected_to_be_cached():
    one = view()
    for turn in range(100):
        one.learn(Snapshot(num_prompt_tokens=turn * 100, num_cached_tokens=turn * 75), 0.0)
    one.learn(Snapshot(num_prompt_tokens=9900, num_cached_tokens=7425, num_prefill_tokens=800), 0.0)
    assert pace(one).queue_s == pytest.approx(2.0, rel=0.01)


def test_mixed_steps_take_as_many_prompt_tokens_as_they_are_allowed():
    load = Snapshot(num_running=4, num_context_tokens=500)
    one = view(max_mixed_prefill_tokens=50)
    one.learn(load, 0.0)
    assert pace(one).chunk == 50
    one = view(tpot_target_s=2.305)
    one.learn(load, 0.0)
    assert pace(one).chunk == 176  # 1.8 s beside what the decodes read are 180 tokens
    one = view(tpot_target_s=0.1)
    one.learn(load, 0.0)
    assert pace(one).chunk == 128  # what the engine's own budget grants always
    one.learn(Snapshot(), 0.0)
    assert pace(one).chunk == 200


def test_without_a_free_slot_a_request_waits_for_others_to_end():
    one = view()
    ended = 0
    for second in range(5):
        one.learn(Snapshot(num_running=8, num_waiting=2, num_finished=ended, num_context_tokens=8), float(second))
        ended += 4
    # Slots are held for two seconds, the next four for one already; and the step after that is planned then.
    assert pace(one).slot_s == pytest.approx(1.0 + pace(one).step_s)
    assert pace(one).doubt_s == 0.0


def test_slots_are_taken_in_turn_by_several_routers():
    one = view()
    one.num_routers, one.turn = 2, 1
    for second in range(3):  # eight begin and end together, every second
        one.learn(Snapshot(num_running=7, num_finished=7 * second, num_context_tokens=8), float(second))
    wait_s = 1.0 + pace(one).step_s
    assert pace(one).slot_s == pytest.approx(wait_s)  # one is free, but another router's
    one.turn = 0
    one.sent("a", 10, 10, 2.0)
    assert pace(one).slot_s == pytest.approx(wait_s)  # was the second one of those that are free
    for number in range(3):
        one.sent(f"b{number}", 10, 10, 2.0)
    assert pace(one).slot_s == pytest.approx(1.0 + wait_s)  # and the other router sends as many


def test_without_free_blocks_it_waits_for_their_release():
    one = view(num_blocks=100)
    for second in range(3):
        load = Snapshot(num_running=4, num_waiting=1, num_used_blocks=80, num_prefill_tokens=320)
        one.learn(
            Snapshot(**{name: getattr(load, name) for name in load.__struct_fields__} | {"num_finished": 2 * second}),
            float(second),
        )
    # Two requests of 20 blocks end a second; the one that waits needs 20.
    assert pace(one).free_blocks == 0
    assert pace(one).block_s == pytest.approx(1 / 40)


def test_estimates_are_corrected_by_what_was_observed_within_bounds():
    one = view()
    for turn in range(100):
        one.sent(str(turn), 200, 200, 0.0, estimate_s=2.0 * one.correction)
        one.began(str(turn), 4.0)
        one.ended(str(turn))
    assert one.correction == pytest.approx(2.0, rel=0.02)
    for turn in range(100):
        one.sent(str(turn), 200, 200, 0.0, estimate_s=2.0 * one.correction)
        one.began(str(turn), 1000.0)
        one.ended(str(turn))
    assert one.correction == pytest.approx(4.0, rel=0.01)
    assert pace(one).chunk_s == pytest.approx(2.0 * one.correction)


def test_one_surprise_changes_little_and_short_times_say_nothing():
    one = view()
    one.sent("r", 200, 200, 0.0, estimate_s=2.0)
    one.began("r", 100.0)
    assert 1.0 < one.correction < 1.2
    one = view()
    one.sent("r", 1, 1, 0.0, estimate_s=0.0001)
    one.began("r", 0.001)
    assert one.correction == pytest.approx(1.0, rel=0.01)
    one.sent("s", 1, 1, 0.0)
    one.began("s", 9.0)
    assert one.correction == pytest.approx(1.0, rel=0.01)


def test_a_deadline_is_promised_with_what_first_tokens_came_late_so_far():
    one = view()
    for number in range(100):
        one.sent(str(number), 100, 100, 0.0, estimate_s=1.0)
        one.began(str(number), 1.3)
        one.ended(str(number))
    assert pace(one).doubt_s == pytest.approx(0.3, rel=0.01)
    for number in range(200):
        one.sent(str(number), 100, 100, 0.0, estimate_s=1.0)
        one.began(str(number), 0.9)
        one.ended(str(number))
    assert pace(one).doubt_s == 0.0  # earlier than estimated is no reason to promise more


def test_what_is_packed_follows_every_change():
    one = view()
    changes = [
        lambda: one.sent("r", 1000, 1000, 0.0),
        lambda: one.learn(Snapshot(num_running=1), 1.0),
        lambda: one.ended("r"),
        lambda: setattr(one, "role", Role.PREFILL),
        lambda: setattr(one, "max_requests", 3),
        lambda: setattr(one, "costs", StepCosts(overhead_s=1, weights_s=1, token_s=1, pair_s=1, context_token_s=1)),
        lambda: one.learn_transfer(1e9, 0.5),
    ]
    for change in changes:
        before = one.pack(COSTS)
        change()
        assert one.packed != before
        assert one.pack(COSTS) != before


def test_a_view_takes_its_sizes_from_what_the_engine_says():
    info = EngineInfo(
        model_name="m",
        max_model_len=100,
        vocab_size=10,
        block_size=16,
        num_blocks=50,
        max_num_seqs=8,
        max_num_waiting=100,
        device="sim",
        dtype="float32",
        max_num_batched_tokens=512,
        step_costs=COSTS,
        memory_ledger_bytes={"kv_cache": 50 * 16 * 1000},
    )
    one = ReplicaView.of("x", info, role=Role.DECODE, max_waiting=4)
    assert (one.max_requests, one.tokens_a_step, one.kv_bytes_per_token) == (12, 512, 1000.0)
    assert (one.costs, one.role, one.model_name, one.ready_at_s) == (COSTS, Role.DECODE, "m", -math.inf)
    assert ReplicaView.of("x", info).max_requests == 108


def test_of_a_device_whose_steps_seem_to_take_nothing_every_number_is_known():
    free = StepCosts(overhead_s=0.0, weights_s=0.0, token_s=0.0, pair_s=0.0, context_token_s=0.001)
    one = view(costs=free)
    one.learn(Snapshot(), 0.0)
    assert pace(one).step_s == LEAST_STEP_S
    one.learn(Snapshot(num_running=2, num_context_tokens=100), 1.0)
    assert pace(one).step_s == pytest.approx(0.1)
    assert all(math.isfinite(number) for number in pace(one))
