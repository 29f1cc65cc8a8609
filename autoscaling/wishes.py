"""How many replicas of a pool forecast, backlog and breach each ask for. Pure; knows no damping and no limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import ReasonCode

from .capacity import held_rate
from .floor import Floor
from .observed import size_of
from .outlook import Outlook, attainment, is_breach
from .signals import PoolState
from .slo import Slo

USUAL_WAIT = 0.25
"""Of the limit for the first token: requests that came within so long may wait, and nothing is wrong."""
BACKLOG_PAID = 0.5
"""Of the late requests that the error budget has left, so many may wait and ask for nothing: the others are for what
comes until it shows that they are not worked off."""


@dataclass(frozen=True)
class Wish:
    """Replicas, and why so many."""

    num_replicas: int
    reason: ReasonCode
    because: str


def forward(outlook: Outlook, pool: PoolState) -> Wish:
    """By the model, or without one by what replicas were seen to hold."""
    found, work, forecast = outlook.need(pool, outlook.rate_to_hold(pool)), outlook.work, outlook.forecast
    if pool.num_ready == pool.target < found.num_replicas and outlook.is_held(pool, found):
        return Wish(pool.target, ReasonCode.FORECAST, f"{pool.target} hold the objective")
    code = ReasonCode.BURST if forecast.is_burst else ReasonCode.FORECAST
    if found.limit == "kv_room":
        code = ReasonCode.KV_ROOM
    limit = {None: "one replica holds it", "ttft": "time to first token", "tpot": "time per output token",
             "kv_room": "room in the KV cache", "seqs": "sequences a replica"}[found.limit]  # fmt: skip
    because = (
        f"{forecast.expected:.3g} requests/s of {work.num_prompt_tokens:.0f} + {work.num_output_tokens:.0f} "
        f"tokens are expected in {outlook.cold_start_s:.0f} s (now {forecast.level:.3g}/s); limit: {limit}"
    )
    return Wish(found.num_replicas, code, because)


def backlog(outlook: Outlook, pool: PoolState) -> Wish:
    """To work off what waits while more comes."""
    nothing = Wish(0, ReasonCode.BACKLOG, "")
    settings, expected = outlook.settings, outlook.expected
    num_waiting = outlook.snapshot.num_held + pool.num_waiting
    if pool.role is Role.DECODE:
        num_waiting = pool.num_waiting
    # Some always wait for their first step, and more where the first token may take longer.
    ttft_s = settings.slo.ttft_s or 1.0
    num_waiting -= math.ceil(expected * USUAL_WAIT * ttft_s) + pool.num_ready
    if num_waiting <= 0:
        return nothing
    size, ahead_s = size_of(pool), outlook.ready_in_s(pool)
    if size is not None and outlook.observed.work is not None:  # a guessed request says nothing about what is held
        held = held_rate(outlook.work, size, settings.slo, pool.role, num_replicas=pool.num_ready)
        num_waiting += round((expected - held / outlook.observed.correction_of(pool.role)) * ahead_s)
        if num_waiting <= 0:
            return nothing  # worked off before another replica could be there
    if num_waiting < outlook.saved * min(BACKLOG_PAID * outlook.late_left, expected * ttft_s):
        return nothing
    found = outlook.need(pool, expected + num_waiting / outlook.drain_s)
    because = f"{num_waiting} requests wait beyond the usual, or will in {ahead_s:.0f} s"
    return Wish(found.num_replicas, ReasonCode.BACKLOG, because)


def breach(outlook: Outlook, pool: PoolState) -> Wish:
    """One in eight more, each time that all of them have come and requests are still late."""
    nothing, recent, settings = Wish(0, ReasonCode.BREACH, ""), outlook.since_settled, outlook.settings
    if pool.num_starting or pool.num_ready < pool.target or not is_breach(recent, settings):
        return nothing
    is_prefill, is_decode = pool.role is Role.PREFILL, pool.role is Role.DECODE
    if (is_prefill and not recent.num_late_ttft + recent.num_failed) or (is_decode and not recent.num_late_tpot):
        return nothing
    if outlook.can_pay_lateness:
        return nothing
    if 2 * outlook.num_to_keep(pool, trusts_budget=False) <= pool.num_ready and not pool.num_waiting:
        return nothing  # there is plenty: what was late has another cause, or waited before
    share = attainment(recent)
    because = f"only {share:.1%} of the last requests were within the objective, {settings.slo.target:.1%} should be"
    return Wish(pool.num_ready + max(1, pool.num_ready // 8), ReasonCode.BREACH, because)


def held_each(outlook: Outlook, pool: PoolState) -> float:
    """Requests/s whose prompts a replica can compute, however long they wait; 0: not known, or it computes none."""
    size, work = size_of(pool), outlook.observed.work
    if size is None or work is None or pool.role is Role.DECODE:
        return 0.0
    return held_rate(work, size, replace(outlook.settings.slo, ttft_s=None), pool.role, num_replicas=1)


def recurring(floor: Floor, slo: Slo) -> Wish:
    """Those that are held for bursts that come back."""
    num = floor.num_replicas(slo)
    if not num:
        return Wish(0, ReasonCode.RECURRING, "")
    because = (
        f"{num} are held for bursts that come back and are over before a replica starts: {num - 1} would have made "
        f"{floor.num_late(num - 1):.0f} of the last {floor.num_arrived:.0f} requests late, the worst burst left out"
    )
    return Wish(num, ReasonCode.RECURRING, because)
