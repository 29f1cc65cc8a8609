"""What sizes known ahead cost and attain: the best for each window, and no better than a fixed fleet for the whole."""

from __future__ import annotations

from manta.autoscaling.simulator.hindsight import choices

LATE = {1: [5.0, 6.0, 15.0], 2: [5.0], 3: []}
"""By size of a fixed fleet."""


def test_over_the_whole_time_the_choices_are_the_fixed_fleets() -> None:
    assert choices(LATE, window_s=20.0, end_s=20.0) == [(20.0, 3), (40.0, 1), (60.0, 0)]


def test_each_window_has_the_size_that_is_best_for_it() -> None:
    found = choices(LATE, window_s=10.0, end_s=20.0)
    assert found == [(20.0, 3), (30.0, 2), (40.0, 1), (50.0, 0)]


def test_what_is_no_better_for_more_is_no_choice() -> None:
    assert choices({1: [], 2: []}, window_s=10.0, end_s=20.0) == [(20.0, 0)]


def test_a_last_window_that_is_shorter_costs_less() -> None:
    assert choices({1: []}, window_s=10.0, end_s=15.0) == [(15.0, 0)]
