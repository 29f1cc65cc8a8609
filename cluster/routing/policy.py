"""Which replica takes a request: the one where it is answered soonest, in estimated seconds. Pure.

Views and index in, a choice with all its terms out; the clock and the number that breaks ties are arguments. Knows no
network, no queue of its own and no request but this one.

What a replica costs: waiting for the prompts that are ahead there and for room, computing the part of the prompt that
is not cached there, decoding beside its other requests, and a share of the time that they lose to this one. With
prefill and decode replicas, a pair of them is one more candidate: the prompt is computed on one and its KV moves to the
other. All are compared in the same seconds, so that a hot prefix spreads when waiting for it takes longer than
computing it elsewhere, and a short or well-cached prompt skips the detour.

How much of a replica's step is over when a request comes is known to nobody here. Candidates whose costs differ by less
than that makes uncertain are level, and the one with the fewest requests is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from manta.engine.step_costs import StepCosts

from .cost_table import CostTable, Greatest, Loads
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
    """The candidate with the least cost among `views`, which are the replicas that take new work; of those that are
    level with it, the one with the fewest requests.

    `tie` in [0, 1) draws among those that are alike in that, too: routers that pass different numbers do not all choose
    the same.
    Changes nothing; the caller tells view and index what it then sends.
    """
    if not views:
        return NoRoom(NoRoomReason.NO_REPLICA, UNKNOWN_WAIT_S, tuple)
    stand_in = next((view.costs for view in views if view.costs is not None), None)
    loads, greatest = Loads.of(views, stand_in or NOMINAL)
    if greatest.is_prefill and np.minimum.reduce(loads.is_prefill):  # all: better they than nobody
        loads, greatest = loads._replace(is_prefill=np.zeros(len(views))), greatest._replace(is_prefill=0.0)
    fleet = _Fleet(request, views, loads, greatest, now_s, settings.ramp_s)
    if not fleet.can_decode:
        return fleet.no_room(is_known=stand_in is not None)
    matched = index.match(request.block_hashes)
    table = CostTable(request, views, loads, greatest, fleet.able, matched, now_s=now_s, settings=settings)
    latest_s = math.inf  # seconds that nobody has are no reason to refuse
    if stand_in is not None:
        latest_s = settings.max_wait_s
        if request.deadline_s is not None:
            latest_s = min(latest_s, request.deadline_s - now_s)

    def considered() -> tuple[Considered, ...]:
        return (*table.considered(latest_s), *fleet.unable)

    totals, first_tokens = table.totals, table.first_tokens
    if table.has_pairs and _must_detour(request, settings):
        totals[: table.num_alone] = math.inf
    best = int(totals.argmin())
    if first_tokens[best] > latest_s:  # perhaps one that costs more is in time
        soonest_s = float(first_tokens[totals < math.inf].min())
        if soonest_s > latest_s:
            reason = NoRoomReason.WAIT if soonest_s > settings.max_wait_s else NoRoomReason.DEADLINE
            return NoRoom(reason, soonest_s, considered)
        best = int(np.where(first_tokens <= latest_s, totals, math.inf).argmin())
    level = table.level_with(best, latest_s)
    fewest = level if len(level) == 1 else table.fewest(level)
    chosen = fewest[int(tie * len(fewest))]
    estimate = CostTerms(0) if stand_in is None else table.terms_of(chosen)
    level_note = ""
    if len(level) > 1:
        drawn = f", drawn among {len(fewest)}" if len(fewest) > 1 else ""
        level_note = f": fewest requests ({table.num_requests(chosen)}) of {len(level)} that are level{drawn}"
    reason = _reason(estimate, len(table), level_note, is_by_load=stand_in is None)
    replica_id, prefill_replica_id = table.replica_id(chosen), table.prefill_replica_id(chosen)
    return Decision(replica_id, prefill_replica_id, estimate, reason, stand_in is None, considered)


def _must_detour(request: RouteRequest, settings: RoutingSettings) -> bool:
    from_tokens = settings.detour_from_tokens
    return request.may_detour and from_tokens is not None and request.num_prompt_tokens >= from_tokens


class _Fleet:
    """Which replicas may take a request, and why the others may not."""

    def __init__(
        self,
        request: RouteRequest,
        views: Sequence[ReplicaView],
        loads: Loads,
        greatest: Greatest,
        now_s: float,
        ramp_s: float,
    ) -> None:
        self._request, self._views, self._loads = request, views, loads
        self.able: Sequence[int] = range(len(views))
        """Indices of the views that may."""
        if greatest.num_too_many > 0:
            self.able = (loads.num_too_many <= 0).nonzero()[0].tolist()
        if request.model_name is not None or request.excluded:
            self.able = [index for index in self.able if self._misfit(views[index]) is None]
        self._warming: frozenset[int] = frozenset()
        if now_s - greatest.ready_at_s < ramp_s:
            self._hold_back(now_s, ramp_s)
        self.can_decode = bool(self.able)
        """Whether one of them runs requests to their end."""
        if greatest.is_prefill:
            self.can_decode = not all(loads.is_prefill[index] for index in self.able)
        self.unable: tuple[Considered, ...] = ()
        """Those that may not, each with the reason."""
        if len(self.able) < len(views):
            left = sorted({*range(len(views))} - {*self.able})
            self.unable = tuple(Considered(views[i].replica_id, None, None, self._why_not(i)) for i in left)

    def no_room(self, *, is_known: bool) -> NoRoom:
        """None that decodes may: all of them are full, or there is none."""
        decodes = self._loads.is_prefill == 0.0
        full = [index for index, view in enumerate(self._views) if decodes[index] and self._misfit(view) is None]
        reason = NoRoomReason.FULL if full else NoRoomReason.NO_REPLICA
        wait_s = UNKNOWN_WAIT_S
        if full and is_known:
            wait_s = float(self._loads.wait_s[full].min())
        return NoRoom(reason, wait_s, lambda: self.unable)

    def _hold_back(self, now_s: float, ramp_s: float) -> None:
        """One that warms up gets a few requests, more with each that began there and with time, unless no other of its
        role is left."""
        warm = {index for index in self.able if not _has_enough(self._views[index], now_s, ramp_s)}
        others = {self._views[index].role for index in warm}
        self._warming = frozenset(
            index
            for index in self.able
            if index not in warm
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
        view = self._views[index]
        if index in self._warming:
            return f"warms up: {view.num_own} requests are enough for now"
        return self._misfit(view) or f"is full: {view.num_requests} of {view.max_requests} requests"


def _has_enough(view: ReplicaView, now_s: float, ramp_s: float) -> bool:
    """Whether it became ready lately and has as many requests as is good for one that warms up."""
    age_s = now_s - view.ready_at_s
    most = 1 + 2 * view.num_begun + view.max_num_seqs * max(age_s, 0.0) // ramp_s
    return age_s < ramp_s and view.num_own >= most


def _reason(estimate: CostTerms, num_candidates: int, level_note: str, *, is_by_load: bool) -> str:
    if is_by_load:
        return f"least load of {num_candidates} candidates of unknown speed{level_note}"
    return (
        f"least cost ({estimate.total_s:.4g} s, first token in {estimate.first_token_s:.4g} s) "
        f"of {num_candidates} candidates{level_note}"
    )
