"""Rank 0's start of a gang: meets the followers, builds its own part beside them, waits until all are ready.

Its own part is built by a second thread, so that an error of another rank reaches the caller at once: the exchange in
which the ranks agree on sizes would wait for the rank that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from manta.engine.errors import MantaError
from manta.engine.plan import Runner

from .link import DriverLink
from .member import GangSeat
from .rank import MEET_S, open_store
from .sharded_runner import ShardedRunner
from .vitals import StepClock
from .watch import Watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

READY_S = 1800.0
"""How long the others may take once rank 0 is ready: they load the same, from disks that may be slower."""


def start_gang(
    seat: GangSeat, build: Callable[[TCPStore], Runner], *, abort: Callable[[], None] = lambda: None
) -> ShardedRunner:
    """The runner of the whole gang, once all its ranks are ready. `build` makes rank 0's own part; `abort` lets go what
    that waits for on a GPU when the gang is broken, unless `seat.on_broken` ended the process.

    Raises ConfigError or CheckpointError of any rank as they are, EngineFailed when a rank ends or does not come; what
    happens to the gang later is told to `seat.on_broken`.
    """
    member = seat.member
    store = open_store(member, seat.store_socket)
    is_up = threading.Event()

    def broken(reason: str) -> None:
        if is_up.is_set():
            seat.on_broken(reason)
            abort()

    watch = Watch(member, store, broken)
    try:
        link = DriverLink(member, store)

        def bring_up() -> Runner:
            own = build(store)
            watch.say_ready()
            watch.wait_until_ready(READY_S)
            link.wait_for_followers(MEET_S, watch.check)
            return own

        own = _run_beside(watch, bring_up, seat.check)
    except BaseException as error:
        watch.fail(error)
        raise
    runner = ShardedRunner(own, link, watch, StepClock(), samples_here=member.place.samples, on_closed=seat.on_closed)
    is_up.set()
    watch.check()
    return runner


def _run_beside(watch: Watch, work: Callable[[], T], check: Callable[[], None]) -> T:
    """What `work` returns, run by a thread. Raises what it raises, or `check` meanwhile, or what breaks the gang."""
    results: list[T] = []
    errors: list[Exception] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)
        is_done.set()

    threading.Thread(target=run, name="manta-build", daemon=True).start()
    while not is_done.wait(0.1):
        watch.check()
        check()
    if results:
        return results[0]
    (error,) = errors
    raise error if isinstance(error, MantaError) else watch.cause_of(error)
