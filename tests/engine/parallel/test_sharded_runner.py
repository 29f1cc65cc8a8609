"""Rank 0's runner of a gang that breaks while a step runs: nothing of the step is believed, and nobody stays stuck."""

from __future__ import annotations

from typing import Any

import pytest

from manta.engine.errors import EngineFailed
from manta.engine.parallel.sharded_runner import ShardedRunner
from manta.engine.parallel.vitals import StepClock
from manta.engine.plan import StepPlan, StepResult


class Watch:
    steps: StepClock | None = None
    error: EngineFailed | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def cause_of(self, error: Exception) -> Exception:
        return error


class Link:
    def send(self, data: bytes, check: Any) -> None:
        check()


class Own:
    """A runner whose exchange is given up in the middle of a step: it ends, with a token that means nothing."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def launch(self, plan: StepPlan) -> Own:
        return self

    def result(self) -> StepResult:
        self._watch.error = EngineFailed("Rank 1 is gone: its connection ended.")
        return StepResult([7])


def test_a_step_that_ends_because_its_exchange_was_given_up_has_no_result():
    watch: Any = Watch()
    own: Any = Own(watch)
    link: Any = Link()
    runner = ShardedRunner(own, link, watch, StepClock(), samples_here=True)
    handle = runner.launch(StepPlan(0, [], [], []))
    with pytest.raises(EngineFailed, match="Rank 1 is gone"):
        handle.result()
    assert not runner.is_waiting
