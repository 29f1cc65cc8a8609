"""Routing policies to compare with: round robin, least loaded, two choices, bounded-load hashing, and an oracle.

All but the oracle know what an edge knows: what it sent, and what the replicas' frames have told it since.
"""

from __future__ import annotations

import bisect
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from manta.autoscaling.simulator.fleet import Route
from manta.autoscaling.simulator.replica import Frame, Replica
from manta.autoscaling.simulator.workload import SimRequest
from manta.cluster.routing.replica_view import STEPS_TO_BEGIN
from manta.engine.step_costs import StepCosts

Measure = Callable[["Known"], float]
DECODE_WEIGHT = 0.1
"""Of the oracle."""
POINTS_A_REPLICA = 64
"""Of a replica on the ring of consistent hashing."""


@dataclass
class Known:
    """What an edge knows about one replica's load."""

    replica_id: str
    num_requests: int = 0
    """Sent and not ended."""
    num_prompt_tokens: int = 0
    """Of requests that have no first token yet."""
    num_tokens: int = 0
    """Prompt tokens of all requests that have not ended."""


MEASURES: dict[str, Measure] = {
    "requests": lambda known: known.num_requests,
    "prefill_tokens": lambda known: known.num_prompt_tokens + known.num_requests,
    "tokens": lambda known: known.num_tokens,
}


class LoadRouter(ABC):
    """Base of those who go by load: keeps `known` up to date."""

    def __init__(self, replica_ids: Sequence[str]) -> None:
        self.known = [Known(replica_id) for replica_id in replica_ids]
        self._by_id = {known.replica_id: known for known in self.known}
        self._sent: dict[str, tuple[Known, int, bool]] = {}

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        return Route(self._send(request, self.choose(request)))

    @abstractmethod
    def choose(self, request: SimRequest) -> Known:
        """Where the request goes."""

    def learn(self, frame: Frame, now_s: float) -> None:
        for delta in frame.deltas:
            sent = self._sent.get(delta.request_id)
            if sent is None:
                continue  # another edge's
            known, num_tokens, began = sent
            if not began:
                known.num_prompt_tokens -= num_tokens
                self._sent[delta.request_id] = (known, num_tokens, True)
            if delta.finish_reason is not None:
                known.num_requests -= 1
                known.num_tokens -= num_tokens
                del self._sent[delta.request_id]

    def _send(self, request: SimRequest, known: Known) -> str:
        num_tokens = request.num_prompt_tokens
        known.num_requests += 1
        known.num_prompt_tokens += num_tokens
        known.num_tokens += num_tokens
        self._sent[request.request_id] = (known, num_tokens, False)
        return known.replica_id


class RoundRobin(LoadRouter):
    """One after the other."""

    def __init__(self, replica_ids: Sequence[str]) -> None:
        super().__init__(replica_ids)
        self._next = 0

    def choose(self, request: SimRequest) -> Known:
        self._next += 1
        return self.known[(self._next - 1) % len(self.known)]


class LeastLoaded(LoadRouter):
    """The least of all by a measure of load; among equals by chance."""

    def __init__(self, replica_ids: Sequence[str], *, measure: str, seed: int = 0) -> None:
        super().__init__(replica_ids)
        self._measure = MEASURES[measure]
        self._rng = random.Random(seed)

    def choose(self, request: SimRequest) -> Known:
        loads = [self._measure(known) for known in self.known]
        least = min(loads)
        best = [known for known, load in zip(self.known, loads, strict=True) if load == least]
        return best[int(self._rng.random() * len(best))]


class PowerOfTwo(LoadRouter):
    """The less loaded of two that are drawn (Mitzenmacher 2001)."""

    def __init__(self, replica_ids: Sequence[str], *, measure: str, seed: int = 0) -> None:
        super().__init__(replica_ids)
        self._measure = MEASURES[measure]
        self._rng = random.Random(seed)

    def choose(self, request: SimRequest) -> Known:
        return min(self._rng.sample(self.known, min(2, len(self.known))), key=self._measure)


class BoundedLoadHash(LoadRouter):
    """Consistent hashing of a prompt's beginning; the next on the ring while one has more than `factor` times the mean
    number of requests (Mirrokni, Thorup, Zadimoghaddam 2018)."""

    def __init__(self, replica_ids: Sequence[str], *, num_blocks: int, factor: float) -> None:
        """`num_blocks`: the prompt's first blocks that make the key."""
        super().__init__(replica_ids)
        self._num_blocks, self._factor = num_blocks, factor
        points = [
            (_point(f"{known.replica_id}/{index}".encode()), known)
            for known in self.known
            for index in range(POINTS_A_REPLICA)
        ]
        points.sort(key=lambda pair: pair[0])
        self._points = [point for point, _ in points]
        self._owners = [known for _, known in points]

    def choose(self, request: SimRequest) -> Known:
        hashes = request.block_hashes
        key = hashes[min(self._num_blocks, len(hashes)) - 1] if hashes else request.request_id.encode()
        total = sum(known.num_requests for known in self.known)
        bound = -(-self._factor * (total + 1) // len(self.known))
        index = bisect.bisect_left(self._points, _point(key))
        while True:
            owner = self._owners[index % len(self._owners)]
            if owner.num_requests < bound:
                return owner
            index += 1


class Oracle:
    """The least seconds to the first token, by the replicas' true caches and queues at this moment, and by what the
    requests in those queues will have stored when it is this one's turn.

    `care` weighs the seconds of computing a request's own tokens once more, for those who come after it and wait. A
    tenth of the seconds that its answer will take is counted too, so that decodes spread.
    """

    def __init__(
        self, replicas: Mapping[str, Replica], costs: StepCosts, *, tokens_a_step: int, block_size: int, care: float
    ) -> None:
        self._replicas = replicas
        self._costs, self._tokens_a_step, self._block_size = costs, tokens_a_step, block_size
        self._care = care
        self._queues: dict[str, dict[str, tuple[SimRequest, int]]] = {replica_id: {} for replica_id in replicas}
        """Requests without a first token, with the tokens that are computed for them."""
        self._promised: dict[str, dict[bytes, int]] = {replica_id: {} for replica_id in replicas}

    def route(self, request: SimRequest, now_s: float) -> Route | None:
        best: tuple[float, str, int, float] | None = None
        for replica_id in self._replicas:
            num_cached = self._num_cached(replica_id, request)
            num_new = request.num_prompt_tokens - num_cached
            own_s = self._costs.prefill_s(num_new, num_cached, tokens_a_step=self._tokens_a_step)
            step_s = self._step_s(replica_id)
            ttft_s = self._queue_s(replica_id) + own_s + STEPS_TO_BEGIN * step_s
            cost_s = ttft_s + self._care * own_s + DECODE_WEIGHT * request.num_output_tokens * step_s
            if best is None or cost_s < best[0]:
                best = (cost_s, replica_id, num_new, ttft_s)
        assert best is not None, "a fleet without replicas"
        _, replica_id, num_new, ttft_s = best
        self._queues[replica_id][request.request_id] = (request, num_new)
        promised = self._promised[replica_id]
        for block_hash in request.block_hashes:
            promised[block_hash] = promised.get(block_hash, 0) + 1
        return Route(replica_id, estimated_ttft_s=ttft_s)

    def learn(self, frame: Frame, now_s: float) -> None:
        """Nothing: it sees the replicas themselves."""

    def saw(self, frame: Frame) -> None:
        """A step has ended, now."""
        queue, promised = self._queues[frame.replica_id], self._promised[frame.replica_id]
        for delta in frame.deltas:
            request, _ = queue.pop(delta.request_id, (None, 0))
            for block_hash in request.block_hashes if request is not None else ():
                promised[block_hash] -= 1
                if not promised[block_hash]:
                    del promised[block_hash]

    def _num_cached(self, replica_id: str, request: SimRequest) -> int:
        cached, promised = self._replicas[replica_id].scheduler.cache, self._promised[replica_id]
        usable = request.block_hashes[: (request.num_prompt_tokens - 1) // self._block_size]
        num_blocks = len(cached.lookup(usable))
        while num_blocks < len(usable) and usable[num_blocks] in promised:
            num_blocks += 1
        return num_blocks * self._block_size

    def _step_s(self, replica_id: str) -> float:
        """A step of the decodes that run there; 0 for an idle replica."""
        scheduler = self._replicas[replica_id].scheduler
        return self._costs.step_s(scheduler.num_running, 0, scheduler.num_context_tokens)

    def _queue_s(self, replica_id: str) -> float:
        """Until what is there is computed: tokens of its queue, with steps that its decodes make longer."""
        scheduler, costs = self._replicas[replica_id].scheduler, self._costs
        queue = list(self._queues[replica_id].values())
        num_waiting = scheduler.num_waiting
        begins = max(0, len(queue) - num_waiting - self._replicas[replica_id].num_unread)  # first come, first served
        waiting = queue[begins:]
        num_begun = scheduler.num_prefill_tokens - sum(one.num_prompt_tokens for one, _ in waiting[:num_waiting])
        num_tokens, num_pairs = max(0, num_begun), 0
        for request, num_new in waiting:
            num_tokens += num_new
            num_pairs += num_new * (request.num_prompt_tokens - num_new) + num_new * num_new // 2
        num_steps = -(-num_tokens // self._tokens_a_step)
        decodes_s = num_steps * scheduler.num_context_tokens * costs.context_token_s
        return num_tokens * costs.token_s + num_pairs * costs.pair_s + num_steps * costs.overhead_s + decodes_s


def _point(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
