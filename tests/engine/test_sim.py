"""The simulated device: predicted time on a virtual clock, tokens that follow from all before them, no torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manta.engine.config import EngineConfig
from manta.engine.plan import NewSequence, Row, StepPlan
from manta.engine.request import SamplingParams
from manta.engine.sim import SimRunner, fixed_step_s
from manta.engine.startup import start_engine
from manta.engine.step_time import StepShape


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def plan(step_id: int, token_ids: list[int] | None, start: int, num_tokens: int, **params: Any) -> StepPlan:
    sampling = SamplingParams(**{"seed": 0, **params})
    new = [] if token_ids is None else [NewSequence(0, token_ids, len(token_ids), [0], sampling, [])]
    return StepPlan(step_id, [], new, [Row(0, start, num_tokens, [], True, token_ids is None)])


def test_steps_take_the_predicted_time_one_after_the_other():
    clock = Clock()
    runner = SimRunner(lambda step: 0.25, vocab_size=100, clock=clock, sleep=clock.sleep)
    first, second = runner.launch(plan(0, [1, 2], 0, 2)), runner.launch(plan(1, None, 2, 1))
    first.result()
    second.result()
    assert clock.now_s == 0.5


def test_the_host_waits_only_for_what_is_left_of_a_step():
    clock = Clock()
    runner = SimRunner(lambda step: 0.25, vocab_size=100, clock=clock, sleep=clock.sleep)
    handle = runner.launch(plan(0, [1, 2], 0, 2))
    clock.now_s = 0.2
    handle.result()
    assert clock.slept_s == [pytest.approx(0.05)]


def tokens_after(prompt: list[int], count: int, **params: Any) -> list[int]:
    runner = SimRunner(lambda step: 0.0, vocab_size=50, excluded_token_ids=frozenset(range(25)), clock=lambda: 0.0)
    tokens = runner.launch(plan(0, prompt, 0, len(prompt), **params)).result().token_ids
    for index in range(1, count):
        tokens += runner.launch(plan(index, None, len(prompt) + index - 1, 1)).result().token_ids
    return tokens


def test_a_token_follows_from_all_tokens_before_it():
    whole = tokens_after([1, 2, 3], 6)
    assert tokens_after([1, 2, 3, *whole[:2]], 4) == whole[2:]
    assert tokens_after([1, 2, 4], 6) != whole


def test_the_seed_matters_only_where_something_is_drawn():
    assert tokens_after([1], 6, seed=1, temperature=0.0) == tokens_after([1], 6, seed=2, temperature=0.0)
    assert tokens_after([1], 6, seed=1) != tokens_after([1], 6, seed=2)


def test_excluded_tokens_never_come():
    assert all(token >= 25 for token in tokens_after([1], 200))


@pytest.mark.parametrize(("device", "seconds"), [("sim:20ms", 0.02), ("sim:h200", None), ("sim", None)])
def test_a_device_can_have_a_fixed_step(device: str, seconds: float | None):
    assert fixed_step_s(device) == seconds


@pytest.mark.model
def test_a_simulated_engine_says_what_it_settled():
    sizes = {"num_blocks": 5, "block_size": 16, "max_model_len": 9000}
    info = start_engine(EngineConfig.build("smollm2-135m", device="sim:20ms", **sizes)).info
    assert info.max_model_len == 80
    assert info.notes == [
        "5 blocks, as cache.num_blocks says",
        "max_model_len is clipped from 8192 to the 80 tokens that the blocks hold",
        "up to 1024 requests run at once, which scheduler.max_num_seqs leaves open",
        "max_model_len = 9000 was asked for, but the model knows 8192 positions",
    ]
    (note,) = start_engine(EngineConfig.build("smollm2-135m", device="sim:20ms", max_num_seqs=8)).info.notes
    assert "blocks, what fits beside the weights" in note


@pytest.mark.model
def test_a_simulated_engine_starts_without_torch():
    code = (
        "import sys\n"
        "from manta.engine.config import EngineConfig\n"
        "from manta.engine.startup import start_engine\n"
        "core = start_engine(EngineConfig.build('smollm2-135m', device='sim:h200'))\n"
        "assert core.info.vocab_size == 49152, core.info\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LLAMA_8B = str(Path(__file__).parents[2] / "deploy/configs/llama_3_1_8b/config.json")


def predicted_s(**sizes: int) -> float:
    """Seconds that an engine on simulated H200s predicts for a decode step of 8 sequences."""
    config = EngineConfig.build(LLAMA_8B, device="sim:h200", load_format="dummy", tokenizer="smollm2-135m", **sizes)
    runner = start_engine(config)._runner
    assert isinstance(runner, SimRunner)
    return runner._predict(StepShape(0, 8, 8000))


def test_simulated_ranks_that_share_layers_are_faster_but_not_by_their_number():
    one, two = predicted_s(), predicted_s(tensor_parallel_size=2)
    assert one / 2 < two < one


def test_simulated_stages_hold_one_step_each_at_a_time():
    now_s = [0.0]
    runner = SimRunner(lambda step: 1.0, vocab_size=9, num_stages=2, clock=lambda: now_s[0], sleep=lambda s: None)
    handles = [runner.launch(StepPlan(step_id, [], [], [])) for step_id in range(3)]
    assert [handle._done_at_s for handle in handles] == [1.0, 1.5, 2.0]
