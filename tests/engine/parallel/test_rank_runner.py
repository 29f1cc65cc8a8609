"""Whole engines over ranks that are threads: random models of awkward sizes give the answers of one rank.

Only the processes are missing: scheduler, plans, ring, exchanges between ranks and sampling are the real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.decode_step import DecodeOutputs, DecodeStep, Draw
from manta.engine.layers.attention import LayerCache
from manta.engine.model_runner import BuiltRunner, MakeRunner, build_model_runner
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.decoder import Decoder
from manta.engine.parallel.follower import Follower
from manta.engine.parallel.groups import Groups
from manta.engine.parallel.link import DriverLink, FollowerLink
from manta.engine.parallel.place import RankPlace
from manta.engine.parallel.rank_runner import RankRunner
from manta.engine.parallel.sharded_runner import ShardedRunner
from manta.engine.parallel.vitals import StepClock
from manta.engine.plan import Runner
from manta.engine.prefix_cache import BlockHasher, PrefixCache
from manta.engine.request import EngineRequest, RequestDelta, SamplingParams
from manta.engine.runner import RunnerOptions
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
PLAIN = [
    SamplingParams(temperature=0, max_tokens=16, seed=0, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, seed=0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, seed=3, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=10, seed=4, ignore_eos=True),
]
"""What ends a step is drawn by the step itself: at first with a filter, then without, in the end the largest."""
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


def build(
    shape: ModelShape, place: RankPlace, groups: Groups | None, make_runner: MakeRunner | None = None
) -> BuiltRunner:
    config = EngineConfig.build("random", device="cpu", dtype="float32", load_format="dummy", **SIZES)
    source = ModelSource("random", "dummy", Path(), None)
    return build_model_runner(config, source, shape, place=place, groups=groups, make_runner=make_runner)


Build = Callable[[ModelShape, RankPlace, Groups | None], BuiltRunner]
build_alone = build


def build_padded(shape: ModelShape, place: RankPlace, groups: Groups | None) -> BuiltRunner:
    """A rank whose small steps take the path that CUDA graphs capture."""
    assert groups is not None

    def make(model: Decoder, caches: list[LayerCache], *, device: torch.device, options: RunnerOptions) -> RankRunner:
        options = dataclasses.replace(options, pads_decodes=True, max_padded_tokens=SIZES["max_num_batched_tokens"])
        return RankRunner(model, caches, device=device, options=options, groups=groups)

    return build(shape, place, groups, make_runner=make)


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


def answers(core: EngineCore, asked: list[SamplingParams]) -> dict[str, list[RequestDelta]]:
    deltas: dict[str, list[RequestDelta]] = {}
    for round_ in range(2):  # the second finds what the first has left in the cache
        for index, (prompt, params) in enumerate(zip(PROMPTS, asked, strict=True)):
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
    shape: ModelShape,
    *,
    tp: int,
    pp: int,
    nodes: tuple[str, ...] = (),
    build: Build = build,
    asked: list[SamplingParams],
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
        return answers(core_of(runner, built, shape, pp), asked)

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


@pytest.mark.parametrize(
    ("model", "tp"), [({"q": 8, "kv": 2}, 2), ({"q": 9, "kv": 3, "vocab_size": 331}, 3)], ids=["even", "uneven"]
)
def test_padded_steps_of_ranks_that_share_layers_give_the_answers_of_one(
    model: dict[str, Any], tp: int, monkeypatch: pytest.MonkeyPatch
):
    kinds: set[tuple[Draw, bool]] = set()
    run = DecodeStep.run

    def noted(step: DecodeStep) -> DecodeOutputs:
        assert step._share is not None
        kinds.add((step._kind.draw, step._share.draws))
        return run(step)

    monkeypatch.setattr(DecodeStep, "run", noted)
    for asked in (PARAMS, PLAIN):
        check(random_shape(**model), tp=tp, pp=1, build=build_padded, asked=asked)
    assert kinds == {(draw, draws) for draw in Draw for draws in (True, False)}


def test_stages_on_other_nodes_follow_over_the_network():
    nodes = ("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2")
    check(random_shape(q=6, kv=2), tp=2, pp=2, nodes=nodes)


def check(
    shape: ModelShape,
    *,
    tp: int,
    pp: int,
    nodes: tuple[str, ...] = (),
    build: Build = build,
    asked: list[SamplingParams] = PARAMS,
) -> None:
    alone = build_alone(shape, RankPlace(0), None)
    expected = answers(core_of(alone.runner, alone, shape, 1), asked)
    found = answers_of_gang(shape, tp=tp, pp=pp, nodes=nodes, build=build, asked=asked)
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
