"""What every candidate for one request costs, in seconds: columns of numbers, a row each. Pure; chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .decision import Considered, CostTerms, RouteRequest, RoutingSettings
from .load_table import Column, Greatest, Loads, LoadTable
from .prefix_index import Held
from .replica_view import STEPS_TO_BEGIN
from .roles import Role

GOLDEN = 0x9E3779B97F4A7C15
"""Mixes a session into the replicas' numbers (Fibonacci hashing, Knuth, TAOCP 6.4)."""
QUEUE, PREFILL, TRANSFER, DECODE, INTERFERENCE, AFFINITY = range(6)
"""Rows of the terms, as in CostTerms."""


class CostTable:
    """Candidates: each replica alone, in the order of views, then pairs of one that computes the prompt and one that
    decodes. What cannot be chosen costs infinitely much.

    The costs of a pair's two sides add up, but for what a transfer hides. So not all pairs are counted: each replica
    that decodes with the best that prefills, and the best of these pairs' with each other one that prefills.
    """

    def __init__(
        self,
        request: RouteRequest,
        fleet: LoadTable,
        loads: Loads,
        greatest: Greatest,
        able: Sequence[int],
        held: Sequence[Held],
        *,
        now_s: float,
        settings: RoutingSettings,
    ) -> None:
        """`loads` and `greatest` are of `fleet`; `able` the rows that may take part, one of which at least decodes.
        `held` are the cached blocks; they count only where costs are known, so that elsewhere the load alone decides.
        """
        self._request, self._settings, self._views, self._loads = request, settings, fleet.views, loads
        self._shown = fleet.shown()
        """Of the loads, as they were, when the fleet's have changed."""
        self._requests, self.noises = self._shown[-2:]
        """Requests that run and wait where a candidate decodes, and where its prompt is computed; standard errors of
        its seconds, as far as the steps under way make them. [candidates] each."""
        num_tokens = self._num_tokens = request.num_prompt_tokens + request.num_output_tokens
        self._num_cached: Column | None = None
        if held:  # one token at least is computed
            self._num_cached = fleet.cached_tokens(held, at_most=num_tokens - 1)
        self._work_weight = 0.0
        if greatest.waits:
            self._work_weight = settings.work_weight * float(loads.waits.dot(loads.waits)) / len(self._views)
        self._num_full: Column | None = None
        """Steps before the prompt's last one; None: none. [replicas]"""
        self._queue_s, self._prefill_s = self._prompt(now_s, greatest)
        self._own = () if request.session is None else self._own_of(request.session, able)
        self._pairs: list[tuple[int, int]] = []
        """Rows of the views that prefill and that decode."""
        self._pair_terms: NDArray[np.float64] | None = None
        self._decoding: NDArray[np.intp] | None = None
        """Rows where candidates decode; None: those of their own numbers."""
        prompt_s = self._queue_s + self._prefill_s
        # What decodes lose to the prompt is what its steps take longer than theirs, for each of them.
        lost, weight = settings.interference_weight, settings.decode_weight * request.expected_output_tokens
        lost_a_token = lost * request.expected_output_tokens
        alone = fleet.weighed(np.array((weight, num_tokens * weight, num_tokens * lost_a_token, -lost)))
        weighed_s = lost * loads.num_decodes
        if self._work_weight:
            weighed_s += self._work_weight
        weighed_s *= self._prefill_s
        alone += weighed_s
        alone += prompt_s
        if self._num_full is not None:
            alone -= lost * self._num_full * loads.decodes_step_s
        for row in self._own:
            alone[row] -= settings.affinity_s
        self._alone: Sequence[int] = able
        if greatest.is_prefill:
            self._alone = [row for row in able if not loads.is_prefill[row]]
        if len(self._alone) < len(self._views):
            unable = np.ones(len(self._views), dtype=np.bool_)
            unable[self._alone] = False
            alone[unable] = np.inf
        self.totals, self.first_tokens = alone, prompt_s
        """Seconds that candidates are compared by, and until the first token. [candidates]"""
        self.sure_s = prompt_s if request.deadline_s is None else prompt_s + loads.doubt_s
        """The latter, with few exceptions, where there is a deadline to be kept. [candidates]"""
        self.ahead_s = self._queue_s
        """Of those seconds what others take, before it is this request's turn. [candidates]"""
        if greatest.is_prefill and request.may_detour:
            self._pair_up(able)

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
        return int(self._requests.item(index))

    def too_late(self, left_s: float) -> NDArray[np.bool_]:
        """Where its turn comes later than anybody should wait, or its first token may come after `left_s`. What its own
        prompt takes is no wait: another time it would take as long. [candidates]"""
        late = self.ahead_s > self._settings.max_wait_s
        return late if left_s == np.inf else late | (self.sure_s > left_s)

    def level_with(self, best: int, late: NDArray[np.bool_] | None) -> NDArray[np.intp]:
        """Candidates that cannot be told from the cheapest one, itself included: their costs and its cost, each give or
        take its noise, overlap. Without the `late` ones. [candidates]"""
        highest_s = self.totals.item(best) + self.noises.item(best) + self._settings.tie_s
        lowest_s = self.totals - self.noises
        own_s, lowest_s[best] = lowest_s.item(best), np.inf
        if lowest_s.item(lowest_s.argmin()) > highest_s:
            return np.array((best,))
        lowest_s[best] = own_s
        level = (lowest_s <= highest_s).nonzero()[0]
        return level if late is None else level[~late[level]]

    def fewest(self, level: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of these candidates that a session calls its own, or else that have the fewest requests; of several
        that have as many, the ones whose requests are the least work in each step. [candidates]"""
        if len(level) == 1:
            return level
        rows = level if self._decoding is None else self._decoding[level]
        if self._own and (is_own := np.isin(rows, self._own)).any():
            level, rows = level[is_own], rows[is_own]
        requests = self._requests[level]
        is_least = requests == np.minimum.reduce(requests)
        level, steps_s = level[is_least], self._loads.decode_step_s[rows[is_least]]
        return level if len(level) == 1 else level[steps_s == np.minimum.reduce(steps_s)]

    def terms_of(self, index: int) -> CostTerms:
        pair = index - self.num_alone
        if pair >= 0:
            assert self._pair_terms is not None
            return CostTerms(self._cached_on(self._pairs[pair][0]), *self._pair_terms[:, pair].tolist())
        settings, num_outputs = self._settings, self._request.expected_output_tokens
        step_s, context_token_s, context_decodes_s, decodes_step_s, num_decodes, _, _ = self._shown[:, index].tolist()
        prefill_s = self._prefill_s.item(index)
        num_steps = 1 if self._num_full is None else self._num_full.item(index) + 1
        lost_s = prefill_s * num_decodes - num_steps * decodes_step_s
        lost_s += num_outputs * self._num_tokens * context_decodes_s
        return CostTerms(
            self._cached_on(index),
            self._queue_s.item(index),
            prefill_s,
            0.0,
            settings.decode_weight * num_outputs * (step_s + self._num_tokens * context_token_s),
            settings.interference_weight * lost_s + self._work_weight * prefill_s,
            -settings.affinity_s if index in self._own else 0.0,
        )

    def considered(self, late: NDArray[np.bool_] | None) -> list[Considered]:
        """All candidates, the cheapest first; the `late` ones are rejected."""
        found: list[Considered] = []
        for index in np.argsort(self.totals, kind="stable").tolist()[: len(self)]:
            is_late = late is not None and late.item(index)
            rejected = f"the first token would come in {self.sure_s.item(index):.3g} s" if is_late else None
            found.append(
                Considered(
                    *(self.replica_id(index), self.prefill_replica_id(index), self.terms_of(index), rejected),
                    num_requests=self.num_requests(index),
                    noise_s=float(self.noises[index]),
                )
            )
        return found

    def _decodes_on(self, index: int) -> int:
        pair = index - self.num_alone
        return index if pair < 0 else self._pairs[pair][1]

    def _cached_on(self, index: int) -> int:
        return 0 if self._num_cached is None else int(self._num_cached.item(index))

    def _prompt(self, now_s: float, greatest: Greatest) -> tuple[Column, Column]:
        """Waiting and computing. [replicas] each."""
        loads, num_tokens = self._loads, self._num_tokens
        silent_s = None
        if now_s + greatest.minus_learned_at_s > self._settings.silent_s:
            silent_s = now_s + loads.minus_learned_at_s
            silent_s[silent_s <= self._settings.silent_s] = 0.0
            if self._num_cached is not None:
                self._num_cached[silent_s > 0.0] = 0.0
        num_new = num_tokens if self._num_cached is None else num_tokens - self._num_cached
        queue_s = num_new - loads.spare_tokens
        queue_s *= loads.token_room_s
        np.maximum(queue_s, loads.wait_s, out=queue_s)
        if silent_s is not None:
            queue_s += silent_s
        # In chunks beside the decodes.
        if num_tokens <= -greatest.minus_chunk:
            prefill_s = num_new * loads.token_s
        else:
            self._num_full = np.ceil(num_new / loads.chunk) - 1
            prefill_s = (num_new - self._num_full * loads.chunk) * loads.token_s
        prefill_s += loads.full_step_s
        np.maximum(prefill_s, loads.least_step_s, out=prefill_s)
        if self._num_full is not None:
            prefill_s += self._num_full * loads.chunk_s
        num_pairs = 2 * num_tokens - num_new
        num_pairs *= num_new
        prefill_s += num_pairs * loads.half_pair_s
        return queue_s, prefill_s

    def _prompt_terms(self, indices: Sequence[int]) -> NDArray[np.float64]:
        """Terms up to the first token, as if no other replica took part. [6, indices]"""
        settings, loads, prefill_s = self._settings, self._loads, self._prefill_s[indices]
        num_steps = 1 if self._num_full is None else self._num_full[indices] + 1
        lost_s = prefill_s * loads.num_decodes[indices] - num_steps * loads.decodes_step_s[indices]
        terms = np.zeros((6, len(indices)))
        terms[QUEUE], terms[PREFILL] = self._queue_s[indices], prefill_s
        terms[INTERFERENCE] = settings.interference_weight * lost_s + self._work_weight * prefill_s
        terms[AFFINITY] = [-settings.affinity_s if index in self._own else 0.0 for index in indices]
        return terms

    def _decode(self, indices: Sequence[int]) -> tuple[Column, Column]:
        """Decoding on these replicas, and what their decodes lose to that, both weighted. [indices] each."""
        loads, settings, num_outputs = self._loads, self._settings, self._request.expected_output_tokens
        context_s = self._num_tokens * loads.context_token_s[indices]
        lost_s = self._num_tokens * settings.interference_weight * num_outputs * loads.context_decodes_s[indices]
        return settings.decode_weight * num_outputs * (loads.decode_step_s[indices] + context_s), lost_s

    def _pair_up(self, able: Sequence[int]) -> None:
        """Add the pairs of those that only compute prompts with those that only decode."""
        roles = [self._views[index].role for index in able]
        prefilling = [index for index, role in zip(able, roles, strict=True) if role is Role.PREFILL]
        decoding = [index for index, role in zip(able, roles, strict=True) if role is Role.DECODE]
        if not (prefilling and decoding):
            return
        best = prefilling[int(np.add.reduce(self._prompt_terms(prefilling)).argmin())]
        pairs = self._terms_of_pairs([best] * len(decoding), decoding)
        nearest = decoding[int(pairs.sum(axis=0).argmin())]
        others = [index for index in prefilling if index != best]
        more = self._terms_of_pairs(others, [nearest] * len(others))
        self._pair_terms = terms = np.concatenate((pairs, more), axis=1)
        self._pairs = [*((best, index) for index in decoding), *((index, nearest) for index in others)]
        self.totals = np.concatenate((self.totals, np.add.reduce(terms)))
        first_tokens = terms[QUEUE] + terms[PREFILL]
        loads, (prefills, decodes) = self._loads, np.array(self._pairs).T
        sure_s = first_tokens if self._request.deadline_s is None else first_tokens + loads.doubt_s[prefills]
        self.sure_s = np.concatenate((self.sure_s, sure_s))
        self.ahead_s = np.concatenate((self.ahead_s, terms[QUEUE]))
        self.first_tokens = np.concatenate((self.first_tokens, first_tokens))
        self.noises = np.concatenate((self.noises, loads.noise_s[prefills]))
        both = loads.num_requests[prefills] + loads.num_requests[decodes]
        self._requests = np.concatenate((self._requests, both))
        self._decoding = np.concatenate((np.arange(self.num_alone), decodes))

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
