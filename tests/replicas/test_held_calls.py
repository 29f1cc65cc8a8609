"""Serve's calls that stand for an edge's work: open while there is some, ended on every way that leads out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from manta.replicas.held_calls import HeldCalls, Holds


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def become_true(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until_s, "it did not become true in time"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def held_by(calls: HeldCalls, *edge_ids: str) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    tasks = {edge_id: asyncio.create_task(calls.wait(edge_id)) for edge_id in edge_ids}
    await turns()
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert len(calls) == 0


async def test_the_call_of_an_edge_that_died_ends_and_that_of_a_busy_one_stays() -> None:
    clock = Clock()
    calls = HeldCalls(idle_s=5.0, clock=clock)
    async with held_by(calls, "busy", "dead") as tasks:
        for _ in range(11):
            clock.now_s += 0.5
            calls.learn(["busy"])
            await turns()
            assert tasks["dead"].done() == (clock.now_s > 105.0)
        assert not tasks["busy"].done()


async def test_a_call_that_arrives_after_its_edge_died_ends_too() -> None:
    clock = Clock()
    calls = HeldCalls(idle_s=5.0, clock=clock)
    calls.learn([])
    async with held_by(calls, "late") as tasks:
        clock.now_s += 5.1
        calls.learn([])
        await turns()
        assert tasks["late"].done()


async def test_an_edge_s_cancellation_and_the_engine_s_end_leave_nothing() -> None:
    calls = HeldCalls()
    async with held_by(calls, "a", "b") as tasks:
        tasks["a"].cancel()
        await turns()
        assert len(calls) == 1
        calls.end_all()
        await turns()
        assert tasks["b"].done()
        assert not tasks["b"].cancelled()


class Serve:
    """Records `hold` calls; each stays open until it is cancelled or `break_off`."""

    def __init__(self, *members: str, grace_s: float = 0.05) -> None:
        self.members = set(members)
        self.calls: list[str] = []
        self.cancelled: list[str] = []
        self._open: dict[str, asyncio.Future[None]] = {}
        self.holds = Holds(self._call, is_member=self.members.__contains__, grace_s=grace_s, retry_s=0.02)

    def break_off(self, replica_id: str) -> None:
        self._open.pop(replica_id).set_result(None)

    async def _call(self, replica_id: str) -> None:
        self.calls.append(replica_id)
        self._open[replica_id] = asyncio.get_running_loop().create_future()
        try:
            await self._open[replica_id]
        except asyncio.CancelledError:
            self.cancelled.append(replica_id)
            raise


async def test_one_call_a_replica_however_many_requests() -> None:
    serve = Serve("a", "b")
    releases = [serve.holds.hold("a") for _ in range(20)] + [serve.holds.hold("b")]
    await turns()
    assert serve.calls == ["a", "b"]
    for release in releases[:19]:
        release()
    await asyncio.sleep(0.15)  # three times the grace period
    assert serve.cancelled == []
    releases[19]()
    await become_true(lambda: serve.cancelled == ["a"])
    releases[20]()
    await become_true(lambda: serve.cancelled == ["a", "b"])


async def test_a_short_pause_keeps_the_call_and_a_long_one_makes_another() -> None:
    serve = Serve("a", grace_s=0.2)
    for _ in range(5):
        serve.holds.hold("a")()
        await asyncio.sleep(0.01)
    assert serve.calls == ["a"]
    await become_true(lambda: serve.cancelled == ["a"])
    release = serve.holds.hold("a")
    await turns()
    assert serve.calls == ["a", "a"]
    release()
    await become_true(lambda: serve.cancelled == ["a", "a"])


async def test_a_replica_that_drains_waits_for_no_grace_period() -> None:
    serve = Serve("a", grace_s=60.0)
    release = serve.holds.hold("a")
    await turns()
    serve.members.clear()
    release()
    await become_true(lambda: serve.cancelled == ["a"])


async def test_a_call_that_breaks_off_is_made_again_while_the_replica_is_a_member() -> None:
    serve = Serve("a")
    release = serve.holds.hold("a")
    await turns()
    serve.break_off("a")
    await become_true(lambda: serve.calls == ["a", "a"])
    serve.members.clear()
    serve.break_off("a")
    await asyncio.sleep(0.1)  # five times the pause before another attempt
    assert serve.calls == ["a", "a"]
    release()
