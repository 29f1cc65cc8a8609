"""The faults: what is done, how it shows that it happened, and how long the system took. Knows no load and no report.

Every fault waits until all replicas are ready before and after it, so that at least one replica is healthy meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import httpx

from .chaos_system import ChaosFailed, ChaosSystem, is_stopped, started_at

OUT_TIMEOUT_S = 30.0
BACK_TIMEOUT_S = 180.0
LOOK_S = 0.05


@dataclass(frozen=True)
class FaultRecord:
    """One fault that was injected, and how the system took it. Times in seconds."""

    kind: str
    at_s: float
    what: str
    happened: bool
    """Whether the fault was seen to have happened, by other means than Manta's own reaction."""
    out_of_routing_s: float | None
    """From the fault until the edge sends no new work there; None: it never did."""
    serving_again_s: float | None
    """From the fault until all replicas take work again; None: never."""
    least_ready: int
    """Fewest replicas that were ready at once meanwhile."""
    moved_requests: int


@dataclass(frozen=True)
class Damage:
    """What was done."""

    what: str
    has_happened: Callable[[], bool]
    """Asked after the system has recovered."""
    repair: Callable[[], None] = lambda: None
    """What an operator would do when the system serves again."""


Inject = Callable[[ChaosSystem, random.Random], Damage]


def kill_rank(system: ChaosSystem, rng: random.Random) -> Damage:
    """SIGKILL one process of a gang."""
    pid = rng.choice(system.ranks())
    start = started_at(pid)
    os.kill(pid, signal.SIGKILL)
    return Damage(f"SIGKILL to rank process {pid}", lambda: started_at(pid) != start)


def stop_rank(system: ChaosSystem, rng: random.Random) -> Damage:
    """SIGSTOP one process of a gang; it is never continued, the system has to end it."""
    pid = rng.choice(system.ranks())
    start = started_at(pid)
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + 1.0
    while not is_stopped(pid) and time.monotonic() < until_s:
        time.sleep(0.002)
    was_stopped = is_stopped(pid)
    return Damage(
        f"SIGSTOP to rank process {pid}", lambda: was_stopped and (is_stopped(pid) or started_at(pid) != start)
    )


def drain_replica(system: ChaosSystem, rng: random.Random) -> Damage:
    """One replica fewer, which Serve drains, then as many as before."""
    before = system.num_replicas
    ids = system.ready()
    system.scale(before - 1)

    def is_gone() -> bool:
        return len(ids - system.known()) == 1

    try:
        system.wait(is_gone, "the drained replica to leave", timeout_s=60.0)
        has_left = True
    except ChaosFailed:
        has_left = False
    finally:
        system.scale(before)
    return Damage(f"{before} replicas, {before - 1}, {before} again", lambda: has_left)


def rolling_update(system: ChaosSystem, rng: random.Random) -> Damage:
    """Every replica is replaced by one of another revision, one after the other."""
    ids = system.ready()
    system.update()

    def are_replaced() -> bool:
        try:
            system.wait(lambda: not ids & system.known(), "all replicas of the old revision to leave")
        except ChaosFailed:
            return False
        return True

    return Damage("a new revision of all replicas", are_replaced)


def kill_node(system: ChaosSystem, rng: random.Random) -> Damage:
    """SIGKILL all processes of a node that holds ranks, Ray's own included."""
    lab, node = system.lab_and_node(rng)
    killed = {pid: started_at(pid) for pid in node.pids()}
    node.signal_all(signal.SIGKILL)
    return Damage(
        f"SIGKILL to all {len(killed)} processes of node {node.address}",
        lambda: bool(killed) and all(started_at(pid) != start for pid, start in killed.items()),
        lambda: lab.repair(node),
    )


def cut_link(system: ChaosSystem, rng: random.Random) -> Damage:
    """Pull the cable of a node that holds ranks; its processes go on."""
    lab, node = system.lab_and_node(rng)
    was_reachable = lab.is_reachable(node)
    lab.cut(node)
    return Damage(
        f"the link of node {node.address} is down",
        lambda: was_reachable and not lab.is_reachable(node),
        lambda: lab.repair(node),
    )


FAULTS: dict[str, Inject] = {
    "kill_rank": kill_rank,
    "stop_rank": stop_rank,
    "drain_replica": drain_replica,
    "rolling_update": rolling_update,
    "kill_node": kill_node,
    "cut_link": cut_link,
}


class Watcher:
    """Looks at the system again and again while entered, from a thread of its own."""

    def __init__(self, system: ChaosSystem) -> None:
        self.before = self.ready = system.ready()
        """Replicas that took work then and now."""
        self.least_ready = len(self.before)
        self.out_at_s: float | None = None
        """When one of those before was first seen to be out."""
        self._system = system
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="chaos watcher")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                self.ready = ready = self._system.ready()
            except httpx.HTTPError:  # clients notice that too, and theirs are the requests that count
                continue
            self.least_ready = min(self.least_ready, len(ready))
            if self.out_at_s is None and self.before - ready:
                self.out_at_s = time.monotonic()


def inject(system: ChaosSystem, kind: str, rng: random.Random, *, since_s: float) -> FaultRecord:
    """Inject one fault and wait until the system has recovered. Blocks; raises ChaosFailed when it was broken before.

    `since_s`: the monotonic time that `at_s` counts from.
    """
    system.wait_ready(timeout_s=BACK_TIMEOUT_S)
    moved = system.metric("manta_requests_moved_total")
    watcher, start_s = Watcher(system), time.monotonic()
    with watcher:
        damage = FAULTS[kind](system, rng)
        is_out = _becomes_true(lambda: watcher.out_at_s is not None, OUT_TIMEOUT_S)
        is_back = is_out and _becomes_true(lambda: _is_back(system, kind, watcher), BACK_TIMEOUT_S)
        took_s = time.monotonic() - start_s
    happened = damage.has_happened()
    damage.repair()
    return FaultRecord(
        kind=kind,
        at_s=round(start_s - since_s, 2),
        what=damage.what,
        happened=happened,
        out_of_routing_s=None if watcher.out_at_s is None else round(watcher.out_at_s - start_s, 3),
        serving_again_s=round(took_s, 3) if is_back else None,
        least_ready=watcher.least_ready,
        moved_requests=int(system.metric("manta_requests_moved_total") - moved),
    )


def _is_back(system: ChaosSystem, kind: str, watcher: Watcher) -> bool:
    if len(watcher.ready) != system.num_replicas:
        return False
    fresh = watcher.ready - watcher.before
    return len(fresh) == system.num_replicas if kind == "rolling_update" else bool(fresh)


def _becomes_true(condition: Callable[[], bool], timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(LOOK_S)
    return True
