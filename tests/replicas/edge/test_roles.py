"""Which roles a deployment lacks, and which replica may change its own."""

from __future__ import annotations

import pytest

from manta.cluster.routing.roles import Role
from manta.engine.errors import InvalidRequest
from manta.replicas.edge.client import ReplicaStatus
from manta.replicas.edge.roles import check_role_change, unserved

POOLS = (Role.PREFILL, Role.DECODE)
COLOCATED = (Role.MIXED,)


def status(name: str, role: Role, *, ready: bool = True, draining: bool = False) -> ReplicaStatus:
    return ReplicaStatus(name, ready=ready, role=role, draining=draining)


P, D, M = status("p", Role.PREFILL), status("d", Role.DECODE), status("m", Role.MIXED)
DOWN = status("x", Role.DECODE, ready=False)


@pytest.mark.parametrize(
    ("wanted", "replicas", "lacking"),
    [
        (POOLS, [P, D], []),
        (POOLS, [P], [Role.DECODE]),
        (POOLS, [D, DOWN], [Role.PREFILL]),
        (POOLS, [P, DOWN], [Role.DECODE]),
        (POOLS, [M], []),
        (POOLS, [], [Role.PREFILL, Role.DECODE]),
        (COLOCATED, [M], []),
        (COLOCATED, [D], []),
        (COLOCATED, [P], [Role.DECODE]),
        (COLOCATED, [], [Role.DECODE]),
    ],
)
def test_every_role_needs_a_ready_replica_and_a_mixed_one_is_enough(
    wanted: tuple[Role, ...], replicas: list[ReplicaStatus], lacking: list[Role]
) -> None:
    assert unserved(wanted, replicas) == lacking


@pytest.mark.parametrize(
    ("wanted", "replicas", "changed", "role"),
    [
        (POOLS, [P, D, status("p2", Role.PREFILL)], "p2", Role.DECODE),
        (POOLS, [P, D], "p", Role.MIXED),
        (POOLS, [P, D, M], "p", Role.DECODE),
        (POOLS, [P, D], "p", Role.PREFILL),
        (COLOCATED, [M, status("m2", Role.MIXED)], "m2", Role.PREFILL),
        (POOLS, [status("p", Role.PREFILL, ready=False, draining=True), D, M], "p", Role.PREFILL),
    ],
)
def test_a_role_may_be_taken_when_the_others_are_enough(
    wanted: tuple[Role, ...], replicas: list[ReplicaStatus], changed: str, role: Role
) -> None:
    check_role_change(replicas, changed, role, wanted=wanted)


@pytest.mark.parametrize(
    ("wanted", "replicas", "changed", "role", "message"),
    [
        (POOLS, [P, D], "p", Role.DECODE, "the only one that is ready for prefill"),
        (POOLS, [P, D, DOWN], "d", Role.PREFILL, "the only one that is ready for decode"),
        (COLOCATED, [M], "m", Role.PREFILL, "the only one that is ready for decode"),
        (POOLS, [P, D], "z", Role.MIXED, "There is no replica 'z'; there are: p, d."),
        (POOLS, [P, D, DOWN], "x", Role.MIXED, "Replica x is not ready"),
    ],
)
def test_a_replica_that_cannot_be_spared_keeps_its_role(
    wanted: tuple[Role, ...], replicas: list[ReplicaStatus], changed: str, role: Role, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_role_change(replicas, changed, role, wanted=wanted)
