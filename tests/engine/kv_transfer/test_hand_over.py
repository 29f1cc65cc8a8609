"""Prefill in one engine, decode in another, over the real transport: tokens of one engine, whatever happens on the way.

A tiny model with random weights in float32; every transfer carries checksums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from manta.engine.core import EngineCore
from manta.engine.request import SamplingParams
from manta.engine.stats import Snapshot
from tests.engine.kv_transfer.kv_gangs import Proxy
from tests.engine.kv_transfer.pairs import Pair, alone, start, tiny_model, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0, ignore_eos=True)


def prompt_of(length: int, *, first: int = 0) -> list[int]:
    """Tokens that follow no pattern the model could go on with."""
    return [20 + (37 * (index + first) ** 2 + 11 * index) % 280 for index in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[EngineCore]:
    """The engine that does everything itself."""
    core = start(model, kv_transfer=False)
    yield core
    core.close()


@pytest.fixture(scope="module")
def shared_pair(model: str) -> Iterator[Pair]:
    with Pair(start(model), start(model)) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """With empty caches; it must leave nothing behind."""
    shared_pair.forget_cached()
    yield shared_pair
    shared_pair.run_until(lambda: shared_pair.is_idle)


def quick_pair(model: str, **overrides: Any) -> Pair:
    """With little patience."""
    return Pair(start(model, **overrides), start(model, **overrides))


class Counts:
    """What transfers there were since."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._before = self._now()

    def _now(self) -> list[Snapshot]:
        return [self._pair.p.snapshot(), self._pair.d.snapshot()]

    def __call__(self) -> tuple[int, int, int]:
        """Sent by P, received by D, computed again by D."""
        (p, d), (p0, d0) = self._now(), self._before
        return (
            p.num_kv_sent - p0.num_kv_sent,
            d.num_kv_received - d0.num_kv_received,
            d.num_kv_recomputed - d0.num_kv_recomputed,
        )

    @property
    def num_bytes(self) -> int:
        return self._now()[1].num_kv_bytes - self._before[1].num_kv_bytes


TOKEN_BYTES = 2 * 3 * 3 * 8 * 4
"""Keys and values, layers, KV heads, head_dim, float32."""


def test_prompts_of_1_to_70_tokens_give_the_tokens_of_one_engine(pair: Pair, one: EngineCore):
    prompts = [prompt_of(length, first=length) for length in range(1, 71)]
    expected = [tokens_of(deltas) for deltas in alone(one, prompts, GREEDY)]
    assert len({tuple(tokens) for tokens in expected}) > 60
    counts = Counts(pair)
    for prompt in prompts:
        pair.begin(f"n{len(prompt)}", prompt, GREEDY)
        pair.run(f"n{len(prompt)}")
    assert [pair.tokens[f"n{len(prompt)}"] for prompt in prompts] == expected
    assert counts() == (70, 70, 0)


def test_many_at_once_give_the_tokens_of_one_engine(pair: Pair, one: EngineCore):
    prompts = [prompt_of(length, first=3 * length) for length in (64, 16, 7, 33, 48, 70, 1, 32, 100, 17, 31, 80)]
    expected = [tokens_of(deltas) for deltas in alone(one, prompts, GREEDY)]
    counts = Counts(pair)
    names = [f"many{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        pair.begin(name, prompt, GREEDY)
    pair.run(*names)
    assert [pair.tokens[name] for name in names] == expected
    assert counts() == (12, 12, 0)


def test_tokens_would_show_kv_that_did_not_come(pair: Pair, one: EngineCore):
    prompt = prompt_of(40)
    pair.begin("zeroed", prompt, GREEDY)
    pair.run_until(lambda: pair.tokens["zeroed"], hands_on=False)
    pair.run_until(lambda: not pair.p.snapshot().num_kv_leases, hands_on=False)
    for layer in pair.d._runner.caches:  # type: ignore[attr-defined]
        for tensor in layer.tensors:
            tensor.zero_()
    pair.go_on("zeroed")
    pair.run("zeroed")
    assert pair.tokens["zeroed"] != tokens_of(alone(one, [prompt], GREEDY)[0])


def test_prefix_hits_of_d_are_not_sent(pair: Pair, one: EngineCore):
    prompt = prompt_of(45)
    alone(pair.d, [prompt[:32]], GREEDY)
    counts = Counts(pair)
    pair.begin("hit-d", prompt, GREEDY)
    pair.run("hit-d")
    assert pair.tokens["hit-d"] == tokens_of(alone(one, [prompt], GREEDY)[0])
    assert counts() == (1, 1, 0)
    assert counts.num_bytes < 45 * TOKEN_BYTES
    assert counts.num_bytes >= 13 * TOKEN_BYTES


def test_prefix_hits_of_p_are_sent_and_not_computed(pair: Pair, one: EngineCore):
    prompt = prompt_of(45)
    alone(pair.p, [prompt], GREEDY)
    counts, cached = Counts(pair), pair.p.snapshot().num_cached_tokens
    pair.begin("hit-p", prompt, GREEDY)
    pair.run("hit-p")
    assert pair.tokens["hit-p"] == tokens_of(alone(one, [prompt], GREEDY)[0])
    assert pair.deltas["hit-p"][0].num_cached_tokens == 32
    assert pair.p.snapshot().num_cached_tokens - cached == 32
    assert counts() == (1, 1, 0)
    assert counts.num_bytes >= 45 * TOKEN_BYTES


def test_a_prompt_that_d_has_whole_needs_no_transfer(pair: Pair, one: EngineCore):
    prompt = prompt_of(48)
    alone(pair.d, [prompt], GREEDY)
    counts = Counts(pair)
    pair.begin("whole", prompt, GREEDY)
    pair.run("whole")
    assert pair.tokens["whole"] == tokens_of(alone(one, [prompt], GREEDY)[0])
    assert (counts(), counts.num_bytes) == ((1, 1, 0), 0)


ASKED = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12),
    SamplingParams(temperature=1.0, seed=4, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0, max_tokens=12, presence_penalty=1.5, logprobs=3),
    SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, logprobs=1),
    SamplingParams(temperature=0.7, seed=5, max_tokens=12, min_tokens=12, logit_bias={28: 4.0, 30: -100.0}),
]


@pytest.mark.parametrize("params", ASKED, ids=["top-p", "penalties", "logprobs", "prompt logprobs", "bias"])
def test_draws_penalties_and_logprobs_go_on_as_in_one_engine(pair: Pair, one: EngineCore, params: SamplingParams):
    prompt = prompt_of(37)
    expected = alone(one, [prompt], params)[0]
    counts = Counts(pair)
    name = f"asked-{ASKED.index(params)}"
    pair.begin(name, prompt, params)
    pair.run(name)
    found = pair.deltas[name]
    assert tokens_of(found) == tokens_of(expected)
    if params.logprobs is not None:
        pairs = [[one.logprob for delta in deltas for one in delta.logprobs or []] for deltas in (found, expected)]
        assert pairs[0] == pytest.approx(pairs[1], abs=1e-4)
        assert len(pairs[0]) == len(tokens_of(expected))
    if params.prompt_logprobs is not None:
        prompts = [[one and one.logprob for one in deltas[0].prompt_logprobs or []] for deltas in (found, expected)]
        assert prompts[0][1:] == pytest.approx(prompts[1][1:], abs=1e-4)
        assert len(prompts[0]) == 37
    assert counts() == (1, 1, 0)


@pytest.fixture(scope="module")
def three(model: str) -> Iterator[EngineCore]:
    """An engine of three ranks."""
    core = start(model, tensor_parallel_size=3)
    yield core
    core.close()


@pytest.mark.parametrize("is_up", [True, False], ids=["TP 1 to 3", "TP 3 to 1"])
def test_unequal_splits_give_the_tokens_of_one_engine(pair: Pair, three: EngineCore, one: EngineCore, is_up: bool):
    prompts = [prompt_of(length, first=length) for length in (1, 5, 15, 16, 17, 31, 32, 33, 64, 70)]
    expected = [tokens_of(deltas) for deltas in alone(one, prompts, GREEDY)]
    split = Pair(pair.p, three) if is_up else Pair(three, pair.p)
    split.forget_cached()
    for round_ in ("cold", "hits of both", "hits of p", "hits of d"):
        if round_ in ("hits of p", "hits of d"):
            core = split.d if round_ == "hits of p" else split.p
            core.scheduler.cache.pool.evict_all()
        counts = Counts(split)
        names = [f"{round_}{len(prompt)}" for prompt in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            split.begin(name, prompt, GREEDY)
        split.run(*names)
        assert [split.tokens[name] for name in names] == expected
        assert counts() == (10, 10, 0)


def test_a_request_that_is_abandoned_leaves_nothing_on_any_rank(pair: Pair, three: EngineCore):
    for p, d in ((pair.p, three), (three, pair.p)):
        split = Pair(p, d)
        for num_turns in range(8):
            name = f"quit{num_turns}"
            split.begin(name, prompt_of(90, first=num_turns), GREEDY)
            for _ in range(num_turns):
                split.turn()
            split.p.cancel(name)
            split.d.cancel(name)
            split.d.release(f"t-{name}")
        split.run_until(lambda split=split: split.is_idle)


def test_a_link_that_is_cut_is_no_loss_but_time(pair: Pair, one: EngineCore):
    prompt, counts = prompt_of(60), Counts(pair)
    with Proxy(pair.peer.rank_urls[0]) as proxy:
        proxy.goes_on.clear()
        pair.begin("cut", prompt, GREEDY, to=proxy.peer(pair.peer))
        pair.run_until(lambda: len(pair.tokens["cut"]) == 1 and pair.d.snapshot().num_waiting)
        assert pair.d.snapshot().num_kv_leases == 1
        proxy.cut()
        pair.run("cut")
    assert pair.tokens["cut"] == tokens_of(alone(one, [prompt], GREEDY)[0])
    assert counts() == (0, 0, 1)
    pair.begin("again", prompt_of(61), GREEDY)
    pair.run("again")
    assert counts() == (1, 1, 1)


def test_a_slow_link_is_waited_for_a_little_and_then_its_blocks_are_let_go(model: str, one: EngineCore):
    prompt = prompt_of(60)
    with quick_pair(model, kv_wait_s=0.3) as pair, Proxy(pair.peer.rank_urls[0]) as proxy:
        proxy.goes_on.clear()
        pair.begin("slow", prompt, GREEDY, to=proxy.peer(pair.peer))
        pair.run_until(lambda: "slow" in pair.ended)
        assert pair.tokens["slow"] == tokens_of(alone(one, [prompt], GREEDY)[0])
        assert pair.d.snapshot().num_kv_recomputed == 1
        proxy.goes_on.set()
        pair.run_until(lambda: pair.is_idle)
        pair.forget_cached()
        pair.begin("again", prompt, GREEDY)
        pair.run("again")
        assert pair.tokens["again"] == pair.tokens["slow"]
        assert pair.d.snapshot().num_kv_received == 1


def test_blocks_that_no_request_takes_are_free_when_their_lease_is_over(model: str):
    with quick_pair(model, kv_lease_s=0.3) as pair:
        pair.begin("left", prompt_of(40), GREEDY)
        pair.run_until(lambda: pair.tokens["left"] and not pair.p.snapshot().num_kv_leases, hands_on=False)
        assert pair.d.snapshot().num_kv_leases == 1
        begun_s = time.monotonic()
        pair.run_until(lambda: pair.is_idle)
        assert time.monotonic() - begun_s < 10
        assert pair.p.snapshot().num_kv_sent == 1


def test_the_end_of_p_lets_its_requests_be_computed(model: str, one: EngineCore):
    prompt, d = prompt_of(60), start(model, kv_wait_s=0.5)
    with Pair(start(model), d) as pair, Proxy(pair.peer.rank_urls[0]) as proxy:
        proxy.goes_on.clear()
        pair.begin("orphan", prompt, GREEDY, to=proxy.peer(pair.peer))
        pair.run_until(lambda: len(pair.tokens["orphan"]) == 1 and d.snapshot().num_waiting)
        pair.p.close()
        proxy.goes_on.set()
        proxy.cut()
        pair.p = start(model)  # another one takes its place
        pair.run("orphan")
        assert pair.tokens["orphan"] == tokens_of(alone(one, [prompt], GREEDY)[0])
        assert d.snapshot().num_kv_recomputed == 1
        pair.begin("next", prompt_of(61), GREEDY)
        pair.run("next")
        assert d.snapshot().num_kv_received == 1


def test_the_end_of_d_lets_p_free_its_blocks(model: str):
    with Pair(start(model), start(model)) as pair, Proxy(pair.peer.rank_urls[0]) as proxy:
        proxy.goes_on.clear()
        pair.begin("gone", prompt_of(60), GREEDY, to=proxy.peer(pair.peer))
        pair.run_until(lambda: pair.tokens["gone"] and proxy._sockets, hands_on=False)
        assert pair.p.snapshot().num_kv_leases == 1
        pair.d.close()
        proxy.goes_on.set()
        proxy.cut()
        pair.d = start(model)
        pair.run_until(lambda: pair.is_idle)
        assert pair.p.snapshot().num_kv_sent == 0


@pytest.mark.parametrize("phase", ["queued", "asked", "sending", "waiting", "decoding"])
def test_a_request_that_is_abandoned_leaves_nothing_whatever_its_phase(pair: Pair, one: EngineCore, phase: str):
    name, prompt = f"quit-{phase}", prompt_of(100, first=len(phase))
    with Proxy(pair.peer.rank_urls[0]) as proxy:
        if phase in ("sending", "waiting"):
            proxy.goes_on.clear()
        pair.begin(name, prompt, GREEDY, to=proxy.peer(pair.peer))
        if phase == "asked":
            pair.p.step()
        elif phase == "sending":
            pair.run_until(lambda: pair.d.snapshot().num_kv_leases and pair.p.snapshot().num_kv_leases)
            pair.run_until(lambda: pair.p.snapshot().num_steps, hands_on=False)
        elif phase == "waiting":
            pair.run_until(lambda: pair.d.snapshot().num_waiting)
        elif phase == "decoding":
            pair.run_until(lambda: len(pair.tokens[name]) == 3)
        pair.p.cancel(name)
        pair.d.cancel(name)
        pair.d.release(f"t-{name}")
        tokens = list(pair.tokens[name])
        pair.turn()
        proxy.goes_on.set()
        pair.run_until(lambda: pair.is_idle)
        assert pair.tokens[name] == tokens
    pair.begin(f"after-{phase}", prompt, GREEDY)
    pair.run(f"after-{phase}")
    assert pair.tokens[f"after-{phase}"] == tokens_of(alone(one, [prompt], GREEDY)[0])


def test_a_full_d_computes_when_it_has_room(model: str, one: EngineCore):
    prompt, long = prompt_of(60, first=5), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Pair(start(model), start(model, num_blocks=8)) as pair:
        pair.begin("big", prompt_of(70), long)
        pair.run_until(lambda: len(pair.tokens["big"]) > 2)
        pair.begin("late", prompt, GREEDY)
        pair.run("big", "late")
        assert pair.tokens["late"] == tokens_of(alone(one, [prompt], GREEDY)[0])
        assert (pair.d.snapshot().num_kv_received, pair.d.snapshot().num_kv_recomputed) == (1, 1)


def test_decode_side_preemption_leaves_no_trace(model: str, one: EngineCore):
    prompts = [prompt_of(15, first=index) for index in range(4)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [tokens_of(deltas) for deltas in alone(one, prompts, params)]
    with Pair(start(model), start(model, num_blocks=10, max_model_len=64)) as pair:
        for index, prompt in enumerate(prompts):
            pair.begin(f"r{index}", prompt, params)
        pair.run("r0", "r1", "r2", "r3")
        assert [pair.tokens[f"r{index}"] for index in range(4)] == expected
        assert pair.d.snapshot().num_preemptions > 0
        assert pair.d.snapshot().num_kv_received > 0


def test_an_engine_that_takes_no_part_computes_what_it_gets(model: str, one: EngineCore):
    prompt = prompt_of(40)
    with Pair(start(model), start(model)) as pair:
        peer = pair.peer
        pair.d.close()
        pair.d = start(model, kv_transfer=False)
        pair.begin("plain", prompt, GREEDY, to=peer)
        pair.run_until(lambda: "plain" in pair.ended)
        assert pair.tokens["plain"] == tokens_of(alone(one, [prompt], GREEDY)[0])
        assert pair.d.info.kv is None
