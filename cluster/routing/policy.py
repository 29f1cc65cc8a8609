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

from .cost_table import CostTable
from .decision import Considered, CostTerms, Decision, Narrowing, NoRoom, NoRoomReason, RouteRequest, RoutingSettings
from .load_table import Greatest, Loads, LoadTable
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


def decide(
    request: RouteRequest,
    views: LoadTable | Sequence[ReplicaView],
    index: PrefixIndex,
    *,
    now_s: float,
    settings: RoutingSettings,
    tie: float,
) -> Decision | NoRoom:
    """The candidate with the least cost among `views`, which are the replicas that take new work; of those that are
    level with it, the one with the fewest requests. A table of them is quicker than a list.

    `tie` in [0, 1) draws among those that are alike in that, too: routers that pass different numbers do not all choose
    the same.
    Changes nothing; the caller tells view and index what it then sends.
    """
    table = views if isinstance(views, LoadTable) else LoadTable.of(views)
    views = table.views
    if not views:
        return NoRoom(NoRoomReason.NO_REPLICA, UNKNOWN_WAIT_S, tuple)
    is_known = table.known_costs is not None
    loads, greatest = table.columns()
    if greatest.is_prefill and np.minimum.reduce(loads.is_prefill):  # all: better they than nobody
        loads, greatest = loads._replace(is_prefill=np.zeros(len(views))), greatest._replace(is_prefill=0.0)
    able: Sequence[int] = range(len(views))
    unable: tuple[Considered, ...] = ()
    if not _all_may(request, greatest, now_s, settings.ramp_s):
        fleet = _Fleet(request, views, loads, greatest, now_s, settings.ramp_s)
        if not fleet.can_decode:
            return fleet.no_room(is_known=is_known)
        able, unable = fleet.able, fleet.unable
    held = index.match_sets(request.block_hashes)
    costs = CostTable(request, table, loads, greatest, able, held, now_s=now_s, settings=settings)
    late = None  # seconds that nobody has are no reason to refuse
    if is_known:
        late = costs.too_late(math.inf if request.deadline_s is None else request.deadline_s - now_s)

    def considered() -> tuple[Considered, ...]:
        return (*costs.considered(late), *unable)

    totals = costs.totals
    if costs.has_pairs and _must_detour(request, settings):
        totals[: costs.num_alone] = math.inf
    best = int(totals.argmin())
    if late is not None and late[best]:  # perhaps one that costs more is in time
        can = totals < math.inf
        if late[can].all():
            waits = float(costs.ahead_s[can].min()) > settings.max_wait_s
            reason = NoRoomReason.WAIT if waits else NoRoomReason.DEADLINE
            return NoRoom(reason, float(costs.sure_s[can].min()), considered)
        best = int(np.where(late, math.inf, totals).argmin())
    level = costs.level_with(best, late)
    fewest = costs.fewest(level)
    chosen = fewest.item(int(tie * len(fewest)))
    return Decision(
        costs.replica_id(chosen),
        costs.prefill_replica_id(chosen),
        costs.terms_of(chosen) if is_known else CostTerms(0),
        Narrowing(len(costs), len(level), len(fewest), costs.num_requests(chosen)),
        not is_known,
        considered,
    )


def _all_may(request: RouteRequest, greatest: Greatest, now_s: float, ramp_s: float) -> bool:
    """Whether every replica may take the whole request, as is usual."""
    if greatest.is_prefill or greatest.num_too_many > 0 or now_s - greatest.ready_at_s < ramp_s:
        return False
    return request.model_name is None and not request.excluded


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
        self.unable: tuple[Considered, ...] = ()
        """Those that may not, each with the reason."""
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
