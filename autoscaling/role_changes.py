"""Which replicas of a pair of pools change between prefill and decode, before GPUs are added. Pure; knows no rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided, ReasonCode

from .signals import PoolState


@dataclass(frozen=True)
class RoleChange:
    """One replica of a pool is to drain and take another role; nothing is loaded."""

    pool: str
    """Where it belongs."""
    role: Role
    """Which it takes."""
    num_replicas: int = 1


def role_changes(
    pools: Sequence[PoolState], targets: dict[str, int], *, now_s: float, may_change: bool
) -> tuple[tuple[RoleChange, ...], list[Decided]]:
    """Where one of prefill and decode lacks what the other has beyond its need, replicas change sides.

    `targets` (replicas by pool) are what each role needs, and become what each pool should own then: replicas that it
    lent among them, borrowed ones not. Not `may_change`: no one moves. Also returns why, for the log of decisions.
    """
    pair = {pool.role: pool for pool in pools}
    if Role.PREFILL not in pair or Role.DECODE not in pair or len(pair) != len(pools):
        return (), []
    changes: list[RoleChange] = []
    said: list[Decided] = []
    prefill, decode = pair[Role.PREFILL], pair[Role.DECODE]
    acting = {
        pool.name: pool.num_ready - pool.num_lent + other.num_lent
        for pool, other in ((prefill, decode), (decode, prefill))
    }
    for short, rich in ((prefill, decode), (decode, prefill)):
        missing = targets[short.name] - acting[short.name] - short.num_starting
        spare = acting[rich.name] - targets[rich.name]
        num = min(missing, spare, acting[rich.name] - 1)
        if num <= 0 or not may_change or changes:
            continue
        back = min(num, short.num_lent)  # first those that are its own
        if back:
            changes.append(RoleChange(short.name, short.role, back))
        if num > back:
            changes.append(RoleChange(rich.name, short.role, num - back))
        because = (
            f"{num} of {rich.name} take the role {short.role.value}: {short.name} needs {targets[short.name]} and "
            f"{rich.name} only {targets[rich.name]}"
        )
        before = acting[short.name]
        said.append(
            Decided(
                time_s=now_s,
                pool=short.name,
                before=before,
                after=before + num,
                reason=ReasonCode.ROLE_CHANGE,
                sentence=because,
            )
        )
    # A pool owns what it has lent: its target counts its own replicas, wherever they work.
    lent = {prefill.name: prefill.num_lent, decode.name: decode.num_lent}
    for change in changes:
        owner = prefill if change.pool == prefill.name else decode
        lent[change.pool] += change.num_replicas if change.role is not owner.role else -change.num_replicas
    for pool, other in ((prefill, decode), (decode, prefill)):
        own = targets[pool.name] + lent[pool.name] - lent[other.name]
        targets[pool.name] = min(max(own, pool.min_replicas), pool.max_replicas)
    return tuple(changes), said
