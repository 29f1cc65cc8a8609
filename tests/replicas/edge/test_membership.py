"""The router in Serve's hands: a call goes to the replica that it names, and never waits for one that is gone."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():  # Ray's own, at import
    warnings.simplefilter("ignore")
    from ray.serve.exceptions import RayServeException

    from manta.replicas.edge.membership import Membership, PinnedRouter


def replicas(*names: str) -> Any:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def pending(**arguments: Any) -> Any:
    return SimpleNamespace(kwargs=arguments, future=asyncio.get_running_loop().create_future())


async def choose(candidates: Any, request: Any) -> list[list[str]]:
    router: Any = SimpleNamespace()
    groups = await PinnedRouter.choose_replicas(router, candidates, request)
    return [[replica.replica_id.unique_id for replica in group] for group in groups]


async def test_a_call_goes_to_the_replica_that_it_names() -> None:
    request = pending(replica_id="b")
    assert await choose(replicas("a", "b"), request) == [["b"]]
    assert not request.future.done()


async def test_a_call_that_names_none_may_go_anywhere() -> None:
    assert await choose(replicas("a", "b"), pending()) == [["a", "b"]]
    assert await choose(replicas("a", "b"), None) == [["a", "b"]]


async def test_a_call_to_a_replica_that_is_gone_fails_at_once() -> None:
    """With no choice at all Serve's router would spin, and the edge with it."""
    request = pending(replica_id="gone")
    assert await choose(replicas("a", "b"), request) == [["a", "b"]]
    with pytest.raises(RayServeException, match="gone"):
        await request.future


async def test_a_call_that_was_given_up_meanwhile_stays_given_up() -> None:
    request = pending(replica_id="gone")
    request.future.cancel()
    assert await choose(replicas("a"), request) == [["a"]]
    assert request.future.cancelled()


async def test_members_are_those_of_all_deployments_and_each_is_known_by_its_own() -> None:
    membership, heard = Membership(), []
    membership.listen(heard.append)
    membership.publish("prefill", frozenset({"a"}))
    membership.publish("decode", frozenset({"b", "c"}))
    membership.publish("decode", frozenset({"b", "c"}))  # Serve says it again with every routing statistic
    membership.publish("prefill", frozenset())
    await asyncio.sleep(0)
    assert heard == [frozenset(), frozenset({"a"}), frozenset({"a", "b", "c"}), frozenset({"b", "c"})]
    assert membership.ids == membership.ids_of("decode") == {"b", "c"}
    assert membership.ids_of("prefill") == frozenset()
    assert membership.deployment_of("c") == "decode"
    assert membership.deployment_of("a") is None
