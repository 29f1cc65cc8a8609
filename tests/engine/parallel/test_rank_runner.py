"""Whole engines over ranks that are threads: random models of awkward sizes give the answers of one rank.

Only the processes are missing: scheduler, plans, ring, exchanges between ranks and sampling are the real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.model_runner import BuiltRunner, build_model_runner
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.parallel.follower import Follower
from manta.engine.parallel.groups import Groups
from manta.engine.parallel.link import DriverLink, FollowerLink
from manta.engine.parallel.place import RankPlace
from manta.engine.parallel.sharded_runner import ShardedRunner
from manta.engine.parallel.vitals import StepClock
from manta.engine.plan import Runner
from manta.engine.prefix_cache import BlockHasher, PrefixCache
from manta.engine.request import EngineRequest, RequestDelta, SamplingParams
from manta.engine.scheduler import Scheduler, SchedulerLimits
from manta.engine.stats import EngineInfo
from tests.engine.parallel.gangs import LocalStore, members
from tests.engine.parallel.ranks import on_ranks
from tests.engine.parallel.shards import random_shape

PROMPTS = [[5, 6, 7] * 9, [1, 2] * 40, [300, 4, 9], [5, 6, 7] * 9 + [8]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, seed=0, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, seed=0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, seed=3, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=12, seed=4, min_tokens=5, logit_bias={7: 3.0}),
]
SIZES: dict[str, Any] = {"num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 16}
"""Prompts come in chunks; not all of them fit at once with their answers."""


class NoWatch:
    """Stands in for the watch of ranks that live as long as their threads."""

    steps: StepClock | None = None
    error = None
    is_left_alone = False

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def cause_of(self, error: Exception) -> Exception:
        return error

    def fail(self, error: Exception) -> None:
        raise error


def build(shape: ModelShape, place: RankPlace, groups: Groups | None) -> BuiltRunner:
    config = EngineConfig.build("random", device="cpu", dtype="float32", load_format="dummy", **SIZES)
    source = ModelSource("random", "dummy", Path(), None)
    return build_model_runner(config, source, shape, place=place, groups=groups)


def core_of(runner: Runner, built: BuiltRunner, shape: ModelShape, num_micro_batches: int) -> EngineCore:
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=built.max_num_batched_tokens,
        max_num_waiting=10,
        max_model_len=built.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=(2,),
        num_micro_batches=num_micro_batches,
    )
    scheduler = Scheduler(limits, PrefixCache(built.num_blocks), BlockHasher(built.block_size, domain="random"))
    info = EngineInfo(
        model_name="random",
        max_model_len=built.max_model_len,
        vocab_size=shape.vocab_size,
        block_size=built.block_size,
        num_blocks=built.num_blocks,
        max_num_seqs=4,
        max_num_waiting=10,
        device="cpu",
        dtype="float32",
    )
    return EngineCore(scheduler, runner, info)


def answers(core: EngineCore) -> dict[str, list[RequestDelta]]:
    deltas: dict[str, list[RequestDelta]] = {}
    for round_ in range(2):  # the second finds what the first has left in the cache
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            name = f"{round_}.{index}"
            assert core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)) is None
        while core.has_work:
            for delta in core.step():
                deltas.setdefault(delta.request_id, []).append(delta)
            core.scheduler.check()
    assert core.snapshot().num_used_blocks == 0
    assert core.snapshot().num_cached_tokens > 0
    core.close()
    return deltas


def answers_of_gang(
    shape: ModelShape, *, tp: int, pp: int, nodes: tuple[str, ...] = ()
) -> dict[str, list[RequestDelta]]:
    gang, store = members(tp, pp, nodes=nodes), LocalStore()

    def work(place: RankPlace, groups: Groups) -> dict[str, list[RequestDelta]]:
        watch: Any = NoWatch()
        if not place.is_driver:
            link = FollowerLink(gang[place.rank], store)
            Follower(EngineConfig(), gang[place.rank])._follow(build(shape, place, groups).runner, link, watch)
            link.close()
            return {}
        link = DriverLink(gang[0], store)
        built = build(shape, place, groups)
        link.wait_for_followers(20, watch.check)
        runner = ShardedRunner(built.runner, link, watch, StepClock(), samples_here=place.samples)
        return answers(core_of(runner, built, shape, pp))

    return on_ranks(work, tp_size=tp, pp_size=pp)[0]


@pytest.mark.parametrize(
    ("model", "tp", "pp"),
    [
        ({"q": 8, "kv": 2}, 2, 1),
        ({"q": 8, "kv": 1}, 4, 1),
        ({"q": 9, "kv": 3}, 2, 1),
        ({"q": 8, "kv": 4, "num_layers": 5}, 1, 2),
        ({"q": 8, "kv": 4, "num_layers": 3, "tie_word_embeddings": True}, 1, 3),
        ({"q": 6, "kv": 2, "vocab_size": 331}, 2, 2),
    ],
    ids=str,
)
def test_a_gang_gives_the_answers_of_one_rank(model: dict[str, Any], tp: int, pp: int):
    check(random_shape(**model), tp=tp, pp=pp)


def test_stages_on_other_nodes_follow_over_the_network():
    nodes = ("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2")
    check(random_shape(q=6, kv=2), tp=2, pp=2, nodes=nodes)


def check(shape: ModelShape, *, tp: int, pp: int, nodes: tuple[str, ...] = ()) -> None:
    alone = build(shape, RankPlace(0), None)
    expected = answers(core_of(alone.runner, alone, shape, 1))
    found = answers_of_gang(shape, tp=tp, pp=pp, nodes=nodes)
    assert found.keys() == expected.keys()
    for name, deltas in expected.items():
        assert tokens_of(found[name]) == tokens_of(deltas), name
        assert logprobs_of(found[name]) == pytest.approx(logprobs_of(deltas), abs=1e-4)


def tokens_of(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def logprobs_of(deltas: list[RequestDelta]) -> list[float]:
    entries = [
        entry for delta in deltas for entry in [*(delta.prompt_logprobs or []), *(delta.logprobs or [])] if entry
    ]
    return [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]
