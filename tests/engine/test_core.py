"""The step loop over the simulated device: outputs do not depend on how the work was cut up, and nothing leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manta.engine.core import EngineCore
from manta.engine.plan import StepHandle, StepResult
from manta.engine.request import EngineRequest, FinishReason, RequestDelta
from manta.engine.stats import Snapshot, StepStats
from tests.engine.engines import make_core, request, run

PROMPTS = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [1, 2, 3, 4, 9], "c": [8] * 21, "d": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}


@pytest.fixture
def core() -> EngineCore:
    return make_core()


def requests(**params: Any) -> list[EngineRequest]:
    return [request(name, prompt, max_tokens=12, **params) for name, prompt in PROMPTS.items()]


def assert_nothing_is_held(core: EngineCore) -> None:
    snapshot = core.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_used_blocks) == (0, 0, 0)
    assert core.scheduler.cache.pool.num_free == snapshot.num_blocks
    assert not core.has_work
    core.scheduler.check()


ALONE = {r.request_id: run(make_core(), r)[r.request_id] for r in requests()}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"budget": 8},
        {"budget": 9, "max_num_seqs": 2},
        {"block_size": 2},
        {"block_size": 16},
        {"prefix_caching": False},
        {"max_num_seqs": 1},
        {"micro_batches": 2},
        {"micro_batches": 3, "budget": 8},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_neighbours_chunks_or_blocks(sizes: dict[str, Any]):
    core = make_core(**sizes)
    assert run(core, *requests()) == ALONE
    assert_nothing_is_held(core)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_tokens_do_not_depend_on_preemption(micro_batches: int):
    core = make_core(num_blocks=12, max_model_len=40, micro_batches=micro_batches)
    assert run(core, *requests()) == ALONE
    assert core.snapshot().num_preemptions > 0
    assert_nothing_is_held(core)


def test_a_warm_cache_changes_nothing_but_the_cached_tokens():
    core = make_core()
    run(core, *requests())
    again = [request(name + "2", prompt, max_tokens=12) for name, prompt in PROMPTS.items()]
    assert list(run(core, *again).values()) == list(ALONE.values())
    assert core.snapshot().num_cached_tokens >= 4 + 4 + 20 + 8


def test_a_stream_that_is_resumed_goes_on_as_it_would_have():
    whole = run(make_core(), request("a", [1, 2, 3], max_tokens=10, temperature=1.0, seed=5))["a"]
    resumed = request("a", [1, 2, 3], max_tokens=10, temperature=1.0, seed=5)
    resumed.output_token_ids = whole[:4]
    assert run(make_core(), resumed)["a"] == whole[4:]


def test_an_unseeded_request_gets_a_seed_of_its_own():
    core = make_core()
    outputs = run(core, *[request(str(i), [1, 2, 3], seed=None, temperature=1.0) for i in range(4)])
    assert len({tuple(tokens) for tokens in outputs.values()}) > 1


def test_steps_overlap_one_plan_is_made_while_another_is_in_flight(core: EngineCore):
    core.add(request("a", [1, 2, 3], max_tokens=3))
    assert core.step() == []
    assert core.has_work
    assert [len(delta.token_ids) for delta in core.step()] == [1]


def test_every_step_is_reported(core: EngineCore):
    steps: list[StepStats] = []
    core.on_step = steps.append
    run(core, request("a", [1] * 40, max_tokens=3))
    assert [(s.num_prefill_tokens, s.num_decode_seqs) for s in steps] == [(32, 0), (8, 0), (0, 1), (0, 1)]


def test_counters_of_the_snapshot_travel_as_numbers(core: EngineCore):
    run(core, request("a", [1, 2, 3], max_tokens=3))
    snapshot = core.snapshot()
    assert Snapshot.from_numbers(snapshot.to_numbers()) == snapshot
    assert (snapshot.num_finished, snapshot.num_generated_tokens, snapshot.num_prompt_tokens) == (1, 3, 3)


def test_prompt_logprobs_come_with_the_first_token_one_per_prompt_token():
    core = make_core(budget=8)
    core.add(request("a", list(range(20)), max_tokens=2, prompt_logprobs=1))
    deltas = []
    while core.has_work:
        deltas += core.step()
    assert deltas[0].prompt_logprobs is not None
    assert deltas[0].prompt_logprobs[0] is None
    assert [entry.token_id for entry in deltas[0].prompt_logprobs[1:] if entry] == list(range(1, 20))
    assert deltas[1].prompt_logprobs is None


def test_prompt_logprobs_are_whole_after_a_preemption_with_their_last_chunk_in_flight():
    core = make_core(num_blocks=11, budget=5, max_model_len=44)
    core.add(request("old", [1] * 4, max_tokens=20))
    core.step()
    prompt = list(range(100, 132))
    core.add(request("young", prompt, max_tokens=3, prompt_logprobs=0))
    deltas = []
    while core.has_work:
        before = core.snapshot().num_preemptions
        deltas += [delta for delta in core.step() if delta.request_id == "young"]
        if core.snapshot().num_preemptions > before:
            assert len(deltas) == 1, "the step that was in flight delivers the first token"
    assert core.snapshot().num_preemptions > 0
    entries = deltas[0].prompt_logprobs
    assert entries is not None
    assert [entry and entry.token_id for entry in entries] == [None, *prompt[1:]]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_walk_of_requests_loses_and_leaks_nothing(seed: int):
    rng = random.Random(seed)
    core = make_core(
        num_blocks=rng.choice([10, 16, 40]),
        max_num_seqs=rng.choice([1, 3, 8]),
        budget=rng.choice([8, 13, 32]),
        max_model_len=40,
        max_num_waiting=12,
        prefix_caching=rng.random() < 0.8,
        micro_batches=1 + seed % 3,
    )
    expected: dict[str, int] = {}
    received: dict[str, int] = {}
    scored: dict[str, list[int]] = {}
    """Prompts whose log-probabilities are still to come."""
    finished: set[str] = set()
    cancelled: set[str] = set()

    def take(deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in finished | cancelled
            received[delta.request_id] += len(delta.token_ids)
            if delta.request_id in scored:
                entries = delta.prompt_logprobs or []
                assert [entry and entry.token_id for entry in entries] == [None, *scored.pop(delta.request_id)[1:]]
            if delta.finish_reason is not None:
                assert delta.finish_reason is FinishReason.LENGTH
                finished.add(delta.request_id)

    for turn in range(400):
        if turn < 300 and rng.random() < 0.3:
            name = f"r{turn}"
            prompt = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 36))]
            scores = rng.choice([None, None, 0])
            sent = request(
                name, prompt, max_tokens=rng.randint(0, 8), priority=rng.choice([0, 0, 1]), prompt_logprobs=scores
            )
            if core.add(sent) is None:
                expected[name] = sent.params.max_tokens or 0
                received[name] = 0
                if scores is not None:
                    scored[name] = prompt
        if expected and rng.random() < 0.05:
            name = rng.choice(list(expected))
            if core.cancel(name):
                cancelled.add(name)
        take(core.step())
        core.scheduler.check()
    while core.has_work:
        take(core.step())
        core.scheduler.check()
    assert finished | cancelled == set(expected)
    assert not scored.keys() & finished
    assert all(received[name] == expected[name] for name in finished)
    assert_nothing_is_held(core)


def test_a_step_s_stats_carry_the_times_that_the_device_measured():
    core = make_core()
    run_on_sim = core._runner.launch

    class Timed:
        def __init__(self, handle: StepHandle) -> None:
            self.handle = handle

        def result(self) -> StepResult:
            result = self.handle.result()
            result.device_s, result.device_idle_s = 0.25, 0.125
            return result

    core._runner.launch = lambda plan: Timed(run_on_sim(plan))
    stats: list[StepStats] = []
    core.on_step = stats.append
    run(core, request("a", [1, 2, 3], max_tokens=2))
    assert [(step.device_s, step.device_idle_s) for step in stats] == [(0.25, 0.125)] * 2
