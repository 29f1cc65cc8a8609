"""What the ranks of a gang are told of each other, and which of their errors says why they ended."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError

from manta.cluster.spec import GangSpec
from manta.engine.errors import ConfigError
from manta.replicas.shard import RankHost
from manta.replicas.shard_group import gang_members, telling_error


def host(address: str, store_port: int | None = None) -> RankHost:
    return RankHost(host=address, node_id="n", pid=1, gpu_ids=[], log_files=[], store_port=store_port)


def test_a_gang_of_one_needs_to_know_nothing() -> None:
    assert gang_members(GangSpec(), [host("10.0.0.1")]) == [None]


def test_every_rank_learns_its_place_the_store_and_all_nodes() -> None:
    hosts = [host("10.0.0.1", 4001), host("10.0.0.1"), host("10.0.0.2"), host("10.0.0.2")]
    members = [member for member in gang_members(GangSpec(tp_size=2, pp_size=2), hosts) if member is not None]
    assert [(member.place.tp_rank, member.place.pp_rank) for member in members] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {(member.store_host, member.store_port, member.backend) for member in members} == {("10.0.0.1", 4001, None)}
    assert {member.hosts for member in members} == {("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2")}
    assert len({member.gang_id for member in members}) == 1


def test_each_start_has_a_secret_of_its_own() -> None:
    hosts = [host("10.0.0.1", 4001), host("10.0.0.1")]
    first, second = (gang_members(GangSpec(tp_size=2), hosts)[0] for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.gang_id != second.gang_id


@pytest.mark.parametrize(("gpus_per_rank", "backend"), [(0.0, None), (0.5, "gloo"), (1.0, None)])
def test_ranks_that_share_a_gpu_exchange_through_the_host(gpus_per_rank: float, backend: str | None) -> None:
    spec = GangSpec(tp_size=2, gpus_per_rank=gpus_per_rank)
    members = gang_members(spec, [host("10.0.0.1", 4001), host("10.0.0.1")])
    assert [member.backend for member in members if member is not None] == [backend, backend]


def test_what_a_rank_raised_says_more_than_that_others_died_of_it() -> None:
    cause = ConfigError("max_model_len does not fit")
    assert telling_error([ActorDiedError(), None, cause]) is cause


def test_without_a_reason_the_gang_has_died_which_has_serve_replace_it_at_once() -> None:
    died = ActorDiedError()
    error = telling_error([None, died])
    assert isinstance(error, ActorDiedError)
    assert error.__cause__ is died
    assert isinstance(telling_error([None, None]), ActorDiedError)
