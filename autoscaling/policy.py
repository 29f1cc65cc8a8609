"""How many replicas each pool should have, and why: `decide` is pure. Knows no clock, no randomness, no Ray.

Forward: expected arrivals through the step-time model (capacity.py). Back: observed load against the model's, lateness
against the objective, backlog. Up at once; down after a quiet window and never while requests are late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manta.cluster.scaling import Decided, ReasonCode

from .budget import fit_into
from .damping import Damping
from .error_budget import ErrorBudget
from .floor import Floor
from .forecast import LONG_S, Bursts, Samples, forecast
from .observed import Observed, Trail
from .outlook import Outlook, attainment, is_breach
from .policy_settings import PolicySettings
from .role_changes import RoleChange, role_changes
from .signals import FleetSnapshot, PoolState
from .wishes import Wish, backlog, breach, forward, held_each, recurring

HELD_WINDOWS = 10
"""Times that over which lateness is looked at: so long it must have been within the objective to be held."""
PATIENCE = 0.25
"""Of a cold start: so long more must be asked for by the forecast, where the error budget pays for waiting."""


SUDDEN = (ReasonCode.BURST, ReasonCode.BACKLOG)
"""What came for these may go sooner than what came for a load that grew."""
LULL_S = 10.0
"""After so long a burst is another one."""
LASTING = 2.0
"""Starts: what came for a burst must have been needed for so long; shorter ones are seldom alone."""


@dataclass(frozen=True)
class Came:
    """The last rise of a target: why, and from when until when most of the target was last needed without a lull."""

    reason: ReasonCode
    since_s: float
    needed_s: float

    def needed(self, now_s: float) -> Came:
        """It is needed now."""
        return replace(self, since_s=now_s if now_s - self.needed_s > LULL_S else self.since_s, needed_s=now_s)


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
    error_budget: ErrorBudget = field(default_factory=ErrorBudget)
    damping: Mapping[str, Damping] = field(default_factory=dict)
    """By pool."""
    hurry: Mapping[str, Damping] = field(default_factory=dict)
    """The same over a shorter time, with what backlogs ask for."""
    floors: Mapping[str, Floor] = field(default_factory=dict)
    """By pool: what bursts that come back ask for."""
    starting_since_s: Mapping[str, float] = field(default_factory=dict)
    """By pool, where replicas start: when the first of them began."""
    short_since_s: Mapping[str, float] = field(default_factory=dict)
    """By pool: since when the forecast has asked for more than there is."""
    begun_s: float | None = None
    last_work_s: float | None = None
    """When something was last there to do."""
    last_breach_s: float | None = None
    came: Mapping[str, Came] = field(default_factory=dict)
    """By pool: the last rise of the target."""
    last_backlog_s: Mapping[str, float] = field(default_factory=dict)
    """By pool: when a backlog last asked for more than anything else."""
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


class _Deciding:
    """One decision."""

    def __init__(self, settings: PolicySettings, state: PolicyState, snapshot: FleetSnapshot, now_s: float) -> None:
        self._settings, self._snapshot, self._now_s = settings, snapshot, now_s
        self._before = state.observed.num_ready
        self._state, self._outlook = _learn(settings, state, snapshot, now_s)
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
            level_requests_s=self._outlook.forecast.level,
            forecast_requests_s=self._outlook.expected,
            attainment=attainment(self._outlook.recent),
            gpus_wanted=gpus_wanted,
        )
        return self._state, decision

    def _notice_work_and_breach(self) -> None:
        snapshot, state = self._snapshot, self._state
        under_way = snapshot.num_held + sum(pool.num_running + pool.num_waiting for pool in snapshot.pools)
        samples = state.samples
        has_arrived = len(samples.counts) > 1 and samples.counts[-1] > samples.counts[-2]
        self._has_work = bool(under_way or has_arrived)
        if self._has_work or state.last_work_s is None:
            state = replace(state, last_work_s=self._now_s)
        if is_breach(self._outlook.since_settled, self._settings):
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

    def _wish(self, pool: PoolState) -> Wish:
        """What is needed, with no damping."""
        settings, snapshot, outlook, state = self._settings, self._snapshot, self._outlook, self._state
        assert state.last_work_s is not None
        idle_s = self._now_s - state.last_work_s
        if pool.min_replicas == 0 and pool.target and idle_s >= settings.to_zero_s:
            return Wish(0, ReasonCode.TO_ZERO, f"no request came for {idle_s:.0f} s")
        if not pool.target:
            if not self._has_work:
                return Wish(0, ReasonCode.TO_ZERO, "nothing asks for it")
            base = Wish(1, ReasonCode.FROM_ZERO, f"{snapshot.num_held} requests wait where no replica is")
        else:
            base = Wish(1, ReasonCode.QUIET, "one is enough")
        ahead = forward(outlook, pool)
        floor = self._floor(pool, ahead.num_replicas)
        wishes = [base, self._patient(pool, ahead), backlog(outlook, pool), breach(outlook, pool)]
        wishes.append(recurring(floor, settings.slo))
        return max(wishes, key=lambda wish: wish.num_replicas)  # the first of equals

    def _floor(self, pool: PoolState, followed: int) -> Floor:
        """What was learned of bursts, after one more look."""
        outlook, floor = self._outlook, self._state.floors.get(pool.name, Floor())
        rate_each = held_each(outlook, pool)
        if rate_each:
            floor = floor.learn(
                self._snapshot.counters.num_arrived,
                followed,
                self._now_s,
                rate_each=rate_each,
                most=pool.max_replicas,
                is_burst=self._state.bursts.are_lately(self._now_s),
                cold_start_s=outlook.cold_start_s,
                settings=self._settings,
            )
            self._state = replace(self._state, floors={**self._state.floors, pool.name: floor})
        return floor

    def _patient(self, pool: PoolState, wish: Wish) -> Wish:
        """What the forecast asks for, once it has asked for more for long enough: a rate that is above the threshold
        for a moment is no reason to start a replica, as long as the error budget pays for those that come late."""
        now_s, outlook = self._now_s, self._outlook
        is_short = wish.num_replicas > pool.target
        since_s = self._state.short_since_s.get(pool.name, now_s) if is_short else now_s
        self._state = replace(self._state, short_since_s={**self._state.short_since_s, pool.name: since_s})
        waits = now_s - since_s < PATIENCE * outlook.saved * outlook.cold_start_s
        if is_short and waits and not outlook.forecast.is_burst:
            return Wish(pool.target, wish.reason, wish.because)
        return wish

    def _damped(self, pool: PoolState, wish: Wish) -> int:
        """Up at once; down to the most that was needed in the quiet window, and not while requests are late."""
        settings, now_s = self._settings, self._now_s
        wanted = wish.num_replicas
        if wish.reason is ReasonCode.TO_ZERO:
            return 0
        to_keep = wanted
        if wanted < pool.target:  # near a threshold, what is there stays
            to_keep = min(pool.target, max(wanted, self._num_to_keep(pool)))
        came = self._state.came.get(pool.name)
        if came is not None and 2 * to_keep >= pool.target:
            self._state = replace(self._state, came={**self._state.came, pool.name: came.needed(now_s)})
        hurry = self._state.hurry.get(pool.name, Damping()).need(to_keep, now_s, quiet_s=self._surplus_s(pool, wish))
        if wish.reason is ReasonCode.BACKLOG:
            to_keep = min(to_keep, max(self._num_to_keep(pool), 1))
            self._state = replace(self._state, last_backlog_s={**self._state.last_backlog_s, pool.name: now_s})
        least = self._least_window(pool)
        damping = self._state.damping.get(pool.name, Damping())
        damping = damping.need(to_keep, now_s, quiet_s=settings.quiet_s, least=least)
        if wanted >= pool.target:
            target = min(wanted, pool.max_replicas)
            if target > pool.target:
                damping = damping.rose(now_s, quiet_s=settings.quiet_s, least=least)
                came = Came(wish.reason, now_s, now_s)
                self._state = replace(self._state, came={**self._state.came, pool.name: came})
        else:
            begun_s = self._state.begun_s
            is_known = begun_s is not None and now_s - begun_s >= settings.quiet_s
            may_fall = is_known and not self._is_late(pool)
            target = min(max(damping.most, hurry.most), pool.target) if may_fall else pool.target
            if target < pool.target:
                damping = damping.fell(now_s)
        self._state = replace(
            self._state,
            damping={**self._state.damping, pool.name: damping},
            hurry={**self._state.hurry, pool.name: hurry},
        )
        return min(max(target, pool.min_replicas), pool.max_replicas)

    def _least_window(self, pool: PoolState) -> float:
        """The window where no fall was regretted, over the usual one: shorter for what came for a burst that lasted.
        The falls of a load that grew are seldom for long, and short bursts seldom alone."""
        came = self._state.came.get(pool.name)
        if came is None or came.reason not in SUDDEN:
            return 1.0
        has_lasted = came.needed_s - came.since_s >= LASTING * self._outlook.cold_start_s
        return self._settings.burst_window if has_lasted else 1.0

    def _surplus_s(self, pool: PoolState, wish: Wish) -> float:
        """So long stays what a backlog asked for: once nobody waits, as long as one may take to be worked off. While it
        lasts, while replicas start and where bursts come back, as long as a start takes."""
        if wish.reason is ReasonCode.BACKLOG or pool.num_starting or self._is_regretted(pool):
            return self._outlook.cold_start_s
        return min(self._outlook.drain_s, self._outlook.cold_start_s)

    def _is_late(self, pool: PoolState) -> bool:
        """Whether requests were late not long ago that came to as many replicas as there are now; where bursts come
        back, to however many."""
        state = self._state
        breach_s = state.last_breach_s
        if breach_s is None or self._now_s - breach_s >= self._settings.quiet_s / 2:
            return False
        return breach_s >= state.observed.size_changed_s or self._is_regretted(pool)

    def _is_regretted(self, pool: PoolState) -> bool:
        return self._state.damping.get(pool.name, Damping()).is_regretted(self._now_s)

    def _num_to_keep(self, pool: PoolState) -> int:
        return self._outlook.num_to_keep(pool, trusts_budget=not self._is_regretted(pool))

    def _role_changes(self, targets: dict[str, int]) -> tuple[RoleChange, ...]:
        """`targets` becomes what each pool needs after them."""
        may_change = self._now_s - self._state.last_role_change_s >= 2 * self._settings.breach_s
        changes, said = role_changes(self._snapshot.pools, targets, now_s=self._now_s, may_change=may_change)
        if changes:
            self._state = replace(self._state, last_role_change_s=self._now_s)
        self._decided += said
        return changes

    def _explain(self, pool: PoolState, wish: Wish, wanted: int, granted: int) -> None:
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

    def _reason(self, pool: PoolState, wish: Wish, wanted: int, granted: int) -> tuple[ReasonCode, str]:
        before = pool.target
        if granted < wanted:
            return ReasonCode.BUDGET, f"{wanted} are needed and the GPU budget allows {granted}: {wish.because}"
        if granted < before:
            if wish.reason is ReasonCode.TO_ZERO:
                return wish.reason, wish.because
            if before > pool.max_replicas:
                return ReasonCode.MAX, f"max_replicas is {pool.max_replicas}"
            quiet_s = max(self._state.damping[pool.name].factor, self._least_window(pool)) * self._settings.quiet_s
            found = wish if wish.reason is ReasonCode.RECURRING else forward(self._outlook, pool)
            is_surplus = self._now_s - self._state.last_backlog_s.get(pool.name, -math.inf) < quiet_s
            when = "are enough, what waited is worked off" if is_surplus else f"were enough for {quiet_s:.0f} s"
            because = f"{granted} {when}: {found.because}"
            if granted < self._outlook.num_to_keep(pool, trusts_budget=False):
                because += f"; {self._outlook.late_left:.0f} requests may still be late, which pays for trying"
            return ReasonCode.QUIET, because
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


def _learn(
    settings: PolicySettings, state: PolicyState, snapshot: FleetSnapshot, now_s: float
) -> tuple[PolicyState, Outlook]:
    """What is known after one more look."""
    cold_start_s = settings.cold_start_s if snapshot.cold_start_s is None else snapshot.cold_start_s
    long_s = HELD_WINDOWS * settings.breach_s
    samples = state.samples.add(now_s, snapshot.counters.num_arrived)
    trail = state.trail.add(now_s, snapshot.counters, keep_s=long_s)
    # Bursts for which replicas are held ask for no others.
    is_held = any(floor.num_replicas(settings.slo) for floor in state.floors.values())
    bursts = replace(state.bursts, lasting=0.0) if is_held else state.bursts
    found = forecast(samples, bursts, horizon_s=cold_start_s, patience_s=settings.slo.ttft_s or 0.0)
    # While a rate jumps, what runs does not belong to it yet.
    observed = state.observed.learn(snapshot, 0.0 if found.is_burst else found.recent, settings.slo, now_s)
    error_budget = state.error_budget.learn(snapshot.counters, now_s)
    starting = [pool.name for pool in snapshot.pools if pool.num_starting]
    starting_since_s = {name: state.starting_since_s.get(name, now_s) for name in starting}
    # What was late before all replicas were there says nothing about whether they are enough.
    settled_s = observed.size_changed_s + settings.breach_s / 4
    outlook = Outlook(
        settings=settings,
        snapshot=snapshot,
        now_s=now_s,
        cold_start_s=cold_start_s,
        forecast=found,
        steady_rate=samples.rate(LONG_S),
        observed=observed,
        starting_since_s=starting_since_s,
        error_budget=error_budget,
        recent=trail.since(now_s - settings.breach_s),
        since_settled=trail.since(max(now_s - settings.breach_s, settled_s)),
        long_settled=trail.since(max(now_s - long_s, settled_s)),
    )
    learned = replace(
        state,
        samples=samples,
        bursts=state.bursts.learn(found, now_s, horizon_s=cold_start_s),
        trail=trail,
        observed=observed,
        error_budget=error_budget,
        starting_since_s=starting_since_s,
        begun_s=now_s if state.begun_s is None else state.begun_s,
    )
    return learned, outlook
