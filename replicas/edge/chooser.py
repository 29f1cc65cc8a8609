"""What one edge believes about all replicas, and which of them takes a sequence by that. Knows no queue and no stream.

Fed by the links' frames and by the life of every sequence that is sent: load, roles, cached prefixes, learned speeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from manta.cluster.routing.decision import CostTerms, Decision, NoRoom, RouteRequest, RoutingSettings
from manta.cluster.routing.load_table import LoadTable
from manta.cluster.routing.policy import decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.engine.request import EngineRequest, RequestDelta
from manta.engine.stats import Snapshot
from manta.replicas.metrics import EdgeMetrics
from manta.replicas.protocol import Frame

from .client import RequestTerms
from .links import Link

EXPIRE_INTERVAL_S = 0.25
"""How often expectations that no event has met are looked for."""
EXPECTED_FOR_S = 5.0
"""How long blocks count as cached that a request was sent for, beyond the time until its first token."""
LEAST_AHEAD = 4
"""Requests that may wait in a replica for the next step, however few run there."""
USUAL_OUTPUT_TOKENS = 128
"""Tokens of an answer, before any has ended here."""
OUTPUT_WEIGHT = 0.05
"""Of each answer's length in what is expected of the next."""


@dataclass
class Booking:
    """A sequence on its way to a replica, or to two: counted there until it is over."""

    request_id: str
    decision: Decision
    view: ReplicaView
    prefill_view: ReplicaView | None
    num_tokens: int
    sent_at_s: float

    @property
    def estimate(self) -> CostTerms | None:
        """None where the load alone decided."""
        return None if self.decision.is_by_load else self.decision.estimate

    def began(self, now_s: float) -> None:
        """Its first token came."""
        (self.prefill_view or self.view).began(self.request_id, now_s)

    def prefill_over(self) -> None:
        """Its prefill replica has nothing of it any more. May be called again."""
        if self.prefill_view is not None:
            self.prefill_view.ended(self.request_id)
            self.prefill_view = None

    def over(self) -> None:
        """It is nowhere any more."""
        self.prefill_over()
        self.view.ended(self.request_id)


class Chooser:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        settings: RoutingSettings,
        metrics: EdgeMetrics,
        max_index_blocks: int,
        max_waiting: int,
        is_fair: bool = False,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`max_waiting` requests may wait in a replica, if that is less than it takes itself. `is_fair`: only so many
        as keep it busy, since others wait for their turn in the edge."""
        self._settings = settings
        self._patient = replace(settings, max_wait_s=float("inf"))
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._is_fair = is_fair
        self._clock = clock
        self._draw = draw
        self._index = PrefixIndex(max_blocks=max_index_blocks)
        self._views: dict[str, ReplicaView] = {}
        self._table = LoadTable()
        """Of all views."""
        self._resyncing: set[str] = set()
        """Replicas that were asked for a complete list."""
        self._expired_at_s = clock()
        self._usual_output_tokens = float(USUAL_OUTPUT_TOKENS)

    @property
    def num_index_blocks(self) -> int:
        return self._index.num_blocks

    def view(self, replica_id: str) -> ReplicaView | None:
        """What is believed about a replica; None for one that is not connected."""
        return self._views.get(replica_id)

    def joined(self, link: Link) -> None:
        """A replica's engine was reached. One that has worked before is as warm as it will be."""
        channel = link.channel
        assert channel is not None
        now_s, snapshot = self._clock(), channel.snapshot
        is_warm = snapshot.num_finished + snapshot.num_running > 0
        view = ReplicaView.of(
            link.replica_id,
            channel.info,
            role=channel.role,
            max_waiting=self._max_waiting,
            **({} if is_warm else {"ready_at_s": now_s}),
        )
        self._forget(link.replica_id)
        self._views[link.replica_id] = view
        self._table.add(view)
        self._learn(view, snapshot, now_s)
        self._index.add_replica(link.replica_id)

    def heard(self, link: Link, frame: Frame) -> None:
        """A frame of a replica that has joined."""
        now_s, view = self._clock(), self._views[link.replica_id]
        view.num_routers, view.turn = frame.num_edges, frame.turn
        if frame.snapshot is not None:
            self._learn(view, frame.snapshot, now_s)
        view.role = frame.role
        if frame.step_costs is not None:
            view.costs = frame.step_costs
        if (events := frame.cache_events) is not None:
            if events.complete:
                self._resyncing.discard(link.replica_id)
            if not self._index.apply(link.replica_id, events):
                self._resync(link)
        if now_s - self._expired_at_s > EXPIRE_INTERVAL_S:
            self._expired_at_s = now_s
            self._index.expire(now_s)

    def has_room(self, link: Link) -> bool:
        """Whether a replica that has joined takes one more."""
        view = self._views[link.replica_id]
        return view.num_requests < view.max_requests

    def lost(self, link: Link) -> None:
        """A replica's channel is over: nothing is known of it any more."""
        self._forget(link.replica_id)
        self._resyncing.discard(link.replica_id)
        self._index.remove_replica(link.replica_id)

    def room(self, ready: Iterable[Link]) -> int:
        """How many sequences these replicas would take."""
        views = [self._views[link.replica_id] for link in ready]
        views = [view for view in views if view.role.can_decode] or views
        return sum(max(view.max_requests - view.num_requests, 0) for view in views)

    def decide(
        self, request: EngineRequest, terms: RequestTerms, ready: Sequence[Link], *, must_go: bool
    ) -> Decision | NoRoom:
        """Where the sequence goes, among these replicas. One that must go on accepts any wait."""
        begin_s, is_all = self._clock(), len(ready) == len(self._views)
        route = RouteRequest(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            # Of prompts whose every position is scored nothing is taken from the cache.
            block_hashes=request.block_hashes if request.params.prompt_logprobs is None else (),
            expected_output_tokens=self.expected_output_tokens(request),
            num_output_tokens=len(request.output_token_ids),
            session=terms.session,
            priority=request.priority,
            deadline_s=None if must_go else terms.deadline_s,
            # The first token comes from where the prompt is computed, and what has begun is not handed over.
            may_detour=request.params.max_tokens != 1 and not request.output_token_ids,
        )
        decision = decide(
            route,
            self._table if is_all else [self._views[link.replica_id] for link in ready],
            self._index,
            now_s=begin_s,
            settings=self._patient if must_go else self._settings,
            tie=self._draw(),
        )
        self._metrics.decision_took(self._clock() - begin_s)
        return decision

    def expected_output_tokens(self, request: EngineRequest) -> int:
        """Tokens that are still to come: as many as answers usually have, if it may have so many."""
        usual = max(int(self._usual_output_tokens) - len(request.output_token_ids), 1)
        most = request.params.max_tokens
        return usual if most is None else min(usual, max(most - len(request.output_token_ids), 1))

    def book(self, decision: Decision, request: EngineRequest) -> Booking:
        """The decision is carried out: count the sequence there, and its blocks as cached soon. `request` is what is
        sent, under the id of this attempt."""
        now_s, estimate = self._clock(), decision.estimate
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_new = num_tokens - estimate.num_cached_tokens
        view = self._views[decision.replica_id]
        prefill_view = None if decision.prefill_replica_id is None else self._views[decision.prefill_replica_id]
        if prefill_view is not None:
            prefill_view.sent(request.request_id, num_new, num_tokens, now_s, estimate_s=estimate.first_token_s)
            view.sent(request.request_id, 1, num_tokens, now_s)
        else:
            view.sent(request.request_id, num_new, num_tokens, now_s, estimate_s=estimate.first_token_s)
        until_s = now_s + estimate.first_token_s + EXPECTED_FOR_S
        if request.block_hashes and request.params.prompt_logprobs is None:
            for one in {view.replica_id, (prefill_view or view).replica_id}:
                self._index.expect(one, request.block_hashes, until_s=until_s)
        return Booking(request.request_id, decision, view, prefill_view, num_tokens, now_s)

    def began(self, booking: Booking, delta: RequestDelta) -> float:
        """The first delta that came of a booking; seconds since it was sent. `delta` is as the engine sent it."""
        now_s = self._clock()
        actual_s = now_s - booking.sent_at_s
        booking.began(now_s)
        estimate = booking.estimate
        self._metrics.first_token_came(
            estimated_s=None if estimate is None else estimate.first_token_s,
            actual_s=actual_s,
            num_believed_tokens=booking.decision.estimate.num_cached_tokens,
            num_cached_tokens=delta.num_cached_tokens or 0,
        )
        return actual_s

    def answered(self, num_output_tokens: int) -> None:
        """An answer came to its end; its length says what is to be expected of others."""
        self._usual_output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self._usual_output_tokens)

    def _forget(self, replica_id: str) -> None:
        view = self._views.pop(replica_id, None)
        if view is not None:
            self._table.remove(view)

    def _learn(self, view: ReplicaView, snapshot: Snapshot, now_s: float) -> None:
        view.learn(snapshot, now_s)
        if self._is_fair:
            # Beyond those that run: how many can run depends on their lengths.
            ahead = min(max(view.max_num_seqs // 4, LEAST_AHEAD), self._max_waiting)
            view.max_requests = min(max(snapshot.num_running, ahead), view.max_num_seqs) + ahead

    def _resync(self, link: Link) -> None:
        if link.replica_id in self._resyncing or link.channel is None:
            return
        self._resyncing.add(link.replica_id)
        self._metrics.index_resynced()
        link.channel.resync()
