"""Who is silent and which step hangs, by a clock that the test turns."""

from __future__ import annotations

from manta.engine.parallel.vitals import FIRST_STEPS, FIRST_STEPS_S, LEAST_STEP_S, Silence, StepClock


def turn(silence: Silence, start_s: float, end_s: float, heard: tuple[int, ...] = ()) -> float | None:
    """Look around four times a second; `heard` are heard of each time. Returns when somebody was found silent."""
    now_s = start_s
    while now_s < end_s:
        now_s += 0.25
        for peer in heard:
            silence.heard(peer)
        if silence.look(now_s) is not None:
            return now_s
    return None


def test_a_rank_that_falls_silent_is_noticed_after_3_seconds_and_before_4():
    silence = Silence(0.0)
    silence.is_up(1)
    silence.is_up(2)
    assert turn(silence, 0.0, 100.0, heard=(1, 2)) is None
    noticed_s = turn(silence, 100.0, 110.0, heard=(1,))
    assert noticed_s is not None
    assert 103.0 <= noticed_s < 104.0


def test_a_rank_that_starts_may_be_silent_for_longer():
    silence = Silence(0.0)
    silence.heard(1)
    assert turn(silence, 0.0, 50.0) is None
    assert turn(silence, 50.0, 70.0) is not None


def test_a_rank_that_said_farewell_is_not_missed():
    silence = Silence(0.0)
    silence.is_up(1)
    silence.forget(1)
    assert turn(silence, 0.0, 100.0) is None


def test_the_time_that_the_listener_itself_was_frozen_does_not_count():
    silence = Silence(0.0)
    silence.is_up(1)
    silence.look(0.25)
    assert silence.look(1000.0) is None


def steps(clock: StepClock, *, count: int, num_tokens: int, took_s: float, now_s: float = 0.0) -> float:
    for step_id in range(count):
        clock.begin(step_id, num_tokens, now_s)
        now_s += took_s
        clock.end(now_s)
    return now_s


def test_a_step_that_hangs_is_noticed_after_5_seconds_where_steps_are_short():
    clock = StepClock()
    now_s = steps(clock, count=20, num_tokens=8, took_s=0.01)
    clock.begin(20, 8, now_s)
    assert clock.overdue(now_s + LEAST_STEP_S - 0.1) is None
    assert "Step 20 of 8 tokens hangs" in str(clock.overdue(now_s + LEAST_STEP_S + 0.1))


def test_the_first_steps_are_excused():
    clock = StepClock()
    steps(clock, count=FIRST_STEPS - 1, num_tokens=8, took_s=0.01)
    clock.begin(7, 8, 0.0)
    assert clock.overdue(FIRST_STEPS_S - 1) is None
    assert clock.overdue(FIRST_STEPS_S + 1) is not None


def test_a_long_prefill_on_a_slow_device_is_no_hang():
    clock = StepClock()
    now_s = steps(clock, count=1, num_tokens=300, took_s=40.0)
    now_s = steps(clock, count=500, num_tokens=2, took_s=0.3, now_s=now_s)  # decodes of two streams
    clock.begin(501, 511, now_s)
    assert clock.overdue(now_s + 76.0) is None
    assert clock.overdue(now_s + 1600.0) is not None


def test_the_first_step_of_a_size_is_excused():
    clock = StepClock()
    now_s = steps(clock, count=20, num_tokens=8, took_s=0.01)
    clock.begin(20, 100, now_s)
    assert clock.overdue(now_s + FIRST_STEPS_S - 1) is None


def test_a_known_speed_decides_where_there_is_one():
    clock = StepClock(predict=lambda num_tokens: 0.001 * num_tokens)
    steps(clock, count=20, num_tokens=8, took_s=1.0)
    assert clock.allowed_s(8) == LEAST_STEP_S
    steps(clock, count=1, num_tokens=1000, took_s=1.0)
    assert clock.allowed_s(1000) == 20.0


def test_time_in_which_the_host_was_frozen_is_no_step_s():
    clock = StepClock()
    now_s = steps(clock, count=20, num_tokens=8, took_s=0.01)
    clock.begin(20, 8, now_s)
    clock.was_frozen(now_s + 1000)
    assert clock.overdue(now_s + 1001) is None
    assert clock.overdue(now_s + 1006) is not None


def test_nothing_hangs_while_the_host_waits_for_nothing():
    clock = StepClock()
    now_s = steps(clock, count=20, num_tokens=8, took_s=0.01)
    assert clock.overdue(now_s + 10_000) is None
