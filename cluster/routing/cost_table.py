"""What every candidate for one request costs, in seconds: columns of numbers, a row each. Pure; chooses nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from manta.engine.step_costs import StepCosts

from .decision import Considered, CostTerms, RouteRequest, RoutingSettings
from .pace import MORE_COLUMNS, NUM_COLUMNS, Pace
from .replica_view import STEPS_TO_BEGIN, ReplicaView
from .roles import Role

GOLDEN = 0x9E3779B97F4A7C15
"""Mixes a session into the replicas' numbers (Fibonacci hashing, Knuth, TAOCP 6.4)."""
QUEUE, PREFILL, TRANSFER, DECODE, INTERFERENCE, AFFINITY = range(6)
"""Rows of the terms, as in CostTerms."""

# The methods of arrays that do the same as `reduce` take twice the time of it, which counts at this size.
Column = NDArray[np.float64]


class Loads(NamedTuple):
    """What views say of their replicas, in columns: as in pace.py, Pace and MORE_COLUMNS. [replicas] each."""

    queue_s: Column
    slot_s: Column
    has_prompts_waiting: Column
    chunk: Column
    chunk_s: Column
    step_s: Column
    fixed_s: Column
    decode_step_s: Column
    num_decodes: Column
    free_blocks: Column
    block_s: Column
    weights_s: Column
    token_s: Column
    pair_s: Column
    context_token_s: Column
    block_size: Column
    num_requests: Column
    num_own: Column
    num_begun: Column
    max_num_seqs: Column
    ready_at_s: Column
    learned_at_s: Column
    kv_bytes_per_token: Column
    transfer_bytes_s: Column
    knows_costs: Column
    is_prefill: Column
    max_requests: Column

    @classmethod
    def of(cls, views: Sequence[ReplicaView], stand_in: StepCosts) -> Loads:
        """`stand_in` are the costs of replicas that have none of their own."""
        table = np.frombuffer(b"".join([view.packed or view.pack(stand_in) for view in views]))
        return cls._make(table.reshape(len(views), NUM_COLUMNS).T)


assert Loads._fields == (*Pace._fields, *MORE_COLUMNS)


class CostTable:
    """Candidates: each replica that decodes, alone, and pairs of one that computes the prompt and one that decodes.

    The costs of a pair's two sides add up, but for what a transfer hides. So not all pairs are counted: each replica
    that decodes with the best that prefills, and the best of these pairs' with each other one that prefills.
    """

    def __init__(
        self,
        request: RouteRequest,
        views: Sequence[ReplicaView],
        loads: Loads,
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
        self._num_cached = self._cached_tokens(matched) if matched else np.zeros(len(views))
        silent_s = now_s - loads.learned_at_s
        has_silent = np.maximum.reduce(silent_s) > settings.silent_s
        if has_silent:
            silent_s = np.where(silent_s > settings.silent_s, silent_s, 0.0)
            self._num_cached[silent_s > 0.0] = 0.0
        prompt = self._prompt(able)
        if has_silent:
            prompt[QUEUE] += silent_s
        self.terms = self._alone(prompt)
        self._decoding = able
        self._prefilling: Sequence[int | None] | None = None
        if np.add.reduce(loads.is_prefill):
            self._split(prompt, able)
        elif len(able) < len(views):
            self.terms = self.terms[:, able]
        self.totals = np.add.reduce(self.terms)
        """Seconds that candidates are compared by. [candidates]"""
        self.first_tokens = self.terms[QUEUE] + self.terms[PREFILL]
        """Seconds until the first token. [candidates]"""

    def __len__(self) -> int:
        return len(self._decoding)

    @property
    def is_pair(self) -> NDArray[np.bool_]:
        """Whether two replicas take part. [candidates]"""
        return np.array([one is not None for one in self._prefilling or [None] * len(self)])

    def replica_id(self, index: int) -> str:
        """Where a candidate decodes."""
        return self._views[self._decoding[index]].replica_id

    def prefill_replica_id(self, index: int) -> str | None:
        """Where its prompt is computed, if that is another replica."""
        prefilling = None if self._prefilling is None else self._prefilling[index]
        return None if prefilling is None else self._views[prefilling].replica_id

    def terms_of(self, index: int) -> CostTerms:
        prefilling = None if self._prefilling is None else self._prefilling[index]
        computing = self._decoding[index] if prefilling is None else prefilling
        return CostTerms(int(self._num_cached[computing]), *self.terms[:, index].tolist())

    def considered(self, latest_s: float) -> list[Considered]:
        """All candidates, the cheapest first; those whose first token comes later than `latest_s` are rejected."""
        found = []
        for index in np.argsort(self.totals, kind="stable").tolist():
            terms = self.terms_of(index)
            is_late = terms.first_token_s > latest_s
            rejected = f"the first token would come in {terms.first_token_s:.3g} s" if is_late else None
            found.append(Considered(self.replica_id(index), self.prefill_replica_id(index), terms, rejected))
        return found

    def _cached_tokens(self, matched: Mapping[str, int]) -> Column:
        loads, get = self._loads, matched.get
        blocks = np.array([get(view.replica_id, 0) for view in self._views], dtype=np.float64)
        most = (self._num_tokens - 1) // loads.block_size  # one token at least is computed
        return np.minimum(blocks, most) * loads.block_size * loads.knows_costs

    def _prompt(self, able: Sequence[int]) -> NDArray[np.float64]:
        """Terms up to the first token, as if no other replica took part. [6, replicas]"""
        loads, settings, num_cached = self._loads, self._settings, self._num_cached
        num_new = self._num_tokens - num_cached
        missing_s = (num_new // loads.block_size + 1 - loads.free_blocks) * loads.block_s
        # In chunks beside the decodes, which lose what these steps take longer than their own.
        num_full = num_new // loads.chunk
        rest = num_new - num_full * loads.chunk
        has_rest = rest > 0
        rest_s = loads.fixed_s + np.maximum(loads.weights_s, (rest + loads.num_decodes) * loads.token_s)
        prefill_s = num_full * loads.chunk_s + has_rest * rest_s
        prefill_s += num_new * (num_cached + 0.5 * num_new) * loads.pair_s
        stall_s = (prefill_s - (num_full + has_rest) * loads.step_s) * loads.num_decodes
        terms = np.zeros((6, len(prefill_s)))
        terms[QUEUE] = np.maximum(np.maximum(loads.queue_s, loads.slot_s), missing_s)
        terms[PREFILL] = prefill_s
        terms[INTERFERENCE] = settings.interference_weight * stall_s
        num_waiting = np.add.reduce(loads.has_prompts_waiting)
        if num_waiting:
            terms[INTERFERENCE] += settings.work_weight * num_waiting / len(self._views) * prefill_s
        if self._request.session is not None:
            for index in self._own(self._request.session, able):
                terms[AFFINITY, index] = -settings.affinity_s
        return terms

    def _alone(self, prompt: NDArray[np.float64]) -> NDArray[np.float64]:
        """The whole request on one replica. [6, replicas]"""
        decode_s, lost_s = self._decode()
        terms = prompt.copy()
        terms[DECODE] = decode_s
        terms[INTERFERENCE] += lost_s
        return terms

    def _decode(self) -> tuple[Column, Column]:
        """Decoding on each replica, and what its decodes lose to that, both weighted."""
        loads, settings, num_outputs = self._loads, self._settings, self._request.expected_output_tokens
        context_s = self._num_tokens * loads.context_token_s
        lost_s = settings.interference_weight * num_outputs * context_s * loads.num_decodes
        return settings.decode_weight * num_outputs * (loads.decode_step_s + context_s), lost_s

    def _split(self, prompt: NDArray[np.float64], able: Sequence[int]) -> None:
        """With replicas that only compute prompts: the others alone, and the pairs."""
        roles = [self._views[index].role for index in able]
        prefilling = [index for index, role in zip(able, roles, strict=True) if role is Role.PREFILL]
        decoding = [index for index, role in zip(able, roles, strict=True) if role is Role.DECODE]
        self._decoding = [index for index, role in zip(able, roles, strict=True) if role is not Role.PREFILL]
        self._prefilling = [None] * len(self._decoding)
        self.terms = self.terms[:, self._decoding]
        if not (prefilling and decoding and self._request.may_detour):
            return
        costs = prompt.sum(axis=0)[prefilling]
        best = prefilling[int(costs.argmin())]
        pairs = self._pairs(prompt, [best] * len(decoding), decoding)
        nearest = decoding[int(pairs.sum(axis=0).argmin())]
        others = [index for index in prefilling if index != best]
        more = self._pairs(prompt, others, [nearest] * len(others))
        self.terms = np.concatenate((self.terms, pairs, more), axis=1)
        self._decoding = [*self._decoding, *decoding, *([nearest] * len(others))]
        self._prefilling = [*self._prefilling, *([best] * len(decoding)), *others]

    def _pairs(self, prompt: NDArray[np.float64], prefilling: list[int], decoding: list[int]) -> NDArray[np.float64]:
        """Terms of pairs, index by index. [6, pairs]"""
        loads, settings = self._loads, self._settings
        terms = prompt[:, prefilling]
        decode_s, lost_s = self._decode()
        computed_s = terms[QUEUE] + terms[PREFILL]
        num_moved = np.maximum(1, self._num_tokens - self._num_cached[decoding])
        rates = loads.transfer_bytes_s[decoding]
        rates = np.where(rates > 0, rates, settings.transfer_bytes_s)
        move_s = num_moved * loads.kv_bytes_per_token[prefilling] / rates
        # KV moves while more is computed: a tail of the last chunk is seen, or what the link is behind.
        last = np.minimum(1.0, loads.chunk[prefilling] / num_moved)
        seen_s = np.maximum(move_s - terms[PREFILL], move_s * last * settings.transfer_tail)
        missing = num_moved // loads.block_size[decoding] + 1 - loads.free_blocks[decoding]
        room_s = np.maximum(loads.slot_s[decoding], missing * loads.block_s[decoding]) - computed_s
        join_s = STEPS_TO_BEGIN * loads.step_s[decoding] * (loads.num_decodes[decoding] > 0)
        terms[TRANSFER] = settings.transfer_latency_s + seen_s + np.maximum(0.0, room_s) + join_s
        terms[DECODE] = decode_s[decoding]
        terms[INTERFERENCE] += lost_s[decoding]
        terms[AFFINITY] += prompt[AFFINITY, decoding]
        return terms

    def _own(self, session: str, able: Sequence[int]) -> list[int]:
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
