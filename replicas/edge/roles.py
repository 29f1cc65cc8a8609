"""Whether there is a ready replica for every role, and whether one may take another role. Pure; sends nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from manta.cluster.routing.roles import Role
from manta.engine.errors import InvalidRequest

from .client import ReplicaStatus


def unserved(wanted: Collection[Role], replicas: Sequence[ReplicaStatus]) -> list[Role]:
    """Of the roles that a deployment was made with, those for which no replica is ready. A mixed replica is one for
    every role; where mixed ones are wanted, what counts is that whole requests can be answered."""
    ready = {replica.role for replica in replicas if replica.ready}
    needed = dict.fromkeys(Role.DECODE if role is Role.MIXED else role for role in wanted)
    return [role for role in needed if not ready & {role, Role.MIXED}]


def check_role_change(
    replicas: Sequence[ReplicaStatus], replica_id: str, role: Role, *, wanted: Collection[Role]
) -> None:
    """Raise InvalidRequest for a replica that is not there, or without which a role would have no ready replica."""
    changed = next((replica for replica in replicas if replica.replica_id == replica_id), None)
    if changed is None:
        known = ", ".join(replica.replica_id for replica in replicas) or "none"
        raise InvalidRequest(f"There is no replica {replica_id[:200]!r}; there are: {known}.", param="replica")
    if not changed.ready and not changed.draining:
        raise InvalidRequest(f"Replica {replica_id} is not ready; wait until it is.", param="replica")
    others = [replica for replica in replicas if replica is not changed]
    after = [*others, ReplicaStatus(replica_id, ready=True, role=role)]
    lost = set(unserved(wanted, after)) - set(unserved(wanted, replicas))
    if lost:
        raise InvalidRequest(
            f"Replica {replica_id} is the only one that is ready for {lost.pop()}: give another one that role first, "
            "or make it mixed.",
            param="role",
        )
