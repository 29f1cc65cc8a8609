"""What one decision goes by: what is expected, what was seen, how much of a reserve that asks for. Pure.

The reserve is for what forecast and model do not know. The more of the error budget is saved, which pays for being
wrong, the smaller it is; where all is saved, replicas may be fewer than the model says, by as much as it pays for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .capacity import Need, Work, load, need
from .error_budget import ErrorBudget
from .forecast import Forecast
from .observed import Observed, size_of
from .policy_settings import PolicySettings
from .signals import Counters, FleetSnapshot, PoolState

HELD_MARGIN = 1.05
"""Replicas that hold the objective are believed to hold so many times the rate at which they do."""
BREACH_SIGMAS = 2.0
"""Late requests beyond what the objective allows that may be chance, in standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Of one moment; a value."""

    settings: PolicySettings
    snapshot: FleetSnapshot
    now_s: float
    cold_start_s: float
    forecast: Forecast
    steady_rate: float | None
    """Requests/s over the longest window; None: not known yet."""
    observed: Observed
    starting_since_s: Mapping[str, float]
    """By pool, where replicas start: when the first of them began."""
    error_budget: ErrorBudget
    recent: Counters
    """What came and ended in the last minute or so."""
    since_settled: Counters
    """The same, after the number of replicas last changed."""
    long_settled: Counters
    """Over a longer time, after the number of replicas last changed."""

    @property
    def expected(self) -> float:
        """Requests/s when a replica that starts now is ready."""
        return self.forecast.expected

    @property
    def work(self) -> Work:
        """A mean request."""
        return self.observed.work or self.settings.usual

    def ready_in_s(self, pool: PoolState) -> float:
        """Until another replica is there: the first of those that start, or one that starts now."""
        since_s = self.starting_since_s.get(pool.name, self.now_s)
        return max(self.cold_start_s - (self.now_s - since_s), 0.0)

    @property
    def drain_s(self) -> float:
        """So long a backlog may take to be worked off."""
        return max(self.settings.drain_backlog_s, self.settings.slo.ttft_s or 0.0)

    @cached_property
    def late_left(self) -> float:
        """Requests that may be late and the objective is still kept."""
        return self.error_budget.left(self.settings.slo)

    @cached_property
    def saved(self) -> float:
        """Of what a wrong guess costs, the share that the error budget can pay."""
        return self.error_budget.share(self.settings.slo, self.forecast.level, self.cold_start_s)

    def rate_to_hold(self, pool: PoolState) -> float:
        """Requests/s that the pool is to have replicas for: those expected, with a reserve or on credit.

        What a rate gains lessens the credit as well: who is wrong while it rises is more wrong a moment later. Without
        a model there is none: nobody knows what a guess costs.
        """
        headroom, saved = self.settings.headroom, self.saved
        if headroom <= 1 or pool.step_costs is None:
            return self.expected * headroom
        level = self.forecast.level
        credit = level * (1 - 1 / self._most_overload**saved) - (self.expected - level)
        return self.expected * headroom ** (1 - saved) - max(credit, 0.0)

    @property
    def _most_overload(self) -> float:
        """Rate over what replicas hold that the error budget pays for, if it takes a cold start to notice it.

        At a share e too much, waiting grows by e seconds a second, so that requests are late from ttft / e on.
        """
        slo, level = self.settings.slo, self.forecast.level
        if slo.ttft_s is None or level <= 0:
            return self.settings.headroom
        unpaid_s = self.cold_start_s - self.late_left / level
        return min(1 + slo.ttft_s / max(unpaid_s, slo.ttft_s), self.settings.headroom)

    def need(self, pool: PoolState, rate: float) -> Need:
        """For `rate` requests/s, by the model, or where there is none by what replicas were seen to hold."""
        rate, size = rate * self.observed.correction_of(pool.role), size_of(pool)
        if size is None:
            return self.observed.need(pool, rate)
        return need(rate, self.work, size, self.settings.slo, pool.role)

    def num_to_keep(self, pool: PoolState, *, trusts_budget: bool) -> int:
        """Replicas of which none may stop. Without trust in what is saved, by the full reserve and a margin."""
        settings = self.settings
        factor = settings.headroom * settings.down_margin
        rate = self.expected * factor
        # In a large fleet a replica is less than the reserve, which is not worth a try.
        if trusts_budget and pool.step_costs is not None and pool.target * (factor - 1) < 1:
            # Half the overload is kept for the time after: who fell does not rise for the next few requests.
            margin = settings.down_margin ** (1 - self.saved) * self._most_overload ** (self.saved / 2)
            rate = self.rate_to_hold(pool) * margin
        return self.need(pool, rate).num_replicas

    def is_held(self, pool: PoolState, found: Need) -> bool:
        """Whether what is there was seen to hold the objective at the rate that is expected: then the model of times,
        and a reserve for what it does not know, have no say, unless it says that so much cannot be served at all."""
        settings, recent, size = self.settings, self.long_settled, size_of(pool)
        if found.limit not in ("ttft", "tpot") or size is None:
            return False
        modelled = load(self.expected, self.work, size, settings.slo, pool.role, num_replicas=pool.target)
        if not math.isfinite(modelled.ttft_s):
            return False
        rate = self.steady_rate
        if rate is None or self.expected > HELD_MARGIN * rate or recent.num_finished < 1 / (1 - settings.slo.target):
            return False
        return not is_breach(recent, settings) and not is_breach(self.since_settled, settings)

    @property
    def can_pay_lateness(self) -> bool:
        """Whether the error budget lasts until another replica would have come and been judged, if requests go on
        being late as they were in the last minute."""
        recent, breach_s = self.recent, self.settings.breach_s
        num_late = recent.num_finished + recent.num_failed - recent.num_good
        return num_late / breach_s * (self.cold_start_s + breach_s) < self.late_left


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
