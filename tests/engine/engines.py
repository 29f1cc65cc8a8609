"""Scheduler and core of literal sizes, and a model without a device whose next token follows from all before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from manta.engine.core import EngineCore
from manta.engine.prefix_cache import BlockHasher, PrefixCache
from manta.engine.request import EngineRequest, SamplingParams
from manta.engine.scheduler import Scheduler, SchedulerLimits
from manta.engine.sim import SimRunner
from manta.engine.stats import EngineInfo

MakeCore = Callable[..., EngineCore]


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int | None = None,
    max_num_waiting: int = 100,
    eos: tuple[int, ...] = (),
    prefix_caching: bool = True,
    micro_batches: int = 1,
    max_mixed_prefill_tokens: int | None = None,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_waiting=max_num_waiting,
        max_model_len=max_model_len or num_blocks * block_size,
        vocab_size=1000,
        eos_token_ids=eos,
        enable_prefix_caching=prefix_caching,
        num_micro_batches=micro_batches,
        max_mixed_prefill_tokens=max_mixed_prefill_tokens,
    )
    return Scheduler(limits, PrefixCache(num_blocks), BlockHasher(block_size, domain="test"))


def make_core(**sizes: Any) -> EngineCore:
    scheduler = make_scheduler(**sizes)
    runner = SimRunner(lambda step: 0.0, vocab_size=1000, clock=lambda: 0.0)
    pool = scheduler.cache.pool
    info = EngineInfo(
        model_name="sim",
        max_model_len=scheduler.limits.max_model_len,
        vocab_size=1000,
        block_size=4,
        num_blocks=pool.num_blocks,
        max_num_seqs=scheduler.limits.max_num_seqs,
        max_num_waiting=scheduler.limits.max_num_waiting,
        device="sim",
        dtype="float32",
    )
    return EngineCore(scheduler, runner, info)


def request(
    name: str, prompt: list[int], *, priority: int = 0, salt: str | None = None, **params: Any
) -> EngineRequest:
    defaults = {"max_tokens": 4, "temperature": 0.0, "seed": 0}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**{**defaults, **params}),
        priority=priority,
        cache_salt=salt,
    )


def run(core: EngineCore, *requests: EngineRequest, check: bool = True) -> dict[str, list[int]]:
    """Run requests to their end. Returns token ids by request id."""
    tokens: dict[str, list[int]] = {}
    for r in requests:
        assert core.add(r) is None
        tokens[r.request_id] = []
    while core.has_work:
        for delta in core.step():
            tokens[delta.request_id].extend(delta.token_ids)
        if check:
            core.scheduler.check()
    return tokens


@pytest.fixture
def core() -> EngineCore:
    return make_core()
