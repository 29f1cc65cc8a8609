"""What a policy learned of a fleet: mean requests, load against the model's, what a replica holds. Pure; no clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manta.cluster.routing.roles import Role

from .capacity import NO_LOAD, Need, ReplicaSize, Work, load
from .signals import Counters, FleetSnapshot, PoolState
from .slo import Slo

WORK_S = 120.0
"""After so long, a mean request is by two thirds those that came since."""
LEAST_SEEN = 5.0
"""Requests that must have come and finished, before they say what a mean one is."""
LEAST_RUNNING = 4.0
"""Sequences that should run, before what runs says something about the model."""
SETTLED_S = 15.0
"""So long after replicas came or went, what runs is not what their rate alone explains."""
MOST_CACHED = 0.95
CORRECTION_S = 60.0
LEAST_CORRECTION, MOST_CORRECTION = 0.95, 2.5
"""Of the model's load; the model is trusted further downwards than upwards."""
FILL = 0.5
"""Without a model: share of a replica's sequences that should run, or of its KV room that should be used."""


@dataclass(frozen=True)
class Trail:
    """Counters at some times in the past, about a second apart."""

    entries: tuple[tuple[float, Counters], ...] = ()

    def add(self, now_s: float, counters: Counters, *, keep_s: float) -> Trail:
        """With those of now, and without what is older than `keep_s`."""
        entries = self.entries
        if entries and now_s - entries[-1][0] < 1.0 - 1e-9:
            return Trail((*entries[:-1], (entries[-1][0], counters)))
        first = max(bisect_right(entries, now_s - keep_s, key=_time) - 1, 0)
        return Trail((*entries[first:], (now_s, counters)))

    def since(self, time_s: float) -> Counters:
        """What was counted since then, or as far back as is known."""
        if not self.entries:
            return Counters()
        before = self.entries[max(bisect_right(self.entries, time_s, key=_time) - 1, 0)]
        return self.entries[-1][1].plus(before[1], sign=-1)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A value; `learn` gives the next one."""

    sums: tuple[float, ...] = (0.0,) * 5
    """Faded: requests and prompt tokens that came, tokens that were cached; requests that finished, their tokens."""
    corrections: Mapping[Role, float] = field(default_factory=dict)
    """Observed load over the model's, smoothed."""
    each: Mapping[str, float] = field(default_factory=dict)
    """Without a model, by pool: sequences that run and wait for each request/s, smoothed."""
    counters: Counters = field(default_factory=Counters)
    at_s: float | None = None
    size_changed_s: float = -math.inf
    num_ready: Mapping[str, int] = field(default_factory=dict)
    """Replicas by pool."""

    def correction_of(self, role: Role) -> float:
        """What the model's rates are to be multiplied by."""
        return self.corrections.get(role, 1.0)

    def learn(self, snapshot: FleetSnapshot, rate: float, slo: Slo, now_s: float) -> Observed:
        """After one more look; `rate` is that of arrivals."""
        if self.at_s is None:
            return replace(self, at_s=now_s, counters=snapshot.counters)
        passed_s = now_s - self.at_s
        if passed_s <= 0:
            return self
        new = snapshot.counters.plus(self.counters, sign=-1)
        found = replace(self._worked(new, passed_s), at_s=now_s, counters=snapshot.counters)
        num_ready = {pool.name: pool.num_ready for pool in snapshot.pools}
        if num_ready != self.num_ready:
            found = replace(found, num_ready=num_ready, size_changed_s=now_s)
        work = found.work
        if work is not None and rate > 0 and now_s - found.size_changed_s >= SETTLED_S:
            found = found._with_loads(snapshot, work, rate, slo, passed_s)
        return found

    def need(self, pool: PoolState, rate: float) -> Need:
        """Without a model: so many that each has a usual part of its sequences to run."""
        each = self.each.get(pool.name)
        if each is None:
            return Need(max(pool.num_ready, 1), None, NO_LOAD)
        by_seqs = rate * each / max(FILL * pool.max_num_seqs, 1.0)
        by_room = pool.num_ready * pool.kv_cache_usage / FILL
        limit = "kv_room" if by_room > by_seqs else "seqs"
        return Need(max(math.ceil(max(by_seqs, by_room) - 1e-9), 1), limit, NO_LOAD)

    def _worked(self, new: Counters, passed_s: float) -> Observed:
        """With what came since. Old requests fade, by time while others come."""
        if not new.num_arrived and not new.num_finished:
            return self
        kept = math.exp(-passed_s / WORK_S)
        added = (new.num_arrived, new.num_prompt_tokens, new.num_cached_tokens, new.num_finished, new.num_output_tokens)
        return replace(self, sums=tuple(kept * one + more for one, more in zip(self.sums, added, strict=True)))

    @property
    def work(self) -> Work | None:
        """A mean request; None before one came and one finished."""
        num_arrived, num_prompt, num_cached, num_finished, num_output = self.sums
        if num_arrived < LEAST_SEEN or num_finished < LEAST_SEEN:
            return None
        prompt = num_prompt / num_arrived
        cached = min(num_cached / max(num_prompt, 1e-9), MOST_CACHED)
        return Work(prompt * (1 - cached), prompt, num_output / num_finished)

    def _with_loads(self, snapshot: FleetSnapshot, work: Work, rate: float, slo: Slo, passed_s: float) -> Observed:
        weight = 1 - math.exp(-passed_s / CORRECTION_S)
        corrections, each = dict(self.corrections), dict(self.each)
        for pool in snapshot.pools:
            if not pool.num_ready or pool.num_starting:
                continue
            seen = pool.num_running + pool.num_waiting
            each[pool.name] = _towards(each.get(pool.name, seen / rate), seen / rate, weight)
            size = size_of(pool)
            if size is None or pool.role is Role.PREFILL:
                continue
            expected = load(rate, work, size, slo, pool.role, num_replicas=pool.num_ready)
            num_expected = expected.num_running * pool.num_ready
            if not math.isfinite(num_expected) or num_expected < LEAST_RUNNING or pool.num_waiting > pool.num_ready:
                continue  # overloaded, or hardly anything runs: says nothing about the model
            ratio = min(max(pool.num_running / num_expected, LEAST_CORRECTION), MOST_CORRECTION)
            corrections[pool.role] = _towards(corrections.get(pool.role, 1.0), ratio, weight)
        return replace(self, corrections=corrections, each=each)


def size_of(pool: PoolState) -> ReplicaSize | None:
    """What a replica of the pool is; None where nobody knows how long its steps take."""
    if pool.step_costs is None:
        return None
    return ReplicaSize(
        pool.step_costs,
        pool.max_num_seqs,
        pool.kv_room_tokens,
        tokens_a_step=pool.tokens_a_step,
        tpot_target_s=pool.tpot_target_s,
    )


def _time(entry: tuple[float, Counters]) -> float:
    return entry[0]


def _towards(before: float, new: float | None, weight: float) -> float:
    return before if new is None else before + weight * (new - before)
