"""An edge's report for scaling, made from its replicas' snapshots and its own counters, and what it learns back.

Knows no Ray: it is told how to send a report. A report that is lost costs nothing, since counters only rise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from manta.cluster.routing.roles import Role
from manta.cluster.scaling import Counters, EdgeSignals, PoolSignals, ScalingStatus
from manta.engine.stats import EngineInfo, Snapshot
from manta.engine.step_costs import StepCosts

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
LOOK_S = 0.05
"""How often an edge looks whether a request waits where no replica is: that is reported at once."""
SEND_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica that the edge is connected to."""

    replica_id: str
    role: Role
    is_draining: bool
    snapshot: Snapshot
    info: EngineInfo
    costs: StepCosts | None


def pool_signals(
    pools: Sequence[tuple[str, Role]], loads: Iterable[ReplicaLoad], pool_of: Callable[[str], str | None]
) -> tuple[PoolSignals, ...]:
    """Sums by pool. Replicas that have left Serve's membership belong to no pool, and count nowhere."""
    by_pool: Mapping[str, list[ReplicaLoad]] = {name: [] for name, _ in pools}
    for load in loads:
        name = pool_of(load.replica_id)
        if name in by_pool:
            by_pool[name].append(load)
    return tuple(_pool(name, role, by_pool[name]) for name, role in pools)


def _pool(name: str, role: Role, loads: Sequence[ReplicaLoad]) -> PoolSignals:
    ready = [load for load in loads if not load.is_draining]
    snapshots = [load.snapshot for load in loads]
    newest = loads[-1].info if loads else None
    room = 0 if newest is None else newest.num_blocks * newest.block_size
    return PoolSignals(
        name=name,
        role=role,
        num_ready=len(ready),
        num_draining=len(loads) - len(ready),
        num_lent=sum(load.role is not role and load.role is not Role.MIXED for load in ready),
        num_running=sum(one.num_running for one in snapshots),
        num_waiting=sum(one.num_waiting for one in snapshots),
        num_prefill_tokens=sum(one.num_prefill_tokens for one in snapshots),
        num_context_tokens=sum(one.num_context_tokens for one in snapshots),
        kv_cache_usage=sum(load.snapshot.kv_cache_usage for load in ready) / len(ready) if ready else 0.0,
        max_num_seqs=0 if newest is None else newest.max_num_seqs,
        kv_room_tokens=room,
        tokens_a_step=0 if newest is None else newest.max_num_batched_tokens,
        tpot_target_s=None if newest is None else newest.tpot_target_s,
        step_costs=next((load.costs for load in reversed(loads) if load.costs is not None), None),
        startup_s=None if newest is None or not newest.startup_s else sum(newest.startup_s.values()),
    )


class ScalingReporter:
    """`run` reports for ever; `status` is what was learned last."""

    def __init__(
        self,
        edge_id: str,
        *,
        counters: Callable[[], Counters],
        num_held: Callable[[], int],
        pools: Callable[[], tuple[PoolSignals, ...]],
        send: Callable[[EdgeSignals], Awaitable[ScalingStatus | None]],
        learned: Callable[[ScalingStatus], None],
        period_s: float = PERIOD_S,
    ) -> None:
        """`send` gives the receiver's answer; whatever it raises is logged once, and the next report tells it all."""
        self._edge_id = edge_id
        self._counters, self._num_held, self._pools = counters, num_held, pools
        self._send, self._learned = send, learned
        self._period_s = period_s
        self._is_failing = False
        self.status: ScalingStatus | None = None

    def signals(self) -> EdgeSignals:
        """The report that is due now."""
        return EdgeSignals(
            edge_id=self._edge_id,
            now_s=time.monotonic(),
            counters=self._counters(),
            num_held=self._num_held(),
            pools=self._pools(),
        )

    async def run(self) -> None:
        """For ever, at the latest each period, and at once when a first request waits in the edge."""
        while True:
            num_held = self._num_held()
            await self._report()
            until_s = time.monotonic() + self._period_s
            while time.monotonic() < until_s and not (self._num_held() and not num_held):
                await asyncio.sleep(LOOK_S)

    async def _report(self) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                status = await self._send(self.signals())
        except Exception as error:  # the other side is away: its successor learns everything from the next report
            if not self._is_failing:
                logger.warning("the autoscaler cannot be told of load: %s", type(error).__name__)
            self._is_failing = True
            return
        if self._is_failing:
            logger.info("the autoscaler is told of load again")
        self._is_failing = False
        if status is not None:
            self.status = status
            self._learned(status)
