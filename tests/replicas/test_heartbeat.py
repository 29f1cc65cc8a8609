"""What a heartbeat says: at what the loop is, since when, and how long that may take."""

from __future__ import annotations

import pytest
import zmq

from manta.engine.core import EngineCore
from manta.engine.sim import SimHandle
from manta.replicas.heartbeat import Beat, Heartbeat
from tests.engine.engines import make_core, request, run


def heartbeat(now_s: list[float], step: list[tuple[float, float] | None]) -> Heartbeat:
    context = zmq.Context.instance()
    socket = context.socket(zmq.PUB)
    return Heartbeat(socket, turn_bound_s=10.0, step=lambda now: step[0], interval_s=60.0, clock=lambda: now_s[0])


def test_a_loop_that_waits_for_work_is_no_hang_however_long_it_waits() -> None:
    now_s = [0.0]
    one = heartbeat(now_s, [None])
    one.begin_turn()
    one.end_turn()
    now_s[0] = 1e6
    assert not one.beat().is_hang
    one.close()


def test_while_it_waits_for_a_step_the_step_s_bound_counts_else_the_turn_s() -> None:
    now_s = [0.0]
    step: list[tuple[float, float] | None] = [None]
    one = heartbeat(now_s, step)
    one.begin_turn()
    now_s[0] = 9.0
    assert one.beat() == Beat(9.0, 10.0)
    now_s[0] = 11.0
    assert one.beat().is_hang
    step[0] = (8.0, 300.0)
    assert one.beat() == Beat(8.0, 300.0)
    assert not one.beat().is_hang
    one.close()


def test_the_core_says_which_step_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core: EngineCore = make_core()
    seen: list[tuple[float, float] | None] = []
    result = SimHandle.result
    monkeypatch.setattr(SimHandle, "result", lambda self: seen.append(core.step_clock.waiting(1e9)) or result(self))
    run(core, request("r", [1, 2, 3], max_tokens=20))
    assert len(seen) >= 20
    first, last = seen[0], seen[-1]
    assert first is not None
    assert last is not None
    assert first[1] == 300.0  # the first steps are excused
    assert last[1] == 5.0
    assert core.step_clock.waiting(1e9) is None
