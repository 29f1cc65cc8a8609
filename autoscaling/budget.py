"""A GPU budget shared out: among the pools of a model, and among models. Pure; knows no loads.

Everybody gets his least first; what is left goes, a replica at a time, to whoever has the smallest part of what he
needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .signals import PoolState


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One model's or pool's."""

    name: str
    least: int
    """Units (replicas, or GPUs) that it gets whatever happens."""
    wanted: int
    """Units."""
    gpus: float = 1.0
    """A unit's."""


def share(asks: Sequence[Ask], budget: float | None) -> dict[str, int]:
    """Units for each ask, none more than wanted (but at least its least). The same for everybody who computes it."""
    granted = {ask.name: max(ask.wanted, ask.least) for ask in asks}
    if budget is None or sum(granted[ask.name] * ask.gpus for ask in asks) <= budget + 1e-9:
        return granted
    granted = {ask.name: ask.least for ask in asks}
    left = budget - sum(ask.least * ask.gpus for ask in asks)
    while True:
        short = [ask for ask in asks if granted[ask.name] < ask.wanted and ask.gpus <= left + 1e-9]
        if not short:
            return granted
        poorest = min(short, key=lambda ask: (granted[ask.name] / ask.wanted, ask.name))
        granted[poorest.name] += 1
        left -= poorest.gpus


@dataclass(frozen=True, kw_only=True)
class ModelAsk:
    """One model's, in GPUs."""

    name: str
    least: float
    """For the replicas that it has whatever happens."""
    wanted: float
    held: float
    """By replicas that it has, that start and that drain."""


def own_budget(own: ModelAsk, others: Sequence[ModelAsk], budget: float) -> float:
    """GPUs that a model may use of a budget it has in common with others: its share, but not what they still hold.

    Every model computes the same shares from the same asks, so that who holds too much gives way to who lacks.
    """
    asks = [Ask(name=one.name, least=math.ceil(one.least), wanted=math.ceil(one.wanted)) for one in (own, *others)]
    room = budget - sum(other.held for other in others)
    return max(min(float(share(asks, budget)[own.name]), room), own.least)


def fit_into(budget: float | None, pools: Sequence[PoolState], targets: Mapping[str, int]) -> dict[str, int]:
    """Targets within the budget. What drains holds its GPUs until it is gone, so growth waits for that."""
    if budget is None:
        return dict(targets)
    draining = sum(pool.num_draining * pool.gpus_per_replica for pool in pools)
    asks = [
        Ask(
            name=pool.name,
            least=min(pool.min_replicas, targets[pool.name]),
            wanted=targets[pool.name],
            gpus=pool.gpus_per_replica,
        )
        for pool in pools
    ]
    return share(asks, budget - draining)
