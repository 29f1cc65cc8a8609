"""The step loop: what it does in its pauses, and that Python's garbage waits for them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from manta.cluster.routing.roles import Role
from manta.engine.loop_gc import LoopGc
from manta.engine.request import EngineRequest, Refusal, RequestDelta, SamplingParams
from manta.replicas.engine_loop import EngineLoop
from manta.replicas.protocol import Submit
from manta.replicas.step_histogram import BOUNDS_S, StepHistogram, quantile
from tests.replicas.engines import FakeCore


class Server:
    """The channel's server, with what tests submit instead of edges."""

    needs_cached = False

    def __init__(self) -> None:
        self._commands: list[Submit] = []
        self._arrived = threading.Event()
        self.step_times = StepHistogram()

    def submit(self, *requests: EngineRequest) -> None:
        self._commands += [Submit(request=request) for request in requests]
        self._arrived.set()

    def receive(self, timeout_s: float, *, wake: Sequence[object] = ()) -> list[Submit]:
        self._arrived.wait(min(timeout_s, 0.02))
        self._arrived.clear()
        commands, self._commands = self._commands, []
        return commands

    def set_role(self, role: Role) -> None:
        pass

    def publish(self, deltas: Any, refusals: Any, *, step_times: StepHistogram, **fields: Any) -> None:
        self.step_times = step_times


class Cycle:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


class LitteringCore(FakeCore):
    """Leaves cycles behind in every step, many more than the collector's thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stepping = False
        self.first: weakref.ref[Cycle] | None = None

    def add(self, request: EngineRequest) -> Refusal | None:
        self.is_stepping = True
        return super().add(request)

    def step(self) -> list[RequestDelta]:
        cycles = [Cycle() for _ in range(2000)]
        self.first = self.first or weakref.ref(cycles[0])
        deltas = super().step()
        self.is_stepping = self.has_work
        return deltas


def request(request_id: str, *, max_tokens: int) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(max_tokens=max_tokens))


@contextmanager
def running(core: FakeCore, collector: LoopGc | None = None) -> Iterator[Server]:
    server: Any = Server()
    loop = EngineLoop(core, server, collector=collector)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield server
    finally:
        loop.stop()
        thread.join()


def become_true(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until_s, "it did not become true in time"
        time.sleep(0.002)


@contextmanager
def watched_collections(core: LitteringCore) -> Iterator[list[bool]]:
    """One entry for each collection of everything or of a part: whether the core had work."""
    seen: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(core.is_stepping)

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def test_garbage_waits_for_a_pause() -> None:
    core = LitteringCore()
    gc.enable()  # whatever ran in this process before
    with running(core) as server:
        become_true(lambda: not gc.isenabled())
        with watched_collections(core) as seen:
            server.submit(request("r", max_tokens=200))
            become_true(lambda: bool(core.added) and not core.has_work)
            become_true(lambda: core.first is not None and core.first() is None)
            assert seen == [False]
            time.sleep(0.1)  # several turns without work: nothing new to collect
            assert seen == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_engine_without_pauses_collects_now_and_then() -> None:
    core, collector = LitteringCore(), LoopGc(max_steps=50)
    with running(core, collector) as server:
        become_true(lambda: not gc.isenabled())
        with watched_collections(core) as seen:
            server.submit(request("r", max_tokens=220))
            become_true(lambda: bool(core.added) and not core.has_work)
        assert seen.count(True) == collector.num_forced == 4
        assert 0 < collector.longest_forced_s < 1


def test_pauses_after_the_first_work_prepare_and_give_way_to_requests() -> None:
    core = FakeCore()
    core.num_to_prepare = 10**9
    with running(core) as server:
        time.sleep(0.1)
        assert core.num_prepared == 0  # the first request should find the engine free
        server.submit(request("first", max_tokens=3))
        become_true(lambda: core.num_prepared > 10)
        core.may_step.clear()
        server.submit(request("second", max_tokens=3))
        become_true(lambda: "second" in core.added)
        before = core.num_prepared
        time.sleep(0.05)
        assert core.num_prepared == before
        core.may_step.set()
        become_true(lambda: core.num_prepared > before + 10)
        core.num_to_prepare = 0  # nothing is left
        time.sleep(0.05)
        before = core.num_prepared
        time.sleep(0.05)
        assert core.num_prepared == before


def test_step_times_leave_pauses_out() -> None:
    core = FakeCore(step_s=0.01)
    with running(core) as server:
        for name in ("first", "second"):
            server.submit(request(name, max_tokens=11))
            become_true(lambda name=name: name in core.added and not core.has_work)
            time.sleep(0.2)
        assert sum(server.step_times.counts) == 20
        slowest = quantile(server.step_times.counts, 1.0)
        assert slowest is not None
        assert 0.0099 < slowest < 0.15
        assert 0.2 <= server.step_times.sum_s < 2.0


def test_quantiles_are_linear_inside_a_bucket() -> None:
    histogram = StepHistogram()
    assert quantile(histogram.counts, 0.5) is None
    for _ in range(99):
        histogram.add(0.0105)
    histogram.add(0.5)
    low_s, high_s = max(b for b in BOUNDS_S if b < 0.0105), min(b for b in BOUNDS_S if b >= 0.0105)
    assert high_s / low_s < 1.1
    middle = quantile(histogram.counts, 0.5)
    assert middle is not None
    assert abs(middle - (low_s + (high_s - low_s) * 50 / 99)) < 1e-9
    top = quantile(histogram.counts, 0.995)
    assert top is not None
    assert 0.46 < top <= 0.513
    histogram.add(7.0)
    assert quantile(histogram.counts, 1.0) == BOUNDS_S[-1]
