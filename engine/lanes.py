"""Where a runner's steps run, in order, while the host goes on: a worker thread on CPU, a stream on CUDA.

Knows a step as three calls: run it, start the copy of what it left to the host, make a result of that.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from .plan import StepHandle, StepResult

T = TypeVar("T")


class WorkerLane:
    """The CPU's: one thread that runs steps in order."""

    def __init__(self) -> None:
        # Threads inside an operation are counted per calling thread: the worker takes over this thread's number.
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="manta-step", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    def start(self, run: Callable[[], T], to_host: Callable[[T], T], finish: Callable[[T], StepResult]) -> StepHandle:
        """Returns at once; an error comes out of the handle."""
        return _FutureHandle(self._pool.submit(lambda: finish(to_host(run()))))

    def follow(self, work: Callable[[], None]) -> None:
        """Call `work`, which does not fail, after all steps that were started. Returns at once."""
        self._pool.submit(work)

    def do(self, work: Callable[[], T]) -> T:
        """Run `work` after all steps that were started, and wait for it."""
        return self._pool.submit(work).result()

    def close(self) -> None:
        self._pool.shutdown()


@dataclass(frozen=True)
class _FutureHandle:
    future: Future[StepResult]

    def result(self) -> StepResult:
        return self.future.result()


class StreamLane:
    """CUDA's: a stream of its own. What steps leave is copied to pinned memory; an event says when it is there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._last_done: torch.cuda.Event | None = None

    def start(self, run: Callable[[], T], to_host: Callable[[T], T], finish: Callable[[T], StepResult]) -> StepHandle:
        """Returns when all is launched; an error of a launch comes out here, one of the device out of the handle."""
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            outcome = to_host(run())
            done.record()
        before, self._last_done = self._last_done, done
        return _EventHandle(lambda: finish(outcome), before, begun, done)

    def follow(self, work: Callable[[], None]) -> None:
        """Call `work` at once with the lane's stream as the current one: what it launches follows the steps."""
        with torch.cuda.stream(self._stream):
            work()

    def do(self, work: Callable[[], T]) -> T:
        """Run `work` on this thread with the lane's stream as the current one."""
        with torch.cuda.stream(self._stream):
            return work()

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True)
class _EventHandle:
    finish: Callable[[], StepResult]
    before: torch.cuda.Event | None
    """The end of the step before."""
    begun: torch.cuda.Event
    done: torch.cuda.Event

    def result(self) -> StepResult:
        self.done.synchronize()
        result = self.finish()
        result.device_s = self.begun.elapsed_time(self.done) / 1e3
        if self.before is not None:
            result.device_idle_s = max(self.before.elapsed_time(self.begun) / 1e3, 0.0)
        return result
