"""What an engine's watch counts of requests and steps."""

from __future__ import annotations

from manta.engine.request import EngineRequest, FinishReason, RequestDelta, SamplingParams
from manta.engine.stats import StepStats
from manta.engine.step_costs import StepCosts
from manta.replicas.engine_times import BOUNDS, EngineTimes, EngineWatch

COSTS = StepCosts(overhead_s=0.001, weights_s=0.004, token_s=0.0001, pair_s=0.0, context_token_s=0.0)


def request(request_id: str, *, output_token_ids: list[int] | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        params=SamplingParams(),
        output_token_ids=output_token_ids or [],
    )


def delta(request_id: str, *, ends: bool = False) -> RequestDelta:
    return RequestDelta(request_id=request_id, token_ids=[5], finish_reason=FinishReason.LENGTH if ends else None)


def step(num_prefill_tokens: int, num_decode_seqs: int) -> StepStats:
    return StepStats(
        step_id=0, num_prefill_tokens=num_prefill_tokens, num_decode_seqs=num_decode_seqs, num_context_tokens=0,
        schedule_s=0.0, launch_s=0.0, wait_s=0.0, update_s=0.0,
    )  # fmt: skip


def counted(times: EngineTimes) -> dict[str, tuple[int, float]]:
    return {name: (sum(getattr(times, name).counts), round(getattr(times, name).total, 6)) for name in BOUNDS}


def test_a_request_is_timed_from_submission_to_each_of_its_ends() -> None:
    watch = EngineWatch()
    watch.submitted(request("a"), 10.0)
    watch.started("a", 10.2)
    watch.step_finished(step(100, 0))
    watch.stepped([delta("a")], 10.5, gap_s=None, costs=COSTS)
    for now_s in (10.6, 10.7):
        watch.step_finished(step(0, 1))
        watch.stepped([delta("a")], now_s, gap_s=0.1, costs=COSTS)
    watch.step_finished(step(0, 1))
    watch.ended("a", 4)
    watch.stepped([delta("a", ends=True)], 10.8, gap_s=0.1, costs=COSTS)
    assert counted(watch.times) == {
        "queue_s": (1, 0.2),
        "ttft_s": (1, 0.5),
        "itl_s": (3, 0.3),
        "tpot_s": (1, 0.1),
        "e2e_s": (1, 0.8),
        "batch_tokens": (4, 103.0),
        "batch_sequences": (4, 3.0),
        "predicted_s": (3, 0.015),
    }


def test_a_step_with_many_sequences_counts_its_gap_once_for_each_that_went_on() -> None:
    watch = EngineWatch()
    for name in "abc":
        watch.submitted(request(name), 0.0)
    watch.stepped([delta("a"), delta("b")], 1.0, gap_s=None, costs=None)
    watch.stepped([delta("a"), delta("b"), delta("c")], 1.02, gap_s=0.02, costs=None)
    assert counted(watch.times)["itl_s"] == (2, 0.04)
    assert counted(watch.times)["ttft_s"] == (3, 3.02)


def test_one_that_began_elsewhere_has_no_first_token_here() -> None:
    watch = EngineWatch()
    watch.submitted(request("moved", output_token_ids=[7]), 0.0)
    watch.stepped([delta("moved")], 0.3, gap_s=None, costs=None)
    watch.ended("moved", 3)
    watch.stepped([delta("moved", ends=True)], 0.4, gap_s=0.1, costs=None)
    assert counted(watch.times)["ttft_s"] == (0, 0.0)
    assert counted(watch.times)["tpot_s"] == (1, 0.1)


def test_one_that_is_cancelled_leaves_nothing_behind() -> None:
    watch = EngineWatch()
    watch.submitted(request("a"), 0.0)
    watch.cancelled("a")
    watch.cancelled("never seen")
    watch.started("a", 1.0)
    watch.stepped([], 1.0, gap_s=None, costs=None)
    assert all(count == 0 for count, _ in counted(watch.times).values())


def test_counts_of_two_engines_add_up() -> None:
    one, other = EngineTimes(), EngineTimes()
    one.add("queue_s", 0.2)
    other.add("queue_s", 700.0, 2)
    one.merge(other)
    assert counted(one)["queue_s"] == (3, 1400.2)
    assert one.queue_s.counts[-1] == 2, "above the last bound"
