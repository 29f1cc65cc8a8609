"""An edge's router on the virtual clock: the real policy, real views and the real prefix index. Knows no replica."""

from __future__ import annotations

import random
from collections.abc import Iterable

from manta.cluster.routing.load_table import LoadTable
from manta.cluster.routing.policy import Decision, RouteRequest, RoutingSettings, decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.step_costs import StepCosts

from .fleet import Route
from .replica import Frame, ReplicaSpec
from .workload import SimRequest

EXPECTED_OUTPUT_TOKENS = 256.0
"""Of an answer, before any has ended."""
OUTPUT_WEIGHT = 0.02
"""Of each answer's length in what is expected of the next."""
INDEX_BLOCKS = 1 << 20
EXPECTATION_FACTOR, EXPECTATION_S = 2.0, 1.0
"""A prompt that was sent counts as cached for so many times the seconds to its first token, and so many more."""


def view_of(
    replica_id: str, spec: ReplicaSpec, costs: StepCosts, *, role: Role = Role.MIXED, kv_bytes_per_token: float
) -> ReplicaView:
    """What an edge is told of a replica at the start."""
    return ReplicaView(
        replica_id,
        role=role,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        max_num_seqs=spec.max_num_seqs,
        tokens_a_step=spec.max_num_batched_tokens,
        max_requests=spec.max_num_seqs + spec.max_num_waiting,
        costs=costs,
        tpot_target_s=spec.tpot_target_s,
        kv_bytes_per_token=kv_bytes_per_token,
    )


class PolicyRouter:
    """One edge. Its views change as requests are sent and as frames arrive."""

    def __init__(
        self,
        views: Iterable[ReplicaView],
        *,
        settings: RoutingSettings | None = None,
        max_index_blocks: int = INDEX_BLOCKS,
        seed: int = 0,
        place: int = 0,
        num_edges: int = 1,
    ) -> None:
        """`place` is the edge's among `num_edges`: replica by replica another one comes first for free slots."""
        self.views = {view.replica_id: view for view in views}
        for number, view in enumerate(self.views.values()):
            view.num_routers, view.turn = num_edges, (place + number) % num_edges
        self._table = LoadTable(self.views.values())
        self.index = PrefixIndex(max_blocks=max_index_blocks)
        for replica_id in self.views:
            self.index.add_replica(replica_id)
        self._settings = settings or RoutingSettings()
        self._rng = random.Random(seed)
        self._sent: dict[str, tuple[SimRequest, list[ReplicaView]]] = {}
        self._output_tokens = EXPECTED_OUTPUT_TOKENS
        self.num_resyncs = 0

    @property
    def num_under_way(self) -> int:
        """Requests that were sent and have not ended everywhere, as far as this edge knows."""
        return len(self._sent)

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        self.index.expire(now_s)
        asked = RouteRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            block_hashes=request.block_hashes,
            expected_output_tokens=round(self._output_tokens),
            deadline_s=None if request.deadline_s is None else request.arrival_s + request.deadline_s,
        )
        found = decide(asked, self._table, self.index, now_s=now_s, settings=self._settings, tie=self._rng.random())
        if not isinstance(found, Decision):
            return None
        self._sent_to(request, found, now_s)
        return Route(found.replica_id, found.prefill_replica_id, found.estimate.first_token_s)

    def learn(self, frame: Frame, now_s: float) -> None:
        view = self.views.get(frame.replica_id)
        if view is None:
            return
        for delta in frame.deltas:
            sent = self._sent.get(delta.request_id)
            if sent is None:
                continue  # another edge's
            request, there = sent
            if delta.num_cached_tokens is not None:
                view.began(delta.request_id, now_s)
            if delta.finish_reason is not None:
                view.ended(delta.request_id)
                there.remove(view)
                if not there:
                    del self._sent[delta.request_id]
                    self._output_tokens += OUTPUT_WEIGHT * (request.num_output_tokens - self._output_tokens)
        for refusal in frame.refusals:
            _, there = self._sent.pop(refusal.request_id, (None, []))
            for one in there:
                one.ended(refusal.request_id)
        view.learn(frame.snapshot, now_s)
        if frame.cache_events is not None and not self.index.apply(frame.replica_id, frame.cache_events):
            self.num_resyncs += 1

    def _sent_to(self, request: SimRequest, found: Decision, now_s: float) -> None:
        decodes = self.views[found.replica_id]
        there = [decodes]
        prefills = decodes
        if found.prefill_replica_id is not None:
            prefills = self.views[found.prefill_replica_id]
            there.append(prefills)
            decodes.sent(request.request_id, 0, request.num_prompt_tokens, now_s)
        num_new_tokens = request.num_prompt_tokens - found.estimate.num_cached_tokens
        first_token_s = found.estimate.first_token_s
        prefills.sent(*(request.request_id, num_new_tokens, request.num_prompt_tokens, now_s), estimate_s=first_token_s)
        until_s = now_s + EXPECTATION_FACTOR * first_token_s + EXPECTATION_S
        for view in there:
            self.index.expect(view.replica_id, request.block_hashes, until_s=until_s)
        self._sent[request.request_id] = request, there
