"""How many replicas each pool should have, and why: `decide` is pure. Knows no clock, no randomness, no Ray.

Forward: expected arrivals through the step-time model (capacity.py). Back: observed load against the model's, lateness
against the objective, backlog. Up at once; down after a quiet window and never while requests are late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided, ReasonCode

from .budget import fit_into
from .capacity import Need, Work, held_rate, load, need
from .damping import Damping
from .forecast import LONG_S, Bursts, Forecast, Samples, forecast
from .observed import Observed, Trail, size_of
from .role_changes import RoleChange, role_changes
from .signals import Counters, FleetSnapshot, PoolState
from .slo import Slo

USUAL_WAIT = 0.25
"""Of the limit for the first token: requests that came within so long may wait, and nothing is wrong."""
HELD_WINDOWS = 10
"""Times that over which lateness is looked at: so long it must have been within the objective to be held."""
HELD_MARGIN = 1.05
"""Replicas that hold the objective are believed to hold so many times the rate at which they do."""
BREACH_SIGMAS = 2.0
"""Late requests beyond what the objective allows that may be chance, in standard deviations."""
USUAL_WORK = Work(num_new_tokens=1024.0, num_prompt_tokens=1024.0, num_output_tokens=256.0)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Seconds and shares. The defaults hold for replicas that start within a minute or so."""

    slo: Slo
    cold_start_s: float = 30.0
    """Expected, until starts were measured."""
    quiet_s: float = 120.0
    """So long fewer replicas must have been enough before some stop; longer where that was regretted (damping.py)."""
    to_zero_s: float = 300.0
    """So long no request must have come before the last stops, where a pool may go to zero."""
    headroom: float = 1.05
    """Of the expected rate, replicas are provided for so many times it."""
    down_margin: float = 1.1
    """Replicas stop when so many times the rate would still be held: load near a threshold changes nothing."""
    drain_backlog_s: float = 10.0
    """A backlog is to be worked off in so long."""
    breach_s: float = 60.0
    """Window over which lateness is looked at."""
    least_outcomes: int = 20
    """Requests that must have ended in it before lateness says anything."""
    usual: Work = field(default=USUAL_WORK)
    """A mean request, before any was seen."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is wanted from now on."""

    targets: Mapping[str, int] = field(default_factory=dict)
    """Replicas by pool; every pool of the snapshot is there."""
    role_changes: tuple[RoleChange, ...] = ()
    decided: tuple[Decided, ...] = ()
    """What changed, one entry a pool and reason; empty as a rule."""
    level_requests_s: float = 0.0
    forecast_requests_s: float = 0.0
    attainment: float | None = None
    """Over the last minutes."""
    gpus_wanted: float = 0.0
    """Without a budget."""


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What a policy remembers. Opaque to others, and a value: nothing changes it."""

    samples: Samples = field(default_factory=Samples)
    bursts: Bursts = field(default_factory=Bursts)
    trail: Trail = field(default_factory=Trail)
    observed: Observed = field(default_factory=Observed)
    damping: Mapping[str, Damping] = field(default_factory=dict)
    """By pool."""
    hurry: Mapping[str, Damping] = field(default_factory=dict)
    """The same over a shorter time, with what backlogs ask for."""
    begun_s: float | None = None
    last_work_s: float | None = None
    """When something was last there to do."""
    last_breach_s: float | None = None
    held_back: frozenset[str] = frozenset()
    """Pools of which was said that the budget or their limit holds them back."""
    last_role_change_s: float = -math.inf


class Policy:
    """Stateless: all that it remembers is the PolicyState it is given."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def initial(self) -> PolicyState:
        return PolicyState()

    def decide(self, state: PolicyState, snapshot: FleetSnapshot, now_s: float) -> tuple[PolicyState, Decision]:
        """What to do at `now_s`, which never falls. Any period will do; a second is meant."""
        return _Deciding(self.settings, state, snapshot, now_s).run()


@dataclass(frozen=True)
class _Wish:
    """Of one role: replicas, and why so many."""

    num_replicas: int
    reason: ReasonCode
    because: str


class _Deciding:
    """One decision."""

    def __init__(self, settings: PolicySettings, state: PolicyState, snapshot: FleetSnapshot, now_s: float) -> None:
        self._settings, self._snapshot, self._now_s = settings, snapshot, now_s
        cold_start_s = settings.cold_start_s if snapshot.cold_start_s is None else snapshot.cold_start_s
        self._cold_start_s = cold_start_s
        samples = state.samples.add(now_s, snapshot.counters.num_arrived)
        trail = state.trail.add(now_s, snapshot.counters, keep_s=HELD_WINDOWS * settings.breach_s)
        self._forecast: Forecast = forecast(samples, state.bursts, horizon_s=cold_start_s)
        bursts = state.bursts.learn(self._forecast, now_s, horizon_s=cold_start_s)
        self._recent: Counters = trail.since(now_s - settings.breach_s)
        # While a rate jumps, what runs does not belong to it yet.
        rate = 0.0 if self._forecast.is_burst else self._forecast.recent
        self._observed = state.observed.learn(snapshot, rate, settings.slo, now_s)
        self._work = self._observed.work or settings.usual
        begun_s = now_s if state.begun_s is None else state.begun_s
        self._state = replace(
            state, samples=samples, bursts=bursts, trail=trail, observed=self._observed, begun_s=begun_s
        )
        # What was late before all replicas were there says nothing about whether they are enough.
        settled_s = self._observed.size_changed_s + settings.breach_s / 4
        self._since_settled: Counters = trail.since(max(now_s - settings.breach_s, settled_s))
        self._long_settled: Counters = trail.since(max(now_s - HELD_WINDOWS * settings.breach_s, settled_s))
        self._before = state.observed.num_ready
        self._decided: list[Decided] = []

    def run(self) -> tuple[PolicyState, Decision]:
        pools = self._snapshot.pools
        self._notice_work_and_breach()
        targets, wishes = {}, {}
        for pool in pools:
            wish = wishes[pool.name] = self._wish(pool)
            targets[pool.name] = self._damped(pool, wish)
        changes = self._role_changes(targets)
        granted = fit_into(self._snapshot.gpu_budget, pools, targets)
        for pool in pools:
            self._notice_failures(pool)
            self._explain(pool, wishes[pool.name], targets[pool.name], granted[pool.name])
        gpus_wanted = sum(targets[pool.name] * pool.gpus_per_replica for pool in pools)
        decision = Decision(
            targets=granted,
            role_changes=changes,
            decided=tuple(self._decided),
            level_requests_s=self._forecast.level,
            forecast_requests_s=self._forecast.expected,
            attainment=attainment(self._recent),
            gpus_wanted=gpus_wanted,
        )
        return self._state, decision

    def _notice_work_and_breach(self) -> None:
        snapshot, recent, state = self._snapshot, self._recent, self._state
        under_way = snapshot.num_held + sum(pool.num_running + pool.num_waiting for pool in snapshot.pools)
        samples = state.samples
        has_arrived = len(samples.counts) > 1 and samples.counts[-1] > samples.counts[-2]
        self._has_work = bool(under_way or has_arrived)
        if self._has_work or state.last_work_s is None:
            state = replace(state, last_work_s=self._now_s)
        if is_breach(recent, self._settings):
            state = replace(state, last_breach_s=self._now_s)
        self._state = state

    def _notice_failures(self, pool: PoolState) -> None:
        """Say that replicas are gone that nobody stopped; whoever runs them starts others for them.

        Those that a lower target stops are above it. One that failed may be seen while it is being stopped: it is
        gone all the same, and this is the one moment at which that shows.
        """
        before = self._before.get(pool.name, 0)
        num_lost = min(before, pool.target) - pool.num_ready
        if num_lost > 0 and pool.num_starting > 0:
            because = f"{num_lost} of {before} replicas are gone that nobody stopped: as many start in their place"
            self._say(pool, pool.target, pool.target, ReasonCode.REPLACE_FAILED, because)

    def _wish(self, pool: PoolState) -> _Wish:
        """What is needed, with no damping."""
        settings, snapshot, expected = self._settings, self._snapshot, self._forecast.expected
        state = self._state
        assert state.last_work_s is not None
        idle_s = self._now_s - state.last_work_s
        if pool.min_replicas == 0 and pool.target and idle_s >= settings.to_zero_s:
            return _Wish(0, ReasonCode.TO_ZERO, f"no request came for {idle_s:.0f} s")
        if not pool.target:
            if not self._has_work:
                return _Wish(0, ReasonCode.TO_ZERO, "nothing asks for it")
            base = _Wish(1, ReasonCode.FROM_ZERO, f"{snapshot.num_held} requests wait where no replica is")
        else:
            base = _Wish(1, ReasonCode.QUIET, "one is enough")
        wishes = [base, self._forward(pool, expected), self._backlog(pool, expected), self._breach(pool)]
        return max(wishes, key=lambda wish: wish.num_replicas)  # the first of equals

    def _forward(self, pool: PoolState, expected: float) -> _Wish:
        """By the model, or without one by what replicas were seen to hold."""
        found = self._need(pool, expected * self._settings.headroom)
        if pool.num_ready == pool.target < found.num_replicas and self._holds(pool, found, expected):
            return _Wish(pool.target, ReasonCode.FORECAST, f"{pool.target} hold the objective")
        code = ReasonCode.BURST if self._forecast.is_burst else ReasonCode.FORECAST
        if found.limit == "kv_room":
            code = ReasonCode.KV_ROOM
        limit = {None: "one replica holds it", "ttft": "time to first token", "tpot": "time per output token",
                 "kv_room": "room in the KV cache", "seqs": "sequences a replica"}[found.limit]  # fmt: skip
        because = (
            f"{expected:.3g} requests/s of {self._work.num_prompt_tokens:.0f} + {self._work.num_output_tokens:.0f} "
            f"tokens are expected in {self._cold_start_s:.0f} s (now {self._forecast.level:.3g}/s); limit: {limit}"
        )
        return _Wish(found.num_replicas, code, because)

    def _holds(self, pool: PoolState, found: Need, expected: float) -> bool:
        """Whether what is there was seen to hold the objective at the rate that is expected: then the model of times,
        and a reserve for what it does not know, have no say, unless it says that so much cannot be served at all."""
        settings, state, size = self._settings, self._state, size_of(pool)
        if found.limit not in ("ttft", "tpot") or size is None:
            return False
        modelled = load(expected, self._work, size, settings.slo, pool.role, num_replicas=pool.target)
        if not math.isfinite(modelled.ttft_s):
            return False
        rate, recent = state.samples.rate(LONG_S), self._long_settled
        if rate is None or expected > HELD_MARGIN * rate or recent.num_finished < 1 / (1 - settings.slo.target):
            return False
        return not is_breach(recent, settings) and not is_breach(self._since_settled, settings)

    def _need(self, pool: PoolState, rate: float) -> Need:
        return needed(
            pool, rate * self._observed.correction_of(pool.role), self._work, self._settings.slo, self._observed
        )

    def _backlog(self, pool: PoolState, expected: float) -> _Wish:
        """To work off what waits while more comes."""
        num_waiting = self._snapshot.num_held + pool.num_waiting
        if pool.role is Role.DECODE:
            num_waiting = pool.num_waiting
        # Some always wait for their first step, and more where the first token may take longer.
        ttft_s = self._settings.slo.ttft_s or 1.0
        num_waiting -= math.ceil(expected * USUAL_WAIT * ttft_s) + pool.num_ready
        if num_waiting <= 0:
            return _Wish(0, ReasonCode.BACKLOG, "")
        size, ahead_s = size_of(pool), self._cold_start_s
        if size is not None and self._observed.work is not None:  # a guessed request says nothing about what is held
            held = held_rate(self._work, size, self._settings.slo, pool.role, num_replicas=pool.num_ready)
            # Those that start are there sooner than one that starts now.
            ahead_s = ahead_s / 2 if pool.num_starting else ahead_s
            num_waiting += round((expected - held / self._observed.correction_of(pool.role)) * ahead_s)
            if num_waiting <= 0:
                return _Wish(0, ReasonCode.BACKLOG, "")  # worked off before another replica could be there
        found = self._need(pool, expected + num_waiting / max(self._settings.drain_backlog_s, ttft_s))
        because = f"{num_waiting} requests wait beyond the usual, or will in {ahead_s:.0f} s"
        return _Wish(found.num_replicas, ReasonCode.BACKLOG, because)

    def _breach(self, pool: PoolState) -> _Wish:
        """One in eight more, each time that all of them have come and requests are still late."""
        recent, settings = self._since_settled, self._settings
        if pool.num_starting or pool.num_ready < pool.target or not is_breach(recent, settings):
            return _Wish(0, ReasonCode.BREACH, "")
        is_prefill, is_decode = pool.role is Role.PREFILL, pool.role is Role.DECODE
        if (is_prefill and not recent.num_late_ttft + recent.num_failed) or (is_decode and not recent.num_late_tpot):
            return _Wish(0, ReasonCode.BREACH, "")
        if 2 * self._need_with_margin(pool) <= pool.num_ready and not pool.num_waiting:
            return _Wish(0, ReasonCode.BREACH, "")  # there is plenty: what was late has another cause, or waited before
        share = attainment(recent)
        because = (
            f"only {share:.1%} of the last requests were within the objective, {settings.slo.target:.1%} should be"
        )
        return _Wish(pool.num_ready + max(1, pool.num_ready // 8), ReasonCode.BREACH, because)

    def _damped(self, pool: PoolState, wish: _Wish) -> int:
        """Up at once; down to the most that was needed in the quiet window, and not while requests are late."""
        settings, now_s = self._settings, self._now_s
        wanted = wish.num_replicas
        if wish.reason is ReasonCode.TO_ZERO:
            return 0
        to_keep = wanted
        if wanted < pool.target:  # near a threshold, what is there stays
            to_keep = min(pool.target, max(wanted, self._need_with_margin(pool)))
        # What a backlog asks for is not needed when it is gone: it stays for as long as a start takes.
        hurry = self._state.hurry.get(pool.name, Damping()).need(to_keep, now_s, quiet_s=self._cold_start_s)
        if wish.reason is ReasonCode.BACKLOG:
            to_keep = min(to_keep, max(self._need_with_margin(pool), 1))
        damping = self._state.damping.get(pool.name, Damping()).need(to_keep, now_s, quiet_s=settings.quiet_s)
        if wanted >= pool.target:
            target = min(wanted, pool.max_replicas)
            if target > pool.target:
                damping = damping.rose(now_s, quiet_s=settings.quiet_s)
        else:
            begun_s, breach_s = self._state.begun_s, self._state.last_breach_s
            is_known = begun_s is not None and now_s - begun_s >= settings.quiet_s
            is_late = breach_s is not None and now_s - breach_s < settings.quiet_s / 2
            target = pool.target if not is_known or is_late else min(max(damping.most, hurry.most), pool.target)
            if target < pool.target:
                damping = damping.fell(now_s)
        self._state = replace(
            self._state,
            damping={**self._state.damping, pool.name: damping},
            hurry={**self._state.hurry, pool.name: hurry},
        )
        return min(max(target, pool.min_replicas), pool.max_replicas)

    def _need_with_margin(self, pool: PoolState) -> int:
        expected = self._forecast.expected * self._settings.headroom * self._settings.down_margin
        return self._need(pool, expected).num_replicas

    def _role_changes(self, targets: dict[str, int]) -> tuple[RoleChange, ...]:
        """`targets` becomes what each pool needs after them."""
        may_change = self._now_s - self._state.last_role_change_s >= 2 * self._settings.breach_s
        changes, said = role_changes(self._snapshot.pools, targets, now_s=self._now_s, may_change=may_change)
        if changes:
            self._state = replace(self._state, last_role_change_s=self._now_s)
        self._decided += said
        return changes

    def _explain(self, pool: PoolState, wish: _Wish, wanted: int, granted: int) -> None:
        before, state = pool.target, self._state
        is_held_back = granted < wanted or wanted < wish.num_replicas
        if granted != before:
            reason, because = self._reason(pool, wish, wanted, granted)
            self._say(pool, before, granted, reason, because)
        elif is_held_back and pool.name not in state.held_back and wish.num_replicas > before:
            reason = ReasonCode.BUDGET if granted < wanted else ReasonCode.MAX
            what = "the GPU budget" if granted < wanted else "max_replicas"
            self._say(
                pool,
                before,
                granted,
                reason,
                f"{wish.num_replicas} are needed, {what} allows {granted}: {wish.because}",
            )
        names = state.held_back - {pool.name} if not is_held_back else state.held_back | {pool.name}
        self._state = replace(state, held_back=names)

    def _reason(self, pool: PoolState, wish: _Wish, wanted: int, granted: int) -> tuple[ReasonCode, str]:
        before = pool.target
        if granted < wanted:
            return ReasonCode.BUDGET, f"{wanted} are needed and the GPU budget allows {granted}: {wish.because}"
        if granted < before:
            if wish.reason is ReasonCode.TO_ZERO:
                return wish.reason, wish.because
            if before > pool.max_replicas:
                return ReasonCode.MAX, f"max_replicas is {pool.max_replicas}"
            forward = self._forward(pool, self._forecast.expected)
            quiet_s = self._state.damping.get(pool.name, Damping()).factor * self._settings.quiet_s
            return (
                ReasonCode.QUIET,
                f"{granted} were enough for {quiet_s:.0f} s: {forward.because}",
            )
        if before < pool.min_replicas:
            return ReasonCode.MIN, f"min_replicas is {pool.min_replicas}"
        if wish.num_replicas > granted:
            return wish.reason, f"{wish.num_replicas} are needed, max_replicas is {pool.max_replicas}: {wish.because}"
        return wish.reason, wish.because

    def _say(self, pool: PoolState, before: int, after: int, reason: ReasonCode, because: str) -> None:
        self._decided.append(
            Decided(
                time_s=self._now_s, pool=pool.name, before=before, after=after, reason=reason.value, sentence=because
            )
        )


def needed(pool: PoolState, rate: float, work: Work, slo: Slo, observed: Observed) -> Need:
    """Replicas of a pool for `rate` requests/s, by the step-time model, or where there is none by what was seen."""
    size = size_of(pool)
    return observed.need(pool, rate) if size is None else need(rate, work, size, slo, pool.role)


def attainment(outcomes: Counters) -> float | None:
    """Share of the requests that ended, and were not cancelled, within the objective."""
    num = outcomes.num_finished + outcomes.num_failed
    return outcomes.num_good / num if num else None


def is_breach(outcomes: Counters, settings: PolicySettings) -> bool:
    """Whether more were late than the objective allows and chance explains."""
    num = outcomes.num_finished + outcomes.num_failed
    num_allowed = num * (1 - settings.slo.target)
    num_late = num - outcomes.num_good
    return num >= settings.least_outcomes and num_late > num_allowed + BREACH_SIGMAS * math.sqrt(num_allowed)
