"""What every candidate for one request costs, in seconds: columns of numbers, a row each. Pure; chooses nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from manta.engine.step_costs import StepCosts

from .decision import Considered, CostTerms, RouteRequest, RoutingSettings
from .pace import COLUMNS, GREATEST_COLUMNS
from .replica_view import STEPS_TO_BEGIN, ReplicaView
from .roles import Role

GOLDEN = 0x9E3779B97F4A7C15
"""Mixes a session into the replicas' numbers (Fibonacci hashing, Knuth, TAOCP 6.4)."""
QUEUE, PREFILL, TRANSFER, DECODE, INTERFERENCE, AFFINITY = range(6)
"""Rows of the terms, as in CostTerms."""

_replica_id = attrgetter("replica_id")

# The numbers of a fleet are few for an operation on arrays, so what counts is how many operations there are; of them,
# methods of arrays that do the same as `reduce` take twice the time of it.
Column = NDArray[np.float64]


class Loads(NamedTuple):
    """What views say of their replicas, in the columns of pace.py. [replicas] each."""

    is_prefill: Column
    waits: Column
    num_too_many: Column
    ready_at_s: Column
    minus_learned_at_s: Column
    minus_chunk: Column
    slot_s: Column
    chunk: Column
    chunk_s: Column
    step_s: Column
    decode_step_s: Column
    num_decodes: Column
    token_s: Column
    context_token_s: Column
    wait_s: Column
    spare_tokens: Column
    token_room_s: Column
    least_step_s: Column
    full_step_s: Column
    context_decodes_s: Column
    half_pair_s: Column
    matched_block_size: Column
    kv_bytes_per_token: Column
    transfer_bytes_s: Column
    num_requests: Column
    noise_s: Column

    @classmethod
    def of(cls, views: Sequence[ReplicaView], stand_in: StepCosts) -> tuple[Self, Greatest]:
        """`stand_in` are the costs of replicas that have none of their own."""
        packed = np.frombuffer(b"".join([view.packed or view.pack(stand_in) for view in views]))
        table = packed.reshape(len(views), len(COLUMNS)).T.copy()
        return cls._make(table), Greatest._make(np.maximum.reduce(table[: len(GREATEST_COLUMNS)], axis=1).tolist())


class Greatest(NamedTuple):
    """The greatest numbers of the first columns: whether there is any of what is rare, before it is looked at."""

    is_prefill: float
    waits: float
    num_too_many: float
    ready_at_s: float
    minus_learned_at_s: float
    minus_chunk: float


assert Loads._fields == COLUMNS
assert Greatest._fields == GREATEST_COLUMNS


class CostTable:
    """Candidates: each replica alone, in the order of views, then pairs of one that computes the prompt and one that
    decodes. What cannot be chosen costs infinitely much.

    The costs of a pair's two sides add up, but for what a transfer hides. So not all pairs are counted: each replica
    that decodes with the best that prefills, and the best of these pairs' with each other one that prefills.
    """

    def __init__(
        self,
        request: RouteRequest,
        views: Sequence[ReplicaView],
        loads: Loads,
        greatest: Greatest,
        able: Sequence[int],
        matched: Mapping[str, int],
        *,
        now_s: float,
        settings: RoutingSettings,
    ) -> None:
        """`able` are the indices of views that may take part; one of them at least decodes. `matched` are the cached
        blocks by replica; they count only where costs are known, so that elsewhere the load alone decides."""
        self._request, self._settings, self._views, self._loads = request, settings, views, loads
        self._num_tokens = request.num_prompt_tokens + request.num_output_tokens
        self._num_cached = self._cached_tokens(matched) if matched else None
        self._work_weight = 0.0
        if greatest.waits:
            self._work_weight = settings.work_weight * float(np.add.reduce(loads.waits)) / len(views)
        self._queue_s, self._prefill_s, self._stall_s = self._prompt(now_s, greatest)
        self._own = frozenset(() if request.session is None else self._own_of(request.session, able))
        self._pairs: list[tuple[int, int]] = []
        """Indices of the views that prefill and that decode."""
        self._pair_terms: NDArray[np.float64] | None = None
        num_outputs, weight = request.expected_output_tokens, settings.interference_weight
        prompt_s = self._queue_s + self._prefill_s
        totals = prompt_s + weight * self._stall_s
        if self._work_weight:
            totals += self._work_weight * self._prefill_s
        for index in self._own:
            totals[index] -= settings.affinity_s
        decode_weight = settings.decode_weight * num_outputs
        alone = totals + decode_weight * loads.decode_step_s
        alone += self._num_tokens * (decode_weight * loads.context_token_s)
        alone += (self._num_tokens * weight * num_outputs) * loads.context_decodes_s
        self._alone: Sequence[int] = able
        if greatest.is_prefill:
            self._alone = [index for index in able if not loads.is_prefill[index]]
        if len(self._alone) < len(views):
            unable = np.ones(len(views), dtype=np.bool_)
            unable[self._alone] = False
            alone[unable] = np.inf
        self.totals, self.first_tokens = alone, prompt_s
        """Seconds that candidates are compared by, and until the first token. [candidates]"""
        self.noises = loads.noise_s
        """Standard errors of these, as far as the steps under way make them. [candidates]"""
        if greatest.is_prefill and request.may_detour:
            self._pair_up(totals, able)

    def __len__(self) -> int:
        """How many candidates there are that can be chosen."""
        return len(self._alone) + len(self._pairs)

    @property
    def has_pairs(self) -> bool:
        return bool(self._pairs)

    @property
    def num_alone(self) -> int:
        """So many of the candidates, the first ones, are replicas alone."""
        return len(self._views)

    def replica_id(self, index: int) -> str:
        """Where a candidate decodes."""
        return self._views[self._decodes_on(index)].replica_id

    def prefill_replica_id(self, index: int) -> str | None:
        """Where its prompt is computed, if that is another replica."""
        pair = index - self.num_alone
        return None if pair < 0 else self._views[self._pairs[pair][0]].replica_id

    def num_requests(self, index: int) -> int:
        """That run and wait where it decodes, and where its prompt is computed."""
        pair = index - self.num_alone
        return sum(int(self._loads.num_requests[one]) for one in (self._pairs[pair] if pair >= 0 else (index,)))

    def level_with(self, best: int, latest_s: float) -> list[int]:
        """Candidates that cannot be told from the cheapest one, itself included: their costs and its cost, each give or
        take its noise, overlap. Without those whose first token comes later than `latest_s`."""
        highest_s = self.totals[best] + self.noises[best] + self._settings.tie_s
        level = (self.totals - self.noises <= highest_s).nonzero()[0].tolist()
        return level if len(level) == 1 else [one for one in level if self.first_tokens[one] <= latest_s]

    def fewest(self, level: Sequence[int]) -> list[int]:
        """Those of these candidates that a session calls its own, or else that have the fewest requests; of several
        that have as many, the ones whose requests are the least work in each step."""
        loads, decoding = self._loads, [self._decodes_on(index) for index in level]
        keys = [
            (one not in self._own, self.num_requests(index), float(loads.decode_step_s[one]))
            for index, one in zip(level, decoding, strict=True)
        ]
        least = min(keys)
        return [index for index, key in zip(level, keys, strict=True) if key == least]

    def terms_of(self, index: int) -> CostTerms:
        pair = index - self.num_alone
        if pair >= 0:
            assert self._pair_terms is not None
            return CostTerms(self._cached_on(self._pairs[pair][0]), *self._pair_terms[:, pair].tolist())
        settings, loads, num_outputs = self._settings, self._loads, self._request.expected_output_tokens
        prefill_s = float(self._prefill_s[index])
        context_s = self._num_tokens * float(loads.context_token_s[index])
        lost_s = float(self._stall_s[index]) + num_outputs * self._num_tokens * float(loads.context_decodes_s[index])
        return CostTerms(
            self._cached_on(index),
            float(self._queue_s[index]),
            prefill_s,
            0.0,
            settings.decode_weight * num_outputs * (float(loads.decode_step_s[index]) + context_s),
            settings.interference_weight * lost_s + self._work_weight * prefill_s,
            -settings.affinity_s if index in self._own else 0.0,
        )

    def considered(self, latest_s: float) -> list[Considered]:
        """All candidates, the cheapest first; those whose first token comes later than `latest_s` are rejected."""
        found = []
        for index in np.argsort(self.totals, kind="stable").tolist()[: len(self)]:
            terms = self.terms_of(index)
            is_late = terms.first_token_s > latest_s
            rejected = f"the first token would come in {terms.first_token_s:.3g} s" if is_late else None
            found.append(
                Considered(
                    *(self.replica_id(index), self.prefill_replica_id(index), terms, rejected),
                    num_requests=self.num_requests(index),
                    noise_s=float(self.noises[index]),
                )
            )
        return found

    def _decodes_on(self, index: int) -> int:
        pair = index - self.num_alone
        return index if pair < 0 else self._pairs[pair][1]

    def _cached_on(self, index: int) -> int:
        return 0 if self._num_cached is None else int(self._num_cached[index])

    def _cached_tokens(self, matched: Mapping[str, int]) -> Column:
        loads, num_views = self._loads, len(self._views)
        blocks = np.fromiter(map(matched.get, map(_replica_id, self._views), repeat(0)), np.float64, num_views)
        most = (self._num_tokens - 1) // self._views[0].block_size  # one token at least is computed
        return np.minimum(blocks, most) * loads.matched_block_size

    def _prompt(self, now_s: float, greatest: Greatest) -> tuple[Column, Column, Column]:
        """Waiting, computing, and what decodes lose to that, unweighted. [replicas] each."""
        loads, num_tokens = self._loads, self._num_tokens
        silent_s = None
        if now_s + greatest.minus_learned_at_s > self._settings.silent_s:
            silent_s = now_s + loads.minus_learned_at_s
            silent_s[silent_s <= self._settings.silent_s] = 0.0
            if self._num_cached is not None:
                self._num_cached[silent_s > 0.0] = 0.0
        num_new = num_tokens if self._num_cached is None else num_tokens - self._num_cached
        queue_s = np.maximum(loads.wait_s, (num_new - loads.spare_tokens) * loads.token_room_s)
        if silent_s is not None:
            queue_s += silent_s
        # In chunks beside the decodes, which lose what these steps take longer than their own.
        if num_tokens <= -greatest.minus_chunk:
            prefill_s = np.maximum(loads.least_step_s, num_new * loads.token_s + loads.full_step_s)
            own_steps_s = loads.step_s
        else:
            num_full = np.ceil(num_new / loads.chunk) - 1
            rest = num_new - num_full * loads.chunk
            prefill_s = np.maximum(loads.least_step_s, rest * loads.token_s + loads.full_step_s)
            prefill_s += num_full * loads.chunk_s
            own_steps_s = (num_full + 1) * loads.step_s
        prefill_s += num_new * (2 * num_tokens - num_new) * loads.half_pair_s
        return queue_s, prefill_s, (prefill_s - own_steps_s) * loads.num_decodes

    def _prompt_terms(self, indices: Sequence[int]) -> NDArray[np.float64]:
        """Terms up to the first token, as if no other replica took part. [6, indices]"""
        settings, prefill_s = self._settings, self._prefill_s[indices]
        terms = np.zeros((6, len(indices)))
        terms[QUEUE], terms[PREFILL] = self._queue_s[indices], prefill_s
        terms[INTERFERENCE] = settings.interference_weight * self._stall_s[indices] + self._work_weight * prefill_s
        terms[AFFINITY] = [-settings.affinity_s if index in self._own else 0.0 for index in indices]
        return terms

    def _decode(self, indices: Sequence[int]) -> tuple[Column, Column]:
        """Decoding on these replicas, and what their decodes lose to that, both weighted. [indices] each."""
        loads, settings, num_outputs = self._loads, self._settings, self._request.expected_output_tokens
        context_s = self._num_tokens * loads.context_token_s[indices]
        lost_s = self._num_tokens * settings.interference_weight * num_outputs * loads.context_decodes_s[indices]
        return settings.decode_weight * num_outputs * (loads.decode_step_s[indices] + context_s), lost_s

    def _pair_up(self, costs: Column, able: Sequence[int]) -> None:
        """Add the pairs of those that only compute prompts with those that only decode; `costs` of prompts alone."""
        roles = [self._views[index].role for index in able]
        prefilling = [index for index, role in zip(able, roles, strict=True) if role is Role.PREFILL]
        decoding = [index for index, role in zip(able, roles, strict=True) if role is Role.DECODE]
        if not (prefilling and decoding):
            return
        best = prefilling[int(costs[prefilling].argmin())]
        pairs = self._terms_of_pairs([best] * len(decoding), decoding)
        nearest = decoding[int(pairs.sum(axis=0).argmin())]
        others = [index for index in prefilling if index != best]
        more = self._terms_of_pairs(others, [nearest] * len(others))
        self._pair_terms = terms = np.concatenate((pairs, more), axis=1)
        self._pairs = [*((best, index) for index in decoding), *((index, nearest) for index in others)]
        self.totals = np.concatenate((self.totals, np.add.reduce(terms)))
        first_tokens = terms[QUEUE] + terms[PREFILL]
        prefill_noises = self._loads.noise_s[[index for index, _ in self._pairs]]
        self.first_tokens = np.concatenate((self.first_tokens, first_tokens))
        self.noises = np.concatenate((self.noises, prefill_noises))

    def _terms_of_pairs(self, prefilling: list[int], decoding: list[int]) -> NDArray[np.float64]:
        """Terms of pairs, index by index. [6, pairs]"""
        loads, settings = self._loads, self._settings
        terms = self._prompt_terms(prefilling)
        decode_s, lost_s = self._decode(decoding)
        computed_s = terms[QUEUE] + terms[PREFILL]
        num_cached = 0 if self._num_cached is None else self._num_cached[decoding]
        num_moved = np.maximum(1, self._num_tokens - num_cached)
        rates = loads.transfer_bytes_s[decoding]
        rates = np.where(rates > 0, rates, settings.transfer_bytes_s)
        move_s = num_moved * loads.kv_bytes_per_token[prefilling] / rates
        # KV moves while more is computed: a tail of the last chunk is seen, or what the link is behind.
        last = np.minimum(1.0, loads.chunk[prefilling] / num_moved)
        seen_s = np.maximum(move_s - terms[PREFILL], move_s * last * settings.transfer_tail)
        missing_s = (num_moved - loads.spare_tokens[decoding]) * loads.token_room_s[decoding]
        room_s = np.maximum(loads.slot_s[decoding], missing_s) - computed_s
        join_s = STEPS_TO_BEGIN * loads.step_s[decoding] * (loads.num_decodes[decoding] > 0)
        terms[TRANSFER] = settings.transfer_latency_s + seen_s + np.maximum(0.0, room_s) + join_s
        terms[DECODE] = decode_s
        terms[INTERFERENCE] += lost_s
        terms[AFFINITY] += [-settings.affinity_s if index in self._own else 0.0 for index in decoding]
        return terms

    def _own_of(self, session: str, able: Sequence[int]) -> list[int]:
        """The session's replicas, one of each role: the same for every router that sees the same ones (rendezvous
        hashing, Thaler and Ravishankar 1996)."""
        key = crc32(session.encode()) * GOLDEN
        best: dict[Role, tuple[int, int]] = {}
        for index in able:
            view = self._views[index]
            score = (((key ^ view.number) * GOLDEN) & 0xFFFFFFFFFFFFFFFF, index)
            if view.role not in best or score > best[view.role]:
                best[view.role] = score
        return [index for _, index in best.values()]
