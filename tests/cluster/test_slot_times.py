"""When slots become free, of replicas whose requests begin and end at literal times."""

from __future__ import annotations

import random

import pytest

from manta.cluster.routing.slot_times import SlotTimes


def bursts(num_bursts: int, *, size: int, hold_s: float) -> SlotTimes:
    """All slots are taken at once, and again when they become free."""
    times = SlotTimes()
    for number in range(num_bursts):
        times.learn(size, number * size, number * hold_s)
    return times


def test_nothing_is_known_before_a_slot_was_held() -> None:
    times = SlotTimes()
    assert times.wait(0, 0.0) is None
    times.learn(8, 0, 1.0)
    assert times.wait(0, 2.0) is None


def test_after_a_burst_the_first_slot_is_as_far_as_the_last() -> None:
    times = bursts(4, size=8, hold_s=3.0)
    for num_before in (0, 7):
        wait = times.wait(num_before, 10.0)  # the last burst came at 9
        assert wait is not None
        assert wait == pytest.approx((2.0, 2.0))


def test_those_behind_a_whole_round_wait_for_one_answer_more() -> None:
    wait = bursts(4, size=8, hold_s=3.0).wait(8, 10.0)
    assert wait is not None
    assert wait.usual_s == pytest.approx(5.0)


def test_slots_that_were_taken_in_turn_become_free_in_turn() -> None:
    times = SlotTimes()
    for number in range(40):  # each is held for 2 s, one becomes free every half
        times.learn(4, max(number - 4, 0), number * 0.5)
    waits = [times.wait(num_before, 19.6) for num_before in range(4)]
    assert [wait.usual_s for wait in waits if wait is not None] == pytest.approx([0.4, 0.9, 1.4, 1.9], abs=0.15)


def test_what_was_held_for_longer_than_ever_may_become_free_at_any_time() -> None:
    wait = bursts(4, size=8, hold_s=3.0).wait(0, 20.0)
    assert wait is not None
    assert 0.0 < wait.usual_s < wait.sure_s < 1.0


def test_sure_is_what_nearly_all_waits_keep_when_answers_differ() -> None:
    rng, times = random.Random(1), SlotTimes()
    ends_s = sorted(rng.expovariate(1.0) for _ in range(8))
    found: list[tuple[float, float, float]] = []
    for num_ended in range(1, 2001):
        now_s = ends_s.pop(0)
        ends_s = sorted([*ends_s, now_s + rng.expovariate(1.0)])
        times.learn(8, num_ended, now_s)
        wait = times.wait(3, now_s)
        if wait is not None:
            found.append((wait.usual_s, wait.sure_s, now_s))
    ended_s = [now_s for _, _, now_s in found]
    actual_s = [ended_s[index + 4] - now_s for index, (_, _, now_s) in enumerate(found[:-4])]
    kept = sum(one <= sure_s for one, (_, sure_s, _) in zip(actual_s, found, strict=False))
    assert kept / len(actual_s) > 0.85
    usual_s = sum(one for one, _, _ in found) / len(found)
    assert usual_s == pytest.approx(sum(actual_s) / len(actual_s), rel=0.3)


def test_preempted_requests_and_other_engines_leave_nothing_behind() -> None:
    times = bursts(2, size=8, hold_s=3.0)
    times.learn(5, 8, 4.0)  # three of them wait again
    times.learn(8, 8, 5.0)
    assert times.wait(7, 5.0) == pytest.approx((3.0, 3.0))
    times.learn(2, 0, 6.0)  # began anew
    assert times.wait(0, 6.0) == pytest.approx((3.0, 3.0))
