"""How long requests take on a placement, without blocks, caches and scheduler: a recursion over steps. Pure.

Each replica is a few numbers (sequences that decode, KV tokens they read, prompts that wait); a step takes its
predicted time and holds the decodes and as much of the waiting prompts as fits. Requests go where they are estimated to
cost least. It is the planner's own estimate; autoscaling/simulator, with the real scheduler and router, is its judge.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manta.cluster.routing.roles import Role
from manta.engine.step_budget import StepBudget
from manta.engine.step_costs import StepCosts
from manta.engine.step_time import StepShape

from .demand import Asked, Demand

WARM_UP = 0.1
"""Share of the requests, the first ones, that come while the fleet fills."""
DECODE_WEIGHT, INTERFERENCE_WEIGHT = 0.1, 0.005
"""As routing has them (cluster/routing/decision.py): a second of decoding, and one that a running decode loses."""
STEPS_AHEAD = 2
"""A step is planned while one runs, so that who comes now is in the step after the next."""


@dataclass(frozen=True)
class ReplicaModel:
    """One replica. Sizes in tokens unless named otherwise."""

    predict: Callable[[StepShape], float]
    role: Role
    kv_room_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_target_s: float | None = None


@dataclass(frozen=True)
class Transfer:
    """KV from the replica that computed it to the one that decodes."""

    bytes_per_token: float = 0.0
    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    tail: float = 0.1
    """Part of the last chunk's KV that is still to move when it has been computed."""


@dataclass(frozen=True)
class Estimate:
    """Of all requests after the first ones. Seconds."""

    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    ttft_at_s: float
    """At the objective's percentile."""
    tpot_at_s: float
    waiting_share: float
    """Of the mean TTFT, what passes before the step begins in which a prompt's computation begins."""
    busy_share: float
    """Of the time, with steps running; mean over replicas."""
    kv_peak_share: float
    """Of the KV room, the most that was in use in a replica."""


def estimate(
    replicas: Sequence[ReplicaModel], demand: Demand, *, percentile: float = 95.0, transfer: Transfer | None = None
) -> Estimate:
    """All requests through the replicas: mixed ones, or some that prefill and some that decode."""
    fleet = _Fleet(replicas, demand, transfer or Transfer())
    fleet.run()
    return fleet.figures(percentile)


class _Request:
    __slots__ = ("asked", "begun_s", "finished_s", "first_s", "left")

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.left = asked.num_prompt_tokens
        self.begun_s = self.first_s = self.finished_s = math.inf


@dataclass(slots=True)
class _Step:
    ends_s: float
    firsts: list[_Request]
    finishes: list[_Request]


class _Replica:
    """State as of the last step that was planned."""

    def __init__(self, model: ReplicaModel) -> None:
        self.model = model
        self.costs = StepCosts.of(model.predict)
        self.queue: deque[_Request] = deque()
        self.queued_s = 0.0
        """Seconds that prompts take at least whose first token is not there: what edges know to be ahead."""
        self.joining: list[_Request] = []
        """Whose KV came from another replica."""
        self.num_decodes = self.context = 0
        self.being_computed = 0
        """Prompt tokens of a prompt that is partly computed."""
        self.steps: deque[_Step] = deque()
        self.busy_s = self.kv_peak = 0.0
        self.way_free_s = 0.0
        self._num_steps = self._order = 0
        self._ends: list[tuple[int, int, _Request]] = []
        target_s, most = model.step_target_s, model.max_num_batched_tokens
        self._budget = None if target_s is None else StepBudget(model.predict, target_s=target_s, max_tokens=most)

    def prompt_s(self, num_tokens: int) -> float:
        return num_tokens * self.costs.token_s + num_tokens * num_tokens / 2 * self.costs.pair_s

    def cost(self, num_tokens: int, num_outputs: float) -> float:
        """Of a request here, as routing counts it; like an edge, it does not know when the running step ends."""
        costs = self.costs
        chunks = 1 + self.queued_s / max(1e-9, self.model.max_num_batched_tokens * costs.token_s)
        decode_s = costs.step_s(self.num_decodes + 1, 0, self.context)
        own_s = max(costs.weights_s, self.prompt_s(num_tokens)) if num_tokens else 0.0
        stall_s = own_s * self.num_decodes
        beside_s = min(decode_s, self.num_decodes * costs.token_s + self.context * costs.context_token_s)
        first_s = self.queued_s + chunks * beside_s + own_s
        return first_s + DECODE_WEIGHT * num_outputs * decode_s + INTERFERENCE_WEIGHT * stall_s

    def enter(self, request: _Request) -> None:
        self.queue.append(request)
        self.queued_s += self.prompt_s(request.asked.num_prompt_tokens)

    def plan(self, now_s: float) -> bool:
        """One step more, if there is anything to compute."""
        model = self.model
        for request in self.joining:
            self._join(request, self._num_steps)
        self.joining.clear()
        num_decodes, context = self.num_decodes, self.context
        budget = model.max_num_batched_tokens - num_decodes
        if self._budget is not None and self.queue:
            head = self.queue[0]
            start = head.asked.num_prompt_tokens - head.left
            budget = min(budget, self._budget.prefill_tokens(num_decodes, context, prefill_start=start))
        firsts: list[_Request] = []
        tokens = pairs = 0
        begins_s = self.steps[-1].ends_s if self.steps else now_s
        while self.queue and budget > 0:
            request = self.queue[0]
            length = request.asked.num_prompt_tokens
            start = length - request.left
            if not start:
                if num_decodes + len(firsts) >= model.max_num_seqs:
                    break
                in_use = context + sum(one.asked.num_prompt_tokens for one in firsts)
                if in_use + length > model.kv_room_tokens:
                    break
                request.begun_s = begins_s
            chunk = min(budget, request.left)
            budget -= chunk
            tokens += chunk
            pairs += chunk * start + chunk * (chunk + 1) // 2
            request.left -= chunk
            if request.left:
                break
            self.queue.popleft()
            firsts.append(request)
        if not tokens and not num_decodes:
            return False
        step_s = model.predict(StepShape(tokens, num_decodes, context, pairs))
        self.busy_s += step_s
        self.kv_peak = max(self.kv_peak, context + tokens)
        finishes = self._advance(firsts)
        self.steps.append(_Step(begins_s + step_s, firsts, finishes))
        self._num_steps += 1
        return True

    def _advance(self, firsts: list[_Request]) -> list[_Request]:
        """Every decode has a token more; who has all of his leaves, who has his first joins."""
        self.context += self.num_decodes
        finishes = []
        while self._ends and self._ends[0][0] <= self._num_steps:
            request = heapq.heappop(self._ends)[2]
            finishes.append(request)
            self.num_decodes -= 1
            self.context -= request.asked.num_prompt_tokens + request.asked.num_output_tokens
        for request in firsts:
            if request.asked.num_output_tokens == 1:
                finishes.append(request)
            elif self.model.role is not Role.PREFILL:
                self._join(request, self._num_steps + 1)
        return finishes

    def _join(self, request: _Request, first_step: int) -> None:
        """It decodes from that step on, one token a step."""
        _, num_prompt, num_outputs = request.asked
        self.num_decodes += 1
        self.context += num_prompt + 1
        self._order += 1
        heapq.heappush(self._ends, (first_step + num_outputs - 2, self._order, request))


class _Fleet:
    def __init__(self, models: Sequence[ReplicaModel], demand: Demand, transfer: Transfer) -> None:
        self._requests = [_Request(asked) for asked in demand.requests]
        self._num_outputs = demand.num_output_tokens
        self._transfer = transfer
        self._replicas = [_Replica(model) for model in models]
        self._takers = [one for one in self._replicas if one.model.role is not Role.DECODE]
        self._decoders = [one for one in self._replicas if one.model.role is Role.DECODE]
        self._heap: list[tuple[float, int, int, _Replica, _Request | None]] = []
        self._order = 0

    def run(self) -> None:
        heap, index, requests = self._heap, 0, self._requests
        while heap or index < len(requests):
            if index < len(requests) and (not heap or requests[index].asked.arrival_s < heap[0][0]):
                request = requests[index]
                index += 1
                self._arrive(request)
                continue
            now_s, _, _, replica, joins = heapq.heappop(heap)
            if joins is not None:
                replica.joining.append(joins)
                self._wake(replica, now_s)
            else:
                self._end_step(replica, now_s)

    def figures(self, percentile: float) -> Estimate:
        kept = self._requests[int(WARM_UP * len(self._requests)) :]
        ttfts = sorted(one.first_s - one.asked.arrival_s for one in kept)
        tpots = sorted(
            (one.finished_s - one.first_s) / (one.asked.num_output_tokens - 1)
            for one in kept
            if one.asked.num_output_tokens > 1
        )
        ends_s = max(one.finished_s for one in self._requests)
        waited = sum(one.begun_s - one.asked.arrival_s for one in kept)
        return Estimate(
            *(quantile(ttfts, share) for share in (50, 95, 99)),
            *(quantile(tpots, share) for share in (50, 95, 99)),
            ttft_at_s=quantile(ttfts, percentile),
            tpot_at_s=quantile(tpots, percentile),
            waiting_share=waited / sum(ttfts),
            busy_share=sum(one.busy_s for one in self._replicas) / len(self._replicas) / ends_s,
            kv_peak_share=max(one.kv_peak / one.model.kv_room_tokens for one in self._replicas),
        )

    def _arrive(self, request: _Request) -> None:
        now_s, num_prompt, _ = request.asked
        outputs = 0.0 if self._decoders else self._num_outputs
        best = min(self._takers, key=lambda one: one.cost(num_prompt, outputs))
        best.enter(request)
        self._wake(best, now_s)

    def _wake(self, replica: _Replica, now_s: float) -> None:
        if not replica.steps:
            self._plan(replica, now_s)

    def _plan(self, replica: _Replica, now_s: float) -> None:
        """As many steps as may be planned ahead; waits for the first."""
        while len(replica.steps) < STEPS_AHEAD and replica.plan(now_s):
            pass
        if replica.steps:
            self._push(replica.steps[0].ends_s, 0, replica, None)

    def _end_step(self, replica: _Replica, now_s: float) -> None:
        step = replica.steps.popleft()
        for request in step.firsts:
            request.first_s = now_s
            replica.queued_s = max(0.0, replica.queued_s - replica.prompt_s(request.asked.num_prompt_tokens))
            if replica.model.role is Role.PREFILL and request.asked.num_output_tokens > 1:
                self._hand_over(request, replica, now_s)
        for request in step.finishes:
            request.finished_s = now_s
        self._plan(replica, now_s)

    def _hand_over(self, request: _Request, source: _Replica, now_s: float) -> None:
        transfer = self._transfer
        num_prompt = request.asked.num_prompt_tokens
        target = min(
            self._decoders,
            key=lambda one: one.cost(0, self._num_outputs) + INTERFERENCE_WEIGHT * len(one.joining),
        )
        move_s = num_prompt * transfer.bytes_per_token / transfer.bytes_per_s
        last = min(num_prompt, source.model.max_num_batched_tokens)
        last_s = transfer.tail * last * transfer.bytes_per_token / transfer.bytes_per_s
        free_s = max(request.begun_s, source.way_free_s, target.way_free_s)
        source.way_free_s = target.way_free_s = free_s + move_s
        self._push(max(now_s + last_s, free_s + move_s) + transfer.latency_s, 1, target, request)

    def _push(self, time_s: float, kind: int, replica: _Replica, request: _Request | None) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time_s, kind, self._order, replica, request))


def quantile(ordered: Sequence[float], percent: float) -> float:
    """The least of the sorted values that so many percent do not exceed; NaN for none."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]
