"""Which replica takes a request: the one where it is answered soonest, in estimated seconds. Pure.

Views and index in, a choice with all its terms out; the clock and the number that breaks ties are arguments. Knows no
network, no queue of its own and no request but this one.

What a replica costs: waiting for the prompts that are ahead there and for room, computing the part of the prompt that
is not cached there, decoding beside its other requests, and a share of the time that they lose to this one. With
prefill and decode replicas, a pair of them is one more candidate: the prompt is computed on one and its KV moves to the
other. All are compared in the same seconds, so that a hot prefix spreads when waiting for it takes longer than
computing it elsewhere, and a short or well-cached prompt skips the detour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from manta.engine.step_costs import StepCosts

from .cost_table import Column, CostTable, Loads
from .decision import Considered, CostTerms, Decision, NoRoom, NoRoomReason, RouteRequest, RoutingSettings
from .prefix_index import PrefixIndex
from .replica_view import ReplicaView
from .roles import Role

__all__ = [
    "Considered",
    "CostTerms",
    "Decision",
    "NoRoom",
    "NoRoomReason",
    "RouteRequest",
    "RoutingSettings",
    "decide",
]

UNKNOWN_WAIT_S = 1.0
"""After which a request may be sent again, while nobody knows how long replicas take."""
NOMINAL = StepCosts(overhead_s=0.005, weights_s=0.0, token_s=1e-3, pair_s=0.0, context_token_s=0.0)
"""A device that nobody has, to weigh prompts and decodes by while nobody's speed is known."""


def decide(
    request: RouteRequest,
    views: Sequence[ReplicaView],
    index: PrefixIndex,
    *,
    now_s: float,
    settings: RoutingSettings,
    tie: float,
) -> Decision | NoRoom:
    """The candidate with the least cost among `views`, which are the replicas that take new work.

    `tie` in [0, 1) draws among those that are level: routers that pass different numbers do not all choose the same.
    Changes nothing; the caller tells view and index what it then sends.
    """
    if not views:
        return NoRoom(NoRoomReason.NO_REPLICA, UNKNOWN_WAIT_S, tuple)
    stand_in = next((view.costs for view in views if view.costs is not None), None)
    loads = Loads.of(views, stand_in or NOMINAL)
    if np.minimum.reduce(loads.is_prefill):  # all: better they than nobody
        loads = loads._replace(is_prefill=np.zeros(len(views)))
    fleet = _Fleet(request, views, loads, now_s, settings.ramp_s)
    if not fleet.can_decode:
        return fleet.no_room(is_known=stand_in is not None)
    matched = index.match(request.block_hashes)
    table = CostTable(request, views, loads, fleet.able, matched, now_s=now_s, settings=settings)
    latest_s = math.inf  # seconds that nobody has are no reason to refuse
    if stand_in is not None:
        latest_s = settings.max_wait_s
        if request.deadline_s is not None:
            latest_s = min(latest_s, request.deadline_s - now_s)

    def considered() -> tuple[Considered, ...]:
        return (*table.considered(latest_s), *fleet.unable())

    totals, first_tokens = table.totals, table.first_tokens
    if _must_detour(request, settings) and (is_pair := table.is_pair).any():
        totals, first_tokens = np.where(is_pair, totals, math.inf), np.where(is_pair, first_tokens, math.inf)
    soonest_s = float(np.minimum.reduce(first_tokens))
    if soonest_s > latest_s:
        reason = NoRoomReason.WAIT if soonest_s > settings.max_wait_s else NoRoomReason.DEADLINE
        return NoRoom(reason, soonest_s, considered)
    if np.maximum.reduce(first_tokens) > latest_s:
        totals = np.where(first_tokens <= latest_s, totals, math.inf)
    level = (totals <= np.minimum.reduce(totals) + settings.tie_s).nonzero()[0]
    chosen = int(level[int(tie * len(level))])
    estimate = CostTerms(0) if stand_in is None else table.terms_of(chosen)
    reason = _reason(estimate, len(table), len(level), is_by_load=stand_in is None)
    replica_id, prefill_replica_id = table.replica_id(chosen), table.prefill_replica_id(chosen)
    return Decision(replica_id, prefill_replica_id, estimate, reason, stand_in is None, considered)


def _must_detour(request: RouteRequest, settings: RoutingSettings) -> bool:
    from_tokens = settings.detour_from_tokens
    return request.may_detour and from_tokens is not None and request.num_prompt_tokens >= from_tokens


class _Fleet:
    """Which replicas may take a request, and why the others may not."""

    def __init__(
        self, request: RouteRequest, views: Sequence[ReplicaView], loads: Loads, now_s: float, ramp_s: float
    ) -> None:
        self._request, self._views, self._loads = request, views, loads
        is_able = loads.num_requests < loads.max_requests
        if request.model_name is not None or request.excluded:
            is_able &= [self._misfit(view) is None for view in views]
        self.able: list[int] = is_able.nonzero()[0].tolist()
        """Indices of the views that may."""
        self._warming: frozenset[int] = frozenset()
        age_s = now_s - loads.ready_at_s
        if np.minimum.reduce(age_s) < ramp_s:
            self._hold_back(age_s, ramp_s)

    @property
    def can_decode(self) -> bool:
        """Whether one of them runs requests to their end."""
        return any(not self._loads.is_prefill[index] for index in self.able)

    def unable(self) -> list[Considered]:
        """Those that may not, each with the reason."""
        able = set(self.able)
        left = [index for index in range(len(self._views)) if index not in able]
        return [Considered(self._views[index].replica_id, None, None, self._why_not(index)) for index in left]

    def no_room(self, *, is_known: bool) -> NoRoom:
        """None that decodes may: all of them are full, or there is none."""
        decodes = self._loads.is_prefill == 0.0
        full = [index for index, view in enumerate(self._views) if decodes[index] and self._misfit(view) is None]
        reason = NoRoomReason.FULL if full else NoRoomReason.NO_REPLICA
        wait_s = UNKNOWN_WAIT_S
        if full and is_known:
            wait_s = float(np.maximum(self._loads.slot_s, self._loads.queue_s)[full].min())
        return NoRoom(reason, wait_s, lambda: tuple(self.unable()))

    def _hold_back(self, age_s: Column, ramp_s: float) -> None:
        """One that warms up gets a few requests, more with each that began there and with time, unless no other of its
        role is left."""
        loads = self._loads
        most = 1 + 2 * loads.num_begun + loads.max_num_seqs * np.clip(age_s, 0.0, ramp_s) // ramp_s
        has_enough = (age_s < ramp_s) & (loads.num_own >= most)
        others = {self._views[index].role for index in self.able if not has_enough[index]}
        self._warming = frozenset(
            index
            for index in self.able
            if has_enough[index]
            and (self._views[index].role in others or (self._views[index].role.can_decode and Role.MIXED in others))
        )
        self.able = [index for index in self.able if index not in self._warming]

    def _misfit(self, view: ReplicaView) -> str | None:
        if self._request.model_name not in (None, view.model_name):
            return f"serves {view.model_name}"
        if view.replica_id in self._request.excluded:
            return "is excluded: it has just refused or lost the request"
        return None

    def _why_not(self, index: int) -> str:
        loads = self._loads
        num_own, num_requests = int(loads.num_own[index]), int(loads.num_requests[index])
        if index in self._warming:
            return f"warms up: {num_own} requests are enough for now"
        return (
            self._misfit(self._views[index]) or f"is full: {num_requests} of {int(loads.max_requests[index])} requests"
        )


def _reason(estimate: CostTerms, num_candidates: int, num_level: int, *, is_by_load: bool) -> str:
    drawn = f", drawn among {num_level} that are level" if num_level > 1 else ""
    if is_by_load:
        return f"least load of {num_candidates} candidates of unknown speed{drawn}"
    return (
        f"least cost ({estimate.total_s:.4g} s, first token in {estimate.first_token_s:.4g} s) "
        f"of {num_candidates} candidates{drawn}"
    )
