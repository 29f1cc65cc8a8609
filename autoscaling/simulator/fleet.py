"""Replicas, edges and requests on one virtual clock. Knows neither how a replica works nor how a router decides.

Edges learn of a replica's steps a little later than they end, as over the channel. A request that no replica has room
for waits at its edge, in the order of arrival; with a deadline it is refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .events import ARRIVES, EventQueue
from .handoff import Handoffs, KvLink
from .replica import Frame, Replica, ReplicaSpec
from .workload import Outcome, SimRequest

FRAME_DELAY_S = 1e-3
"""From the end of a step to the edge's knowledge of it: encoding, a local network, decoding."""
BEAT_INTERVAL_S = 0.5
"""Edges hear of a replica at least so often, as over the channel: also of one that is idle or has nothing to decide."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes."""

    replica_id: str
    prefill_replica_id: str | None = None
    """Where the prompt is computed, when that is another replica."""
    estimated_ttft_s: float | None = None


class Router(Protocol):
    """One edge's policy, with what it believes about the replicas."""

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        """A place for the request, which it gets at once; None when there is no room anywhere."""
        ...

    def learn(self, frame: Frame, now_s: float) -> None:
        """A replica's news have arrived."""
        ...


class Fleet:
    """Runs requests through edges (each with a router) and replicas. Failures and new replicas are actions on `events`
    between others."""

    def __init__(self, events: EventQueue, *, frame_delay_s: float = FRAME_DELAY_S, link: KvLink | None = None) -> None:
        """`link` carries KV between replicas, where some of them only compute prompts."""
        self.events = events
        self.replicas: dict[str, Replica] = {}
        self.routers: list[Router] = []
        self.outcomes: dict[str, Outcome] = {}
        self.on_step: Callable[[Frame], None] = lambda frame: None
        """Told about every frame at once, for who may know more than an edge."""
        self.handoffs = Handoffs(events, link or KvLink())
        self._frame_delay_s = frame_delay_s
        self._frames: deque[tuple[float, Frame]] = deque()
        """On their way to the edges, with their times of arrival."""
        self._heard_s: dict[str, float] = {}
        """When the edges heard of each replica last."""
        self._held: deque[Outcome] = deque()
        self._next_edge = 0

    @property
    def num_held(self) -> int:
        """Requests that wait at the edges."""
        return len(self._held)

    def run(self, requests: Sequence[SimRequest]) -> list[Outcome]:
        """All requests to their ends. Their outcomes, in the order of `requests`."""
        outcomes = [Outcome(request) for request in requests]
        for outcome in outcomes:
            self.outcomes[outcome.request.request_id] = outcome
            self.events.at(outcome.request.arrival_s, lambda outcome=outcome: self._arrive(outcome), order=ARRIVES)
        self.events.run()
        self._deliver_frames(math.inf)
        return outcomes

    def on_frame(self, frame: Frame) -> None:
        """A replica's step has ended: clients get their tokens, the edges will know."""
        now_s = self.events.now_s
        for delta in frame.deltas:
            outcome = self.outcomes[delta.request_id]
            if outcome.first_token_s is None:
                outcome.first_token_s = now_s
                outcome.num_cached_tokens = delta.num_cached_tokens or 0
            if frame.replica_id == outcome.prefill_replica_id and outcome.request.num_output_tokens > 1:
                self.handoffs.go_on(outcome.request, after_s=self._frame_delay_s)
            elif delta.finish_reason is not None:
                outcome.finished_s = now_s
        for refusal in frame.refusals:
            self.outcomes[refusal.request_id].refused = refusal.message
            self.handoffs.forget(refusal.request_id)
        self.on_step(frame)
        self._frames.append((now_s + self._frame_delay_s, frame))
        if self._held:
            self.events.at(now_s + self._frame_delay_s, self._retry, order=ARRIVES)

    def add_replica(self, replica_id: str, spec: ReplicaSpec, *, takes_stretches: bool = True) -> Replica:
        """A replica that takes requests from now on. The routers must be told of it by themselves."""
        assert replica_id not in self.replicas
        replica = Replica(replica_id, spec, self.events, self.on_frame, takes_stretches=takes_stretches)
        replica.on_begin = self.handoffs.begin
        self.replicas[replica_id] = replica
        self._heard_s[replica_id] = self.events.now_s
        return replica

    def _arrive(self, outcome: Outcome) -> None:
        self._deliver_frames(self.events.now_s)
        if outcome.request.deadline_s is not None:
            if not self._place(outcome):
                outcome.refused = "no replica would answer in time"
        elif self._held or not self._place(outcome):
            self._held.append(outcome)

    def _retry(self) -> None:
        self._deliver_frames(self.events.now_s)
        while self._held and self._place(self._held[0]):
            self._held.popleft()

    def _deliver_frames(self, until_s: float) -> None:
        frames = self._frames
        while frames and frames[0][0] <= until_s:
            arrived_s, frame = frames.popleft()
            self._hear(frame, arrived_s)

    def _hear(self, frame: Frame, arrived_s: float) -> None:
        self._heard_s[frame.replica_id] = arrived_s
        for router in self.routers:
            router.learn(frame, arrived_s)

    def _hear_of_quiet_ones(self) -> None:
        """Before somebody decides: the beats of replicas that had no news."""
        now_s = self.events.now_s
        for replica_id, replica in self.replicas.items():
            if now_s - self._heard_s[replica_id] > BEAT_INTERVAL_S:
                replica.disturb()
                self._hear(Frame(replica_id, [], (), replica.snapshot(), None), now_s)

    def _place(self, outcome: Outcome) -> bool:
        """Send the request where its edge's router says; False when that is nowhere."""
        self._hear_of_quiet_ones()
        router = self.routers[self._next_edge]
        route = router.route(outcome.request, self.events.now_s)
        if route is not None or outcome.request.deadline_s is not None:
            self._next_edge = (self._next_edge + 1) % len(self.routers)
        if route is None:
            return False
        outcome.routed_s = self.events.now_s
        outcome.replica_id, outcome.estimated_ttft_s = route.replica_id, route.estimated_ttft_s
        replica = self.replicas[route.replica_id]
        if route.prefill_replica_id is None:
            replica.submit(outcome.request.engine_request())
        else:
            outcome.prefill_replica_id = route.prefill_replica_id
            self.handoffs.submit(outcome.request, self.replicas[route.prefill_replica_id], replica)
        return True
