"""All engine replicas of one model, for the edge: begins each sequence on one, and moves it when that dies or leaves.

Implements EngineClient over channels. Choices are the chooser's, turns and refusals the gate's, connections the links';
who the replicas are (`set_members`), where they listen and what Serve is told comes from a Directory. Knows no Ray and
no HTTP. Everything belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.core import Metric

from manta.cluster.routing.admission import Offer, Tenant
from manta.cluster.routing.decision import Decision, NoRoom, NoRoomReason, RoutingSettings
from manta.cluster.routing.roles import Role
from manta.cluster.slo import Slo
from manta.engine.errors import EngineFailed, Overloaded
from manta.engine.llm import refusal_error
from manta.engine.request import EngineRequest, Refusal, RefusalReason, RequestDelta, ResumeState
from manta.engine.stats import EngineInfo
from manta.replicas.channel import ChannelLost, KeyPair, ReplicaLeaves
from manta.replicas.channel_client import ChannelClient
from manta.replicas.metric_families import render_text
from manta.replicas.metrics import EdgeMetrics
from manta.replicas.protocol import Frame

from .attempts import Attempt, RoutedSequence
from .chooser import Chooser
from .client import ReplicaStatus, RequestTerms, RouteNote, Take
from .demands import DemandExchange
from .detour import Detour, mismatch
from .explanations import Explained, Explanations
from .gate import Gate
from .links import DRAIN_GRACE_S, FULL_POLL_S, Directory, Link, Links
from .scaling_ledger import ScalingLedger
from .scaling_report import ReplicaLoad

logger = logging.getLogger(__name__)

MAX_FAILURES_WITHOUT_PROGRESS = 2
"""A request that lost so many replicas in a row without a new token is not given a third."""


@dataclass(frozen=True)
class RouterLimits:
    """Bounds of one edge, and what it routes by."""

    max_queued_requests: int = 256
    """Requests that may wait: in a replica beyond those that run, and in the edge."""
    max_wait_s: float = 60.0
    """How long a request waits for a replica to become ready, and a stream that must move for room."""
    drain_grace_s: float = DRAIN_GRACE_S
    tenants: tuple[Tenant, ...] = ()
    """With tenants, requests wait their turn in the edge while replicas are full; without, they are refused then."""
    num_edges: int = 1
    """That share the tenants' limits."""
    routes_by_prefix: bool = True
    max_index_blocks: int = 2_000_000
    detour_from_tokens: int | None = None
    """As in RoutingSettings."""


class ChannelRouter:
    """Made on a running loop. `set_members` tells it the replicas; `close` ends all channels."""

    def __init__(
        self,
        directory: Directory,
        *,
        edge_id: str,
        keys: KeyPair,
        limits: RouterLimits,
        metrics: EdgeMetrics,
        ledger: ScalingLedger | None = None,
        on_joined: Callable[[str, EngineInfo], None] = lambda replica_id, info: None,
    ) -> None:
        """`keys` are the cluster's client keys. `ledger` counts arrivals; `on_joined` is told of replicas that were
        reached, with what their engines say of themselves."""
        self._directory = directory
        self._limits = limits
        self._metrics = metrics
        self._ledger = ledger or ScalingLedger(Slo())
        self._on_joined = on_joined
        self._info: EngineInfo | None = None
        self._links = Links(
            directory,
            self,
            edge_id=edge_id,
            keys=keys,
            wants_cache_events=limits.routes_by_prefix,
            drain_grace_s=limits.drain_grace_s,
        )
        self._chooser = Chooser(
            settings=RoutingSettings(max_wait_s=limits.max_wait_s, detour_from_tokens=limits.detour_from_tokens),
            metrics=metrics,
            max_index_blocks=limits.max_index_blocks,
            max_waiting=limits.max_queued_requests,
            is_fair=bool(limits.tenants),
        )
        self._gate: Gate[Attempt] = Gate(
            limits.tenants,
            max_queued=limits.max_queued_requests,
            max_wait_s=limits.max_wait_s,
            undo=self._end,
            on_refused=metrics.request_not_admitted,
            num_edges=limits.num_edges,
        )
        self._demands = DemandExchange(self._gate, self._links, edge_id=edge_id)
        self._explanations = Explanations()
        self._num_first_tokens = 0
        """Streams whose first token is in the frame that is being looked at."""
        self._attempts: set[Attempt] = set()
        self._mismatched: set[tuple[str, str]] = set()
        """Pairs of replicas of which it was said that KV cannot go from one to the other."""

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                link.replica_id,
                ready=link.is_ready,
                draining=link.is_leaving,
                snapshot=None if link.channel is None else link.channel.snapshot,
                step_times=None if link.channel is None else link.channel.step_times,
                times=None if link.channel is None else link.channel.times,
                last_frame_age_s=None if link.channel is None else link.channel.last_frame_age_s,
                role=None if link.channel is None else link.channel.role,
                startup_s=None if link.channel is None else link.channel.info.startup_s,
            )
            for link in self._links
        ]

    def loads(self) -> list[ReplicaLoad]:
        """Of all replicas that are connected, for scaling."""
        found = []
        for link in self._links:
            if link.channel is not None and (view := self._chooser.view(link.replica_id)) is not None:
                channel = link.channel
                load = (channel.role, link.is_leaving, channel.snapshot, channel.info, view.costs)
                found.append(ReplicaLoad(link.replica_id, *load))
        return found

    @property
    def num_held(self) -> int:
        """Requests that wait in this edge."""
        return sum(self._gate.num_waiting.values()) + self._gate.num_waiting_to_move

    async def render_metrics(self) -> bytes:
        return render_text(self.metric_families())

    def metric_families(self) -> list[Metric]:
        """All metrics of this edge as they stand."""
        return self._metrics.families(
            self.replicas(),
            num_waiting=self._gate.num_waiting,
            num_waiting_to_move=self._gate.num_waiting_to_move,
            num_in_flight=len(self._attempts),
            num_index_blocks=self._chooser.num_index_blocks,
        )

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """How a response, or one of its sequences, was routed, as JSON; None when this edge does not know it."""
        return self._explanations.find(request_id)

    def set_members(self, replica_ids: Iterable[str]) -> None:
        """The replicas that exist now. One that is missing drains: it gets no new work and ends what it can within the
        grace; the rest moves as soon as another has room."""
        self._links.set_members(replica_ids)

    def set_role(self, replica_id: str, role: Role) -> None:
        """Ask a replica to drain and take another role; one that is not connected is not asked."""
        link = self._links.get(replica_id)
        if link is not None and link.channel is not None:
            link.channel.set_role(role)

    async def close(self) -> None:
        """Close all channels; their requests fail."""
        self._demands.close()
        await self._links.close()

    def joined(self, link: Link) -> None:
        channel = link.channel
        assert channel is not None
        self._info = channel.info
        self._metrics.replica_joined(link.replica_id, channel.snapshot, channel.info)
        self._chooser.joined(link)
        self._gate.serve()
        self._on_joined(link.replica_id, channel.info)

    def heard(self, link: Link, frame: Frame) -> None:
        self._chooser.heard(link, frame)
        if frame.deltas:
            num_going_on = len(frame.deltas) - self._num_first_tokens
            has_more = any(delta.finish_reason is None for delta in frame.deltas)
            self._metrics.tokens_came(link.replica_id, num_going_on=max(num_going_on, 0), has_more=has_more)
            self._num_first_tokens = 0
        if frame.demands is not None:
            self._demands.learn(frame.demands)
        if self._gate.has_waiting and self._chooser.has_room(link):
            self._gate.serve()

    def lost(self, link: Link, channel: ChannelClient) -> None:
        self._chooser.lost(link)
        self._metrics.replica_left(link.replica_id, channel.snapshot, channel.step_times, channel.times)
        if link.is_member:
            self._metrics.replica_lost()

    def room(self) -> int:
        return self._chooser.room(link for link in self._links if link.is_ready)

    async def run(
        self, request: EngineRequest, take: Take, terms: RequestTerms = RequestTerms(), note: RouteNote | None = None
    ) -> None:
        sequence = RoutedSequence(request, take, terms, note or RouteNote())
        state = sequence.state
        self._ledger.sequence_arrived(len(request.prompt_token_ids))
        num_refusals = 0
        try:
            while True:
                attempt = await self._begin(sequence)
                try:
                    refusal = await attempt.wait()
                    if refusal is None:
                        attempt.explained.outcome = "finished"
                        return
                    num_refusals += 1
                    self._refused(sequence, attempt, refusal, num_refusals)
                except ReplicaLeaves:
                    sequence.must_go_on = True
                    self._moves(state, attempt, "the replica leaves")
                except ChannelLost as lost:
                    sequence.must_go_on = True
                    self._count_failure(state, attempt.link, lost)
                    self._moves(state, attempt, str(lost))
                finally:
                    self._end(attempt)
                if num_refusals and sequence.must_go_on:
                    await asyncio.sleep(FULL_POLL_S)
        finally:
            self._over(sequence)

    async def _begin(self, sequence: RoutedSequence) -> Attempt:
        """Until a replica has it. One that an engine has had goes on before all others and waits for room."""
        if sequence.state.num_submissions:
            return await self._gate.enter_again(lambda: self._try_to_begin(sequence))
        request, terms = sequence.state.request, sequence.terms
        offer = Offer(
            request_id=request.request_id,
            tenant=terms.tenant,
            num_tokens=len(request.prompt_token_ids) + self._chooser.expected_output_tokens(request),
            priority=request.priority,
            deadline_s=terms.deadline_s,
        )
        try:
            wait_s = 0.0 if terms.deadline_s is None else self._estimate_first_token_s(sequence)
            return await self._gate.enter(offer, lambda: self._try_to_begin(sequence), first_token_s=wait_s)
        except Overloaded as error:
            if (explained := sequence.no_room) is not None:
                explained.outcome = f"refused: {error}"
                self._explanations.add(request.request_id, explained)
            raise

    def _estimate_first_token_s(self, sequence: RoutedSequence) -> float:
        """If it began now; 0 where that is not known."""
        ready = [link for link in self._links if link.is_ready]
        decision = self._chooser.decide(sequence.state.request, sequence.terms, ready, must_go=False)
        if not isinstance(decision, NoRoom):
            return decision.estimate.first_token_s
        sequence.no_room = Explained(time.time(), 0.0, decision, num_candidates=len(ready))
        is_known = decision.reason in (NoRoomReason.DEADLINE, NoRoomReason.WAIT)
        return decision.estimated_wait_s if is_known else 0.0

    def _try_to_begin(self, sequence: RoutedSequence) -> Attempt | NoRoom:
        """Send it to the replica where it will be answered soonest, if there is one with room."""
        state, terms = sequence.state, sequence.terms
        must_go = state.num_submissions > 0
        ready = [link for link in self._links if link.is_ready]
        decision = self._chooser.decide(state.request, terms, ready, must_go=must_go)
        waited_s = time.monotonic() - sequence.asked_at_s
        explained = Explained(time.time(), waited_s, decision, num_candidates=len(ready))
        if isinstance(decision, NoRoom):
            sequence.no_room = explained
            return decision
        decision = self._without_impossible_detour(decision)
        self._explanations.add(state.request.request_id, explained)
        self._metrics.replica_chosen(
            path="direct" if decision.prefill_replica_id is None else "detour", waited_s=waited_s
        )
        link = self._links[decision.replica_id]
        submission = state.submission()
        booking = self._chooser.book(decision, submission)
        release = self._directory.hold(link.replica_id)
        if decision.prefill_replica_id is None:
            attempt = Attempt(sequence, link, booking, explained, submission, release=release)
        else:
            attempt = Detour(
                sequence,
                link,
                booking,
                explained,
                submission,
                prefill=self._links[decision.prefill_replica_id],
                release=release,
                release_prefill=self._directory.hold(decision.prefill_replica_id),
                on_end=self._metrics.handoff_ended,
            )
        self._attempts.add(attempt)
        if sequence.note.sent_at_s is None:
            sequence.note.sent_at_s = time.monotonic()
        sequence.note.replica_id = decision.replica_id
        sequence.note.prefill_replica_id = decision.prefill_replica_id
        if sequence.note.estimated_s is None and booking.estimate is not None:
            sequence.note.estimated_s = waited_s + booking.estimate.first_token_s
        attempt.submit(on_first=lambda delta: self._began(attempt, delta))
        return attempt

    def _without_impossible_detour(self, decision: Decision) -> Decision:
        """The same for replicas that do not fit together: all of it where it would be decoded."""
        if decision.prefill_replica_id is None:
            return decision
        channels = [self._links[one].channel for one in (decision.prefill_replica_id, decision.replica_id)]
        prefill, decode = (channel.info for channel in channels if channel is not None)
        why = mismatch(prefill, decode)
        if why is None:
            return decision
        pair = decision.prefill_replica_id, decision.replica_id
        if pair not in self._mismatched:
            self._mismatched.add(pair)
            logger.error("KV cannot go from replica %s to replica %s: %s", *pair, why)
        return msgspec.structs.replace(decision, prefill_replica_id=None)

    def _began(self, attempt: Attempt, delta: RequestDelta) -> None:
        """Its first delta came."""
        sequence, explained = attempt.sequence, attempt.explained
        self._num_first_tokens += 1
        explained.actual_s = self._chooser.began(attempt.booking, delta)
        explained.num_cached_tokens = delta.num_cached_tokens
        if not sequence.state.has_begun:
            self._ledger.sequence_began(delta.num_cached_tokens or 0)
            sequence.note.actual_s = time.monotonic() - sequence.asked_at_s

    def _end(self, attempt: Attempt) -> None:
        """Nothing of the attempt is anywhere any more. May be called again."""
        if attempt not in self._attempts:
            return
        self._attempts.discard(attempt)
        if attempt.explained.outcome == "open":
            attempt.explained.outcome = "cancelled or failed"
        attempt.end()
        attempt.booking.over()
        for link in attempt.links:
            self._links.forget_if_idle(link)
        if self._gate.has_waiting:
            self._gate.serve()

    def _over(self, sequence: RoutedSequence) -> None:
        state = sequence.state
        num_output_tokens = len(state.request.output_token_ids)
        if not state.num_submissions:
            return
        num_tokens = len(state.request.prompt_token_ids) + num_output_tokens
        self._gate.ended(state.request.request_id, num_tokens)
        self._metrics.tokens_used(sequence.terms.tenant, num_tokens)
        if num_output_tokens:  # how far those came that broke off says something, too
            self._chooser.answered(num_output_tokens)

    def _refused(self, sequence: RoutedSequence, attempt: Attempt, refusal: Refusal, num_refusals: int) -> None:
        """Returns when the request should try again, elsewhere or later: one that was taken before waits for room."""
        attempt.explained.outcome = f"refused by the engine: {refusal.message}"
        link = attempt.link
        if refusal.reason is RefusalReason.DRAINING:
            if link.channel is not None:
                link.channel.is_draining = True
            self._links.start_moving(link)
            return
        error = refusal_error(refusal)
        if not sequence.must_go_on:
            if isinstance(error, Overloaded):
                self._metrics.request_not_admitted(sequence.terms.tenant, "engine")
            raise error
        if isinstance(error, Overloaded) and num_refusals * FULL_POLL_S < self._limits.max_wait_s:
            return
        raise EngineFailed(f"The request could not go on elsewhere: {refusal.message}") from error

    def _count_failure(self, state: ResumeState, link: Link, lost: ChannelLost) -> None:
        if link.is_leaving:
            return  # it was about to end: no sign that the request ends replicas
        state.num_failures_without_progress += 1
        if state.num_failures_without_progress >= MAX_FAILURES_WITHOUT_PROGRESS:
            raise EngineFailed(
                "The engine failed while it worked on this request, on two replicas in a row; it is not tried again."
            ) from lost

    def _moves(self, state: ResumeState, attempt: Attempt, why: str) -> None:
        self._metrics.request_moved()
        attempt.explained.outcome = f"moved after {len(state.request.output_token_ids)} tokens: {why}"
        logger.warning(
            "request %s leaves replica %s after %d tokens: %s",
            state.request.request_id,
            attempt.link.replica_id,
            len(state.request.output_token_ids),
            why,
        )
