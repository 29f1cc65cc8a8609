"""Ranks with a GPU each, over NCCL and our one-shot kernel, as LLM starts them: the golden tokens in fp32, as graphs or
not; and what happens when a rank dies while others wait for it on the GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from manta import LLM, SamplingParams
from manta.bench import all_reduce
from manta.engine.errors import EngineFailed
from manta.engine.parallel.rank_runner import RankRunner
from manta.engine.parallel.sharded_runner import ShardedRunner
from tests.gpus import needs_two_gpus

pytestmark = [*needs_two_gpus, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests/data/golden/smollm2_135m_q4_1.json").read_text())["prompts"][:8]
PROMPTS = [golden["prompt_ids"] for golden in GOLDEN]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
BROKEN_S = 10.0
"""The engine's own limit for a rank that is stuck in an exchange."""


def start(tp_size: int, pp_size: int, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    return LLM(
        "smollm2-135m",
        device="cuda",
        dtype="float32",
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        **{**sizes, **options},
    )


def own_rank(llm: LLM) -> RankRunner:
    runner = llm.engine._runner
    assert isinstance(runner, ShardedRunner)
    assert isinstance(runner._own, RankRunner)
    return runner._own


def assert_golden(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [g["continuation_ids"][:20] for g in GOLDEN]


def children() -> list[int]:
    """Processes that this one has started."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split()]


@pytest.mark.model
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_gpus_give_the_golden_tokens(tp_size: int, pp_size: int, graphs: bool):
    with start(tp_size, pp_size, cuda_graphs=graphs) as llm:
        rank = own_rank(llm)
        assert rank._groups.backend == "nccl"
        assert (rank._graphs is not None) == (graphs and pp_size == 1)
        assert_golden(llm)
        while llm.engine.prepare_more():  # every graph that steps may use
            pass
        assert_golden(llm)
        seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8)
        asked = SamplingParams(temperature=0.8, seed=3, max_tokens=8, repetition_penalty=1.2, logprobs=1)
        for params in (seeded, asked):
            first, again = (llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids for _ in range(2))
            assert first == again


def test_sums_are_those_of_the_reference_with_the_same_bits_on_both():
    sizes = all_reduce.Sizes(num_bytes=(1 << 13, 3 << 16, 1 << 22), one_shot_max_bytes=1 << 22, repeats=2)
    report = all_reduce.run(num_gpus=2, sizes=sizes)  # raises where a sum is wrong
    assert {"one_shot_graph_8kib_us", "one_shot_eager_4mib_us", "nccl_graph_8kib_us"} <= set(report.figures)


@pytest.mark.model
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_an_engine_whose_other_rank_is_killed_raises_and_another_one_works(graphs: bool):
    """In a process of its own, which the engine ends when nothing else helps."""
    command = [
        sys.executable,
        "-c",
        f"from tests.engine.parallel.test_two_gpus import lose_a_rank; lose_a_rank({graphs})",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


def lose_a_rank(graphs: bool) -> None:
    llm = start(2, 1, cuda_graphs=graphs)
    (follower,) = children()
    errors: list[EngineFailed] = []
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    def generate() -> None:
        try:
            llm.generate(PROMPTS, long)
        except EngineFailed as error:
            errors.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    while llm.engine.snapshot().num_running < len(PROMPTS):
        assert thread.is_alive(), "the answers ended before the rank could be killed"
        time.sleep(0.01)
    os.kill(follower, signal.SIGKILL)
    killed_at_s = time.monotonic()
    thread.join(BROKEN_S)
    assert not thread.is_alive(), "rank 0 waits on its GPU for a rank that is dead"
    assert errors, "the answers ended as if nothing had happened"
    print(f"raised {time.monotonic() - killed_at_s:.2f} s after the kill: {errors[0]}")
    llm.close()
    with start(2, 1, cuda_graphs=graphs) as other:
        assert_golden(other)
