"""Steps in flight in a pipeline: who is in which of them, and that its stages do not run empty."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from manta.engine.core import EngineCore
from manta.engine.plan import StepHandle, StepPlan, StepResult
from tests.engine.engines import make_core, request


class Pipeline:
    """Stands in for the core's runner: stages that take a second a step each, on a clock of its own."""

    def __init__(self, core: EngineCore, num_stages: int) -> None:
        self._runner, core._runner = core._runner, self
        self.now_s = 0.0
        self.free_at_s = [0.0] * num_stages
        self.busy_s = 0.0
        """Of the last stage."""
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()
        self.most_in_flight = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        waiting = {row.slot for other in self.in_flight for row in other.rows if row.samples}
        assert not waiting & {row.slot for row in plan.rows}, "a sequence whose token is not known is in another step"
        self.in_flight.append(plan)
        self.plans.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        done_at_s = self.now_s
        for stage, free_at_s in enumerate(self.free_at_s):
            done_at_s = self.free_at_s[stage] = max(done_at_s, free_at_s) + 1
        self.busy_s += 1
        return _Handle(self, self._runner.launch(plan), done_at_s)

    def prepare_more(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _Handle:
    def __init__(self, pipeline: Pipeline, handle: StepHandle, done_at_s: float) -> None:
        self._pipeline, self._handle, self._done_at_s = pipeline, handle, done_at_s

    def result(self) -> StepResult:
        self._pipeline.now_s = max(self._pipeline.now_s, self._done_at_s)
        self._pipeline.in_flight.popleft()
        return self._handle.result()


def pipelined(num_stages: int, **sizes: int) -> tuple[EngineCore, Pipeline]:
    core = make_core(micro_batches=num_stages, **sizes)
    return core, Pipeline(core, num_stages)


def steps(core: EngineCore) -> Iterator[None]:
    while core.has_work:
        core.step()
        core.scheduler.check()
        yield


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_last_stage_is_busy_while_streams_decode(num_stages: int):
    core, pipeline = pipelined(num_stages, num_blocks=200)
    for index in range(8):
        core.add(request(f"r{index}", [index] * 3, max_tokens=50))
    for _ in steps(core):
        pass
    assert pipeline.busy_s / pipeline.now_s > 0.9


def test_decodes_are_shared_evenly_by_the_micro_batches():
    core, pipeline = pipelined(2, max_num_seqs=8)
    for index in range(7):
        core.add(request(f"r{index}", [index] * 3, max_tokens=20))
    for _ in steps(core):
        pass
    sizes = [len(plan.rows) for plan in pipeline.plans[5:30]]
    assert set(sizes) == {3, 4}


def test_one_stream_alone_has_one_step_in_flight():
    core, pipeline = pipelined(3)
    core.add(request("a", [1, 2, 3], max_tokens=10))
    for _ in steps(core):
        assert len(pipeline.in_flight) <= 1
    assert len(pipeline.plans) == 10


def test_chunks_of_one_prompt_follow_each_other_through_the_stages():
    core, pipeline = pipelined(2, budget=16)
    core.add(request("a", list(range(32)), max_tokens=1))
    for _ in steps(core):
        pass
    assert [plan.rows[0].num_tokens for plan in pipeline.plans] == [8, 8, 8, 8]
    assert pipeline.now_s == 5.0, "four chunks, and one second until the second stage has the first"


def test_no_more_steps_are_in_flight_than_there_are_stages():
    core, pipeline = pipelined(3, budget=8, num_blocks=200)
    for index in range(12):
        core.add(request(f"r{index}", [index] * 20, max_tokens=10))
    for _ in steps(core):
        pass
    assert pipeline.most_in_flight == 3


def test_a_prefix_that_is_in_flight_is_shared_by_the_next_micro_batch():
    core, pipeline = pipelined(2, budget=32)
    core.add(request("a", list(range(13)), max_tokens=3))
    core.step()
    core.add(request("b", [*range(12), 99], max_tokens=3))
    core.step()
    assert [plan.rows[0].start for plan in pipeline.plans] == [0, 12]
    assert pipeline.plans[0].new[0].block_ids[:3] == pipeline.plans[1].new[0].block_ids[:3]
    for _ in steps(core):
        pass


def test_what_was_cancelled_in_flight_comes_to_its_end():
    core, pipeline = pipelined(2)
    for name in "abcd":
        core.add(request(name, [1, 2, 3], max_tokens=50))
    for _ in range(5):
        core.step()
    assert pipeline.in_flight
    for name in "abcd":
        assert core.cancel(name)
    for _ in steps(core):
        pass
    assert core.snapshot().num_used_blocks == 0
    assert not pipeline.in_flight
