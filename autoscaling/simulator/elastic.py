"""A fleet that grows and shrinks as a policy says: cold starts, drains, failures, held requests. Knows no policy.

Replicas are quick ones (quick.py), edges are one, which sends a request to the replica with the least cost. Every
period the policy sees the same snapshot as on a cluster, and what it wants comes true a little later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from manta.autoscaling.policy import Decision
from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Decided

from .elastic_pool import ColdStart, Member, MemberState, PoolKind, PoolMembers
from .elastic_run import ElasticRun, ElasticSettings, Failure, Served
from .events import ARRIVES, EventQueue
from .handoff import KvLink
from .policies import ScalingPolicy
from .quick import Job
from .quick_cache import FleetIndex
from .sightings import Sightings
from .workload import SimRequest

__all__ = ["ColdStart", "ElasticFleet", "ElasticRun", "ElasticSettings", "Failure", "PoolKind", "Served"]

AHEAD_SHARE = 4
"""Of a replica's sequences, the part that may wait there; more wait at the edge, for whoever has room first."""
LEAST_AHEAD = 16


class _Held(NamedTuple):
    served: Served
    num_done: int
    """Tokens that were generated of it, elsewhere."""
    since_s: float


class ElasticFleet:
    """One model's pools, from `run` on."""

    def __init__(self, pools: Sequence[PoolKind], settings: ElasticSettings, *, link: KvLink | None = None) -> None:
        """One pool of mixed replicas, or one of each other role; `link` is between those."""
        self.events = EventQueue()
        self.index = FleetIndex()
        self.settings = settings
        self._link = link or KvLink()
        self._rng = random.Random(settings.seed)
        self._sightings = Sightings(settings.slo)
        self._pools = {kind.name: PoolMembers(kind) for kind in pools}
        self._routed: dict[Role, list[Member]] = {role: [] for role in Role}
        """Ready members by the role they have now."""
        self._is_split = all(kind.role is not Role.MIXED for kind in pools)
        self._held: deque[_Held] = deque()
        self._waits_decode: deque[tuple[Served, int]] = deque()
        """Requests whose prompts are computed and for which no decode replica is there."""
        self._num_members = 0
        self._gpu_s = 0.0
        self._num_role_changes = 0
        self._startups: list[dict[str, float]] = []
        self._num_open = 0
        self._num_starts = 0
        self._decided: list[Decided] = []
        self._targets: dict[str, list[tuple[float, int]]] = {name: [] for name in self._pools}

    def run(
        self, requests: Sequence[SimRequest], policy: ScalingPolicy, *, num_initial: Mapping[str, int]
    ) -> ElasticRun:
        """All requests, in order of arrival, to their ends. `num_initial` replicas of each pool are ready at the
        beginning."""
        for name, pool in self._pools.items():
            for _ in range(num_initial.get(name, pool.kind.min_replicas)):
                self._ready(self._new_member(pool))
            pool.target = len(pool.members)
            self._targets[name].append((0.0, pool.target))
        served = [Served(request) for request in requests]
        self._num_open = len(served)
        self._arrivals = iter(served)
        self._await_arrival()
        self._policy, self._state = policy, policy.initial()
        self.events.at(0.0, self._tick)
        for failure in self.settings.failures:
            self.events.at(failure.at_s, lambda failure=failure: self._fail(failure))
        self.events.run()
        end_s = self.events.now_s
        gpu_s = self._gpu_s + sum(
            (end_s - one.born_s) * pool.kind.gpus_per_replica for pool in self._pools.values() for one in pool.members
        )
        return ElasticRun(
            served,
            gpu_s,
            self._sightings.samples,
            self._decided,
            self._targets,
            end_s,
            self.events.num_events,
            self._num_starts,
            self._num_role_changes,
            self._startups,
        )

    def _await_arrival(self) -> None:
        served = next(self._arrivals, None)
        if served is not None:
            self.events.at(served.request.arrival_s, lambda: self._arrive(served), order=ARRIVES)

    def _arrive(self, served: Served) -> None:
        self._await_arrival()
        self._sightings.arrived(served.request)
        if self._held or not self._place(served, 0):
            if len(self._held) >= self.settings.max_held:
                self._refuse(served)
            else:
                self._held.append(_Held(served, 0, self.events.now_s))

    def _place(self, served: Served, num_done: int) -> bool:
        """Send a request, of which so many tokens were generated, where it costs least; False when none has room."""
        role = Role.PREFILL if self._is_split and not num_done else Role.DECODE if self._is_split else Role.MIXED
        members = self._routed[role] or (self._routed[Role.DECODE] if self._is_split else ())
        if not members:
            return False
        request = served.request
        member = self._cheapest(members, request)
        if member.num_waiting >= member.max_ahead:
            return False
        num_output = request.num_output_tokens - num_done
        if member.role is Role.PREFILL:
            num_output = 1
        job = Job(served, request.num_prompt_tokens + num_done, num_output, hashes=request.block_hashes)
        served.replica = member.number
        member.submit(job)
        return True

    def _cheapest(self, members: Sequence[Member], request: SimRequest) -> Member:
        best = min(members, key=_COST)
        found = self.index.match(request.block_hashes) if request.block_hashes else None
        if not found:
            return best
        costs = best.kind.costs
        size, token_s = best.kind.spec.block_size, costs.token_s
        # A prompt that is computed again delays those behind it, the more of the replicas have prompts waiting.
        if members[0].num_waiting_tokens or best.num_waiting_tokens:
            busy = sum(1 for member in members if member.num_waiting_tokens) / len(members)
            token_s *= 1.0 + 4.0 * busy
        least = best.cost_s
        for bits, num_blocks in found:
            for member in members:
                if bits >> member.number & 1:
                    cost_s = member.cost_s - num_blocks * size * token_s
                    if cost_s < least:
                        best, least = member, cost_s
        return best

    def _first(self, member: Member, job: Job) -> None:
        served = job.owner
        assert isinstance(served, Served)
        if served.first_s is None:
            served.first_s = self.events.now_s
            served.num_cached = job.num_cached
            self._sightings.began(job.num_cached)
        if self._held:
            self._retry()

    def _end(self, member: Member, job: Job) -> None:
        served = job.owner
        assert isinstance(served, Served)
        request = served.request
        done = job.num_prompt + job.num_output - request.num_prompt_tokens
        if done < request.num_output_tokens:
            self._hand_over(served, done)
        else:
            served.finished_s = self.events.now_s
            self._sightings.finished(request.num_output_tokens, served.ttft_s, served.tpot_s)
            self._num_open -= 1
        if member.state is MemberState.DRAINING and member.is_idle:
            self._drained(member)
        if self._held:
            self._retry()

    def _hand_over(self, served: Served, num_done: int) -> None:
        """The prompt's KV moves to a decode replica, the last layers' after they were computed."""
        if not self._routed[Role.DECODE]:
            self._waits_decode.append((served, num_done))
            return
        link, num_tokens = self._link, served.request.num_prompt_tokens
        member = min(self._routed[Role.DECODE], key=_COST)
        moved_s = link.latency_s + link.tail * num_tokens * link.bytes_per_token / link.bytes_per_s
        job = Job(
            served,
            num_tokens + num_done,
            served.request.num_output_tokens - num_done,
            num_cached=num_tokens + num_done - 1,
        )
        served.replica = member.number
        member.num_coming += 1

        def begin() -> None:
            member.num_coming -= 1
            if member.state is MemberState.GONE or member.role is Role.PREFILL:
                self._again(served, num_done)
            else:
                member.submit(job)

        self.events.at(self.events.now_s + moved_s, begin, order=ARRIVES)

    def _again(self, served: Served, num_done: int) -> None:
        """A request has lost its replica: elsewhere, before those that came after it."""
        served.num_moves += 1
        if not self._place(served, num_done):
            self._held.appendleft(_Held(served, num_done, self.events.now_s))

    def _retry(self) -> None:
        while self._held and self._place(self._held[0].served, self._held[0].num_done):
            self._held.popleft()

    def _refuse(self, served: Served) -> None:
        served.is_failed = True
        self._num_open -= 1
        self._sightings.failed()

    def _tick(self) -> None:
        now_s, settings = self.events.now_s, self.settings
        if not self._num_open:
            return
        while self._held and now_s - self._held[0].since_s > settings.max_hold_s:
            self._refuse(self._held.popleft().served)
        pools = list(self._pools.values())
        snapshot = self._sightings.snapshot(
            now_s, pools, len(self._held) + len(self._waits_decode), settings.gpu_budget
        )
        self._state, decision = self._policy.decide(self._state, snapshot, now_s)
        self._sightings.sample(now_s, pools, len(self._held), decision.forecast_requests_s)
        self._decided.extend(decision.decided)
        for name, target in decision.targets.items():
            if target != self._pools[name].target:
                self._pools[name].target = target
                self._targets[name].append((now_s, target))
        self.events.at(now_s + settings.delay_s, lambda: self._apply(decision))
        self.events.at(now_s + settings.period_s, self._tick)

    def _apply(self, decision: Decision) -> None:
        for change in decision.role_changes:
            self._change_roles(self._pools[change.pool], change.role, change.num_replicas)
        for name, target in decision.targets.items():
            pool = self._pools[name]
            wanted = min(max(target, pool.kind.min_replicas), pool.kind.max_replicas)
            for _ in range(wanted - pool.num_active):
                self._start(pool)
            for _ in range(pool.num_active - wanted):
                self._stop(pool.to_stop())

    def _start(self, pool: PoolMembers) -> None:
        member = self._new_member(pool)
        phases = pool.kind.cold_start.draw(self._rng)
        self._num_starts += 1

        def is_up() -> None:
            if member.state is MemberState.STARTING:
                self._startups.append(phases)
                pool.startup_s = sum(phases.values())
                self._ready(member)

        self.events.at(self.events.now_s + sum(phases.values()), is_up, order=ARRIVES)

    def _new_member(self, pool: PoolMembers) -> Member:
        number, kind = self._num_members, pool.kind
        self._num_members += 1
        member = Member(
            number, kind, self.events, self.index, on_first=lambda job: self._first(member, job),
            on_end=lambda job: self._end(member, job),
        )  # fmt: skip
        member.max_ahead = max(kind.spec.max_num_seqs // AHEAD_SHARE, LEAST_AHEAD)
        pool.members.append(member)
        return member

    def _ready(self, member: Member) -> None:
        member.state = MemberState.READY
        self._routed[member.role].append(member)
        while self._waits_decode and member.role.can_decode:
            self._hand_over(*self._waits_decode.popleft())
        self._retry()

    def _stop(self, member: Member) -> None:
        """Drain it; one that starts is gone at once."""
        if member.state is MemberState.READY:
            self._routed[member.role].remove(member)
        is_up, member.state = member.state is MemberState.READY, MemberState.DRAINING
        if not is_up or member.is_idle:
            self._drained(member)
        else:
            self._end_grace(member)

    def _end_grace(self, member: Member) -> None:
        def move() -> None:
            if member.state is MemberState.DRAINING and member.has_drained_since(began_s):
                self._move_jobs(member)
                self._drained(member)

        member.draining_since_s = began_s = self.events.now_s
        self.events.at(self.events.now_s + self.settings.drain_grace_s, move)

    def _drained(self, member: Member) -> None:
        """A replica that drained leaves, or takes its new role."""
        if member.next_role is not None:
            member.role, member.next_role = member.next_role, None
            self._ready(member)
            return
        member.state = MemberState.GONE
        pool = self._pools[member.pool]
        pool.members.remove(member)
        if member.cache is not None:
            member.cache.clear()
        self._gpu_s += (self.events.now_s - member.born_s) * pool.kind.gpus_per_replica

    def _move_jobs(self, member: Member) -> None:
        for job, num_generated in member.stop():
            served = job.owner
            assert isinstance(served, Served)
            self._again(served, job.num_prompt - served.request.num_prompt_tokens + num_generated)

    def _change_roles(self, pool: PoolMembers, role: Role, num_replicas: int) -> None:
        ready = [one for one in pool.members if one.state is MemberState.READY and one.role is not role]
        for member in sorted(ready, key=attrgetter("num_jobs"))[:num_replicas]:
            self._num_role_changes += 1
            self._routed[member.role].remove(member)
            member.state, member.next_role = MemberState.DRAINING, role
            if member.is_idle:
                self._drained(member)
            else:
                self._end_grace(member)

    def _fail(self, failure: Failure) -> None:
        pool = next(iter(self._pools.values())) if failure.pool is None else self._pools[failure.pool]
        for member in [one for one in pool.members if one.state is MemberState.READY][: failure.num_replicas]:
            self._routed[member.role].remove(member)
            member.next_role, member.state = None, MemberState.DRAINING
            self._drained(member)
            self._move_jobs(member)


_COST = attrgetter("cost_s")
