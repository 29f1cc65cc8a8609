"""Garbage collection beside a step loop: when it happens, and that the process gets back what it had."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from manta.engine.loop_gc import LoopGc


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    gc.enable() if was_enabled else gc.disable()


def test_cycles_are_collected_in_a_pause_and_after_so_many_steps_without_one():
    with LoopGc(max_steps=3, freezes=False) as collector:
        gone = weakref.ref(Cycle())
        collector.step_done()
        assert gone() is not None
        collector.pause()
        assert gone() is None
        gone = weakref.ref(Cycle())
        for _ in range(3):
            collector.step_done()
        assert gone() is None
        assert collector.num_forced == 1


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_process_gets_its_collector_back_as_it_was(freezes: bool, enabled: bool):
    gc.enable() if enabled else gc.disable()
    with LoopGc(freezes=freezes):
        assert not gc.isenabled()
        assert (gc.get_freeze_count() > 0) == freezes
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() == 0
