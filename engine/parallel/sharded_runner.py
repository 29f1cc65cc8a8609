"""A gang of ranks behind one runner: rank 0's own part of the model, and everybody else over the link. Knows no model.

A plan goes to the followers first, then to the own part; the result comes from the rank that samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from manta.engine.errors import MantaError
from manta.engine.kv_transfer.messages import KvOrder
from manta.engine.plan import Runner, StepHandle, StepPlan, StepResult

from .link import DriverLink
from .plan_codec import Order, decode_report, encode
from .vitals import StepClock
from .watch import Watch


class ShardedRunner:
    """Implements plan.Runner for rank 0 of a gang whose ranks are all ready."""

    def __init__(
        self,
        own: Runner,
        link: DriverLink,
        watch: Watch,
        clock: StepClock,
        *,
        samples_here: bool,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`samples_here`: the own part draws the tokens; otherwise another rank reports them."""
        self._own = own
        self._link = link
        self._watch = watch
        self._clock = clock
        self._samples_here = samples_here
        self._on_closed = on_closed
        watch.steps = clock

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for a step right now."""
        return self._clock.is_waiting

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step on every rank. Raises EngineFailed when the gang is broken."""
        self._watch.check()
        with self._waiting_for(plan, is_done=False):
            self._link.send(encode(plan), self._watch.check)
            own = self._own.launch(plan)
        return _ShardedHandle(self, plan, own)

    def obey(self, order: KvOrder) -> None:
        """All ranks get it, behind the steps that were launched."""
        with self._explained():
            self._link.send(encode(order), self._watch.check)
            self._own.obey(order)

    def prepare_more(self) -> bool:
        """All ranks prepare the same."""
        with self._explained():
            self._link.send(encode(Order.PREPARE_MORE), self._watch.check)
            return self._own.prepare_more()

    def close(self) -> None:
        """End the followers and the own part. Whatever is broken, this returns."""
        self._watch.steps = None
        if self._watch.error is None:
            self._link.send(encode(Order.END), self._watch.check)
            self._own.close()
        self._watch.close()
        self._link.close()
        self._on_closed()

    def collect(self, plan: StepPlan, own: StepHandle) -> StepResult:
        """Wait for a step; in the order of the launches."""
        with self._waiting_for(plan, is_done=True):
            result = own.result()
            self._watch.check()  # an exchange that was given up ends with results that mean nothing
            if self._samples_here:
                return result
            report = decode_report(self._link.receive(self._watch.check))
        assert report.step_id == plan.step_id, f"step {report.step_id} is reported where {plan.step_id} is waited for"
        report.result.device_s, report.result.device_idle_s = result.device_s, result.device_idle_s
        return report.result

    @contextmanager
    def _waiting_for(self, plan: StepPlan, *, is_done: bool) -> Iterator[None]:
        self._clock.begin(plan.step_id, plan.num_tokens, time.monotonic())
        try:
            with self._explained():
                yield
        finally:
            self._clock.end(time.monotonic(), is_done=is_done)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A connection that breaks in the middle of an exchange has a cause, which the watch learns at that time."""
        try:
            yield
        except MantaError:
            raise
        except Exception as error:
            cause = self._watch.cause_of(error)
            if cause is error:
                self._watch.fail(error)
                raise
            raise cause from error


class _ShardedHandle:
    """A step in flight on all ranks."""

    def __init__(self, runner: ShardedRunner, plan: StepPlan, own: StepHandle) -> None:
        self._runner, self._plan, self._own = runner, plan, own

    def result(self) -> StepResult:
        return self._runner.collect(self._plan, self._own)
