"""What must hold however a model is split over ranks and nodes: the tokens of one rank, under every kind of stress.

The served engine has 24 blocks of 16 tokens and takes 24 tokens a step: the longest prompts come in chunks, and eleven
requests at once lose their blocks to each other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from manta import LLM, SamplingParams
from manta.bench.node_lab import NodeLab
from tests.cluster_nodes.lab import (
    MAX_MODEL_LEN,
    MODEL,
    PROMPTS,
    ClusterServed,
    assert_golden_tokens,
    lose_rank,
    note,
    occupied,
    ranks_on,
    seconds_until,
    served,
)
from tests.replicas.edge.server import COMPLETIONS, at_once
from tests.replicas.edge.test_cases_model import (
    GOLDEN,
    body_of,
)

STEP_TOKENS = 24
NUM_BLOCKS = 24
NUM_SEEDS = 8
SEEDED: dict[str, Any] = {"max_tokens": 32, "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.4}
SEEDED |= {"repetition_penalty": 1.1, "ignore_eos": True}


@dataclass(frozen=True)
class Split:
    """Ranks of one engine."""

    tp: int
    pp: int

    @property
    def name(self) -> str:
        """For reports."""
        return f"TP {self.tp} x PP {self.pp}"


def serve_split(lab: NodeLab, split: Split) -> Iterator[ClusterServed]:
    """The engine split so, each stage on a node of its own; for a fixture."""
    sizes = {"tensor_parallel_size": split.tp, "pipeline_parallel_size": split.pp}
    with ExitStack() as stack:
        if split.tp == 1:  # a node of 2 CPUs would hold several stages of one rank
            stack.enter_context(occupied(lab, free_cpus=0.95))
        yield stack.enter_context(served(lab, num_blocks=NUM_BLOCKS, max_num_batched_tokens=STEP_TOKENS, **sizes))


def prompts() -> list[str]:
    """Of seeded requests."""
    return [f"{golden['prompt']} " for golden in GOLDEN[:NUM_SEEDS]]


def tokens_of_one_rank() -> list[list[int]]:
    """Seeded and penalized outputs of one rank in this process, undisturbed."""
    llm = LLM(MODEL, device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN, cpu_cache_gib=0.2)
    try:
        sampling = [SamplingParams(seed=seed, **SEEDED) for seed in range(NUM_SEEDS)]
        return [output.outputs[0].token_ids for output in llm.generate(prompts(), sampling)]
    finally:
        llm.close()


class SplitCases:
    """A subclass says which split; its module has the fixtures `lab`, `engine` (of serve_split, for the class)
    and `one_rank` (of tokens_of_one_rank)."""

    split: ClassVar[Split]

    def test_stages_lie_on_nodes_of_their_own(self, lab: NodeLab, engine: ClusterServed) -> None:
        split = self.split
        (ranks,) = engine.gangs().values()
        assert [rank["state"] for rank in ranks] == ["up"] * (split.tp * split.pp)
        stages = [{rank["address"] for rank in ranks if rank["rank"] // split.tp == stage} for stage in range(split.pp)]
        assert [len(addresses) for addresses in stages] == [1] * split.pp
        assert len(set.union(*stages)) == split.pp
        assert set.union(*stages) <= {node.address for node in lab.workers}
        assert ranks_on(lab) == {rank["pid"]: rank["address"] for rank in ranks}

    def test_golden_tokens_in_chunks_and_with_preemptions(self, engine: ClusterServed) -> None:
        assert max(len(golden["prompt_ids"]) for golden in PROMPTS) > STEP_TOKENS
        server = engine.server
        before = server.metric("manta_preemptions_total")
        assert_golden_tokens(server)
        seconds_until(lambda: server.metric("manta_preemptions_total") > before, within_s=5)
        server.assert_idle(within_s=5)

    def test_golden_tokens_from_a_warm_prefix_cache(self, engine: ClusterServed) -> None:
        server = engine.server
        golden = max(GOLDEN, key=lambda one: len(one["prompt_ids"]))
        path, body = body_of(golden)
        expected = golden["continuation_ids"][:16]
        before = server.metric("manta_cached_prompt_tokens_total")
        for _ in range(2):
            answer = server.ok(path, **{**body, "max_tokens": len(expected)})
            assert answer["choices"][0]["token_ids"] == expected
        seconds_until(lambda: server.metric("manta_cached_prompt_tokens_total") - before >= 32, within_s=5)

    def test_seeds_and_penalties_give_what_they_give_on_one_rank(
        self, engine: ClusterServed, one_rank: list[list[int]]
    ) -> None:
        server = engine.server
        body = {**SEEDED, "return_token_ids": True}

        def ask(seed: int, prompt: str) -> list[int]:
            return server.ok(COMPLETIONS, prompt=prompt, seed=seed, **body)["choices"][0]["token_ids"]

        asked = at_once([lambda seed=i, prompt=text: ask(seed, prompt) for i, text in enumerate(prompts())])
        assert asked == one_rank


class FrozenRankCase:
    """Beside SplitCases."""

    split: ClassVar[Split]

    def test_a_frozen_rank_is_out_of_routing_in_5_seconds_and_no_client_notices(self, engine: ClusterServed) -> None:
        (before,) = engine.gangs()
        last = self.split.tp * self.split.pp - 1
        took = lose_rank(engine, before, last, signal.SIGSTOP)
        note(f"{self.split.name}, alone, rank {last}, SIGSTOP", **took)
        assert took["out_of_routing_s"] < 5.0
        assert before not in engine.gangs()
