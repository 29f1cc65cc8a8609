"""How many replicas a rate of requests needs: Little's law over the step-time model's five numbers. Pure.

In steady state at r requests/s a replica runs n = r * output * step sequences, whose steps take overhead + max(weights,
n * token_s) + attention, and longer by the share of the time that prompts take.
Waiting for the first token is that of a queue with several servers (Sakasegawa 1977). Knows no clock and no past.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manta.cluster.routing.roles import Role
from manta.engine.step_costs import StepCosts

from .slo import Slo

TPOT_MARGIN = 0.85
"""A request's mean step may be so much of the limit: load differs from replica to replica and moment to moment."""
MOST_BUSY = 0.92
"""Share of the time that replicas may compute prompts, whatever the limit for the first token is."""
KV_SHARE, SEQS_SHARE = 0.85, 0.9
"""Of a replica's KV room and of its sequences that may be in use on average."""
MOST_REPLICAS = 1 << 16
MOST_RATE, RATE_STEPS = 1e9, 8
"""Requests/s beyond which nobody looks, and halvings until a rate is known well enough."""
TARGET_REACHED = 0.92
"""Share of such a target that full steps last: engines round up what they look up."""
SWEEPS = 3
"""Over what depends on the sequences that run, which depend on it."""


@dataclass(frozen=True)
class Work:
    """A mean request. Tokens."""

    num_new_tokens: float
    """Of the prompt, those that no cache has."""
    num_prompt_tokens: float
    num_output_tokens: float
    spread: float = 1.0
    """Variance of prompt lengths over their squared mean."""

    @property
    def num_kv_tokens(self) -> float:
        """That it holds on average while it decodes."""
        return self.num_prompt_tokens + self.num_output_tokens / 2


@dataclass(frozen=True)
class ReplicaSize:
    """What one replica is."""

    costs: StepCosts
    max_num_seqs: int
    kv_room_tokens: int
    """0: not known, never the limit."""
    tokens_a_step: int = 8192
    tpot_target_s: float | None = None
    """Steps with decodes take no more prompt tokens than keep them below it (engine/step_budget.py); None: no bound."""

    def holds(self, tpot_s: float) -> bool:
        """Whether no step is longer, whatever comes: prompts wait instead."""
        return self.tpot_target_s is not None and self.tpot_target_s <= tpot_s


@dataclass(frozen=True)
class Load:
    """Of one replica among some, in steady state. Infinite where there is none."""

    step_s: float
    num_running: float
    num_kv_tokens: float
    busy: float
    """Share of the time that prompts are computed."""
    ttft_s: float
    """At the objective's share of requests."""

    def limit(self, size: ReplicaSize, slo: Slo) -> str | None:
        """What keeps it from being within the objective (`ttft`, `tpot`, `kv_room`, `seqs`); None: nothing."""
        if not math.isfinite(self.step_s) or self.busy > MOST_BUSY:
            return "ttft"
        if slo.tpot_s is not None and self.step_s > TPOT_MARGIN * slo.tpot_s and not size.holds(slo.tpot_s):
            return "tpot"
        if size.kv_room_tokens and self.num_kv_tokens > KV_SHARE * size.kv_room_tokens:
            return "kv_room"
        if self.num_running > SEQS_SHARE * size.max_num_seqs:
            return "seqs"
        if slo.ttft_s is not None and self.ttft_s > slo.ttft_s:
            return "ttft"
        return None


NO_LOAD = Load(0.0, 0.0, 0.0, 0.0, 0.0)
OVERLOAD = Load(math.inf, math.inf, math.inf, math.inf, math.inf)


def load(rate: float, work: Work, size: ReplicaSize, slo: Slo, role: Role, *, num_replicas: int) -> Load:
    """Of each of `num_replicas` replicas with `rate` requests/s over all of them."""
    each = rate / num_replicas
    if each <= 0:
        return NO_LOAD
    costs = size.costs
    new, output = (work.num_new_tokens, work.num_output_tokens)
    if role is Role.PREFILL:
        output = 0.0
    elif role is Role.DECODE:
        new = 0.0
    second_moment = (1 + work.spread) * new * new
    start = max(work.num_prompt_tokens - work.num_new_tokens, 0.0)
    num_pairs = new * start + second_moment / 2
    prefill_work_s = new * costs.token_s + num_pairs * costs.pair_s
    num_chunks = max(1.0, new / size.tokens_a_step) if new else 0.0
    read_s = work.num_kv_tokens * costs.context_token_s
    step_s, num_running = costs.overhead_s + costs.weights_s, 0.0
    if output:
        for _ in range(SWEEPS):
            # A chunk takes its matrix products' time, less what reading the weights for the decodes takes anyway.
            hidden_s = num_chunks * max(costs.weights_s - num_running * costs.token_s, 0.0)
            share = each * max(prefill_work_s - hidden_s, 0.0)
            small = 1 - share - each * output * read_s
            large = 1 - each * prefill_work_s - each * output * (read_s + costs.token_s)
            if small <= 0 or large <= 0:
                return OVERLOAD
            step_s = max((costs.overhead_s + costs.weights_s) / small, costs.overhead_s / large)
            num_running = each * output * step_s
    else:
        num_running = each * prefill_work_s
    num_kv = num_running * (work.num_kv_tokens if output else work.num_prompt_tokens)
    # Decodes take their part of each step that a prompt is in.
    decode_s = num_running * (costs.token_s + read_s) if output else 0.0
    service_s = prefill_work_s + num_chunks * (costs.overhead_s + decode_s) if new else step_s
    if new and output and size.tpot_target_s is not None:
        # Of each full step, decodes take theirs; prompts get what is left.
        left = 1 - (costs.overhead_s + decode_s) / (TARGET_REACHED * size.tpot_target_s)
        service_s = max(service_s, prefill_work_s / left) if left > 0 else math.inf
    busy = each * service_s if new else 0.0
    if busy >= 1:
        return OVERLOAD
    # Prompts wait for prompts; there is one server a replica, and the router sends them where they wait least.
    waits = busy ** (math.sqrt(2 * (num_replicas + 1)) - 1)
    wait_s = service_s * (1 + work.spread) / 2 * waits / (num_replicas * (1 - busy))
    tail = math.log(1 / (1 - slo.target))
    longest_s = service_s * (1 + math.sqrt(work.spread))  # a prompt longer than the mean, as the tail has
    wait_tail_s = wait_s / waits * max(tail + math.log(waits), 0.0) if waits > 0 else 0.0
    return Load(step_s, num_running, num_kv, busy, 1.5 * step_s + longest_s + wait_tail_s)


@dataclass(frozen=True)
class Need:
    """How many replicas, and what asks for the last of them."""

    num_replicas: int
    limit: str | None
    """As in Load.limit; None when one replica has enough of everything."""
    load: Load
    """Of each of them."""


def held_rate(work: Work, size: ReplicaSize, slo: Slo, role: Role, *, num_replicas: int) -> float:
    """Requests/s that so many replicas hold within the objective; 0 without any, or where none is held."""
    if not num_replicas:
        return 0.0
    low, high = 0.0, 1.0
    while load(high, work, size, slo, role, num_replicas=num_replicas).limit(size, slo) is None and high < MOST_RATE:
        low, high = high, 2 * high
    for _ in range(RATE_STEPS):
        middle = (low + high) / 2
        is_held = load(middle, work, size, slo, role, num_replicas=num_replicas).limit(size, slo) is None
        low, high = (middle, high) if is_held else (low, middle)
    return low


def need(rate: float, work: Work, size: ReplicaSize, slo: Slo, role: Role) -> Need:
    """The fewest replicas within the objective. 1 where no number is (then `limit` says why): an objective that an
    idle replica misses is no reason to start others without end."""
    idle = load(1e-9, work, size, slo, role, num_replicas=1).limit(size, slo)
    if idle is not None:
        slo = Slo(target=slo.target)  # as many as hold the load, at least

    def limit_with(num: int) -> str | None:
        return load(rate, work, size, slo, role, num_replicas=num).limit(size, slo)

    low, high, last = 0, 1, None
    while (found := limit_with(high)) is not None and high < MOST_REPLICAS:
        low, high, last = high, 2 * high, found
    while high - low > 1:
        middle = (low + high) // 2
        found = limit_with(middle)
        if found is None:
            high = middle
        else:
            low, last = middle, found
    return Need(high, last or idle, load(rate, work, size, slo, role, num_replicas=high))
