"""The choice of a replica."""

from __future__ import annotations

from manta.cluster.routing.policy import Candidate, choose


def test_the_least_loaded_is_chosen_with_a_reason() -> None:
    choice = choose([Candidate("a", 3, 8), Candidate("b", 2, 8), Candidate("c", 2, 8)])
    assert choice is not None
    assert choice.replica_id == "b"
    assert choice.reason == "fewest requests (2 of 8) among 3 free replicas"


def test_a_full_one_is_not_chosen_even_when_it_has_the_least() -> None:
    choice = choose([Candidate("small", 1, 1), Candidate("large", 5, 8)])
    assert choice is not None
    assert choice.replica_id == "large"


def test_none_when_all_are_full_or_there_is_none() -> None:
    assert choose([]) is None
    assert choose([Candidate("a", 4, 4)]) is None
