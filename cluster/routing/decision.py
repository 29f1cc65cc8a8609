"""What routing is asked and what it answers: settings, a request, cost terms, a choice, its candidates. Data only.

Of what each decision makes, structs: frozen dataclasses take five times as long to make.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """Weights of the cost, and bounds. Seconds unless named otherwise."""

    decode_weight: float = 0.1
    """What a second of decoding counts beside one until the first token. An answer takes seconds, its prompt a part of
    one: counted in full, small differences in batch size would outweigh cached prefixes, and all would wait longer."""
    interference_weight: float = 0.005
    """What a second counts that a running decode loses: when 200 of them stall, that counts once. More makes replicas
    with many decodes repel prompts, and loads uneven."""
    work_weight: float = 5.0
    """What a second of computing the prompt counts on top while all replicas have prompts waiting, which it delays; in
    proportion while some have."""
    affinity_s: float = 0.01
    """How far a session's own replica is ahead of others."""
    tie_s: float = 1e-4
    """Candidates this near the best are level with it, however well costs are known."""
    ramp_s: float = 10.0
    """Over so long a replica that has just become ready is filled; 0: at once."""
    silent_s: float = 2.0
    """One that was silent for longer gets no credit for cached prefixes, and its silence counts as waiting."""
    transfer_bytes_s: float = 5e9
    """Bytes of KV that move to a replica in a second, while none was measured there."""
    transfer_latency_s: float = 0.003
    """Of a transfer, however small."""
    transfer_tail: float = 0.1
    """Part of a last chunk's KV that is still to move when the chunk is computed: layers go as they are done."""
    detour_from_tokens: int | None = None
    """A prompt of at least so many tokens is computed on a prefill replica where there is one, whatever that costs;
    None: where it costs less."""
    max_wait_s: float = 60.0
    """A request that is estimated to wait longer for its turn is not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What routing must know of a request. Counts in tokens."""

    request_id: str
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    """Of the full blocks of prompt and outputs so far, in the replicas' block size; salt and adapter are in them."""
    expected_output_tokens: int
    """How many are still to come."""
    num_output_tokens: int = 0
    """Generated before, elsewhere: they are computed like the prompt."""
    session: str | None = None
    """Requests of a session prefer the same replica, where candidates are nearly level."""
    priority: int = 0
    """Lower runs first. Admission goes by it; costs do not."""
    deadline_s: float | None = None
    """When the first token must be there, on the clock of `now_s`."""
    model_name: str | None = None
    """Only replicas of this model are asked; None: all."""
    may_detour: bool = True
    """Whether its prompt may be computed on another replica than its answer."""
    excluded: frozenset[str] = frozenset()
    """Replicas that must not take it, such as one that has just refused it."""


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """What a candidate costs, seconds."""

    num_cached_tokens: int
    queue_s: float = 0.0
    """Until its turn comes: prompts ahead, no slot, no blocks, silence."""
    prefill_s: float = 0.0
    """Computing what is not cached."""
    transfer_s: float = 0.0
    """From the first token until another replica can go on: KV that computing did not hide, and room there."""
    decode_s: float = 0.0
    """Its expected tokens, weighted."""
    interference_s: float = 0.0
    """What other requests lose to it, weighted."""
    affinity_s: float = 0.0
    """Below 0 on its session's own replica."""

    @property
    def first_token_s(self) -> float:
        """Estimated seconds until its first token."""
        return self.queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """What candidates are compared by."""
        return (
            self.first_token_s + self.transfer_s + self.decode_s + self.interference_s + self.affinity_s
        )  # fmt: skip


class Considered(msgspec.Struct, frozen=True):
    """A candidate, for explanations."""

    replica_id: str
    prefill_replica_id: str | None
    """The replica that would compute the prompt, where that is another one."""
    terms: CostTerms | None
    """None where it was rejected before it was counted."""
    rejected: str | None
    """Why it could not be chosen; None: it could."""
    num_requests: int = 0
    """That run and wait there, on both of a pair."""
    noise_s: float = 0.0
    """Standard error of its seconds: candidates are level where costs overlap, each give or take that."""


class Narrowing(NamedTuple):
    """How few of the candidates were left."""

    num_candidates: int
    num_level: int
    """Whose costs could not be told from the least."""
    num_fewest: int
    """Of these with the fewest requests, or of the request's session; one of them was drawn."""
    num_requests: int
    """That run and wait at the chosen one."""


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and why."""

    replica_id: str
    """It decodes there."""
    prefill_replica_id: str | None
    """It is computed there first and its KV moves; None: all on `replica_id`."""
    estimate: CostTerms
    """All 0 where nobody knows how long steps take and the load alone decided."""
    narrowing: Narrowing
    is_by_load: bool
    """Whether no replica's speed was known: then the candidates' seconds are those of a device that nobody has."""
    _considered: Callable[[], tuple[Considered, ...]]

    @property
    def reason(self) -> str:
        """In a sentence."""
        num_candidates, num_level, num_fewest, num_requests = self.narrowing
        level = ""
        if num_level > 1:
            drawn = f", drawn among {num_fewest}" if num_fewest > 1 else ""
            level = f": fewest requests ({num_requests}) of {num_level} that are level{drawn}"
        if self.is_by_load:
            return f"least load of {num_candidates} candidates of unknown speed{level}"
        cost = f"{self.estimate.total_s:.4g} s, first token in {self.estimate.first_token_s:.4g} s"
        return f"least cost ({cost}) of {num_candidates} candidates{level}"

    @property
    def considered(self) -> tuple[Considered, ...]:
        """All candidates, the best first, and those that were rejected."""
        return self._considered()


class NoRoomReason(enum.StrEnum):
    """Why no replica takes a request now."""

    NO_REPLICA = "no_replica"
    """None is ready, or of the right role or model."""
    FULL = "full"
    """All have as many requests as they may."""
    WAIT = "wait"
    """All would let it wait for longer than anybody should."""
    DEADLINE = "deadline"
    """None would give the first token in time."""


class NoRoom(msgspec.Struct, frozen=True):
    """No replica takes the request now."""

    reason: NoRoomReason
    estimated_wait_s: float
    """Until its first token if it waited, or where all are full until one of them is not."""
    _considered: Callable[[], tuple[Considered, ...]]

    @property
    def considered(self) -> tuple[Considered, ...]:
        """As in a Decision."""
        return self._considered()
