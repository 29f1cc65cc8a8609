"""Hand-overs between whole cores without a model: what arrives when, who waits for what, a random walk with faults."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from manta.engine.kv_transfer.messages import SendKv, TakeKv
from manta.engine.request import EngineRequest, FinishReason
from tests.engine.engines import make_core, request, run
from tests.engine.kv_transfer.wires import Wire, WiredEngine

PROMPT = list(range(1, 11))
"""Two blocks of 4 tokens and a half."""


class Pair:
    """P and D of one wire, and the part of an edge: the first token that P sends goes on to D."""

    def __init__(self, wire: Wire | None = None, *, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None):
        self.wire = wire or Wire()
        self.p, self.d = WiredEngine(self.wire, "p", **(p or {})), WiredEngine(self.wire, "d", **(d or {}))
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.requests: dict[str, EngineRequest] = {}

    def begin(self, asked: EngineRequest) -> None:
        ticket, name = f"t-{asked.request_id}", asked.request_id
        self.requests[name], self.tokens[name] = asked, []
        self.d.core.expect(ticket, asked.prompt_token_ids, asked.cache_salt)
        params = msgspec.structs.replace(asked.params, max_tokens=1)
        first = msgspec.structs.replace(asked, params=params, handoff=SendKv(ticket, self.d.peer))
        assert self.p.core.add(first) is None

    def go_on(self, name: str) -> None:
        """D gets the request with P's token."""
        handoff = TakeKv(f"t-{name}")
        after = msgspec.structs.replace(self.requests[name], output_token_ids=list(self.tokens[name]), handoff=handoff)
        assert self.d.core.add(after) is None

    def turn(self, *, hands_on: bool = True) -> None:
        """Both loops once."""
        for engine in (self.p, self.d):
            engine.core.poll()
            for delta in engine.core.step() if engine.core.has_work else []:
                self.tokens[delta.request_id] += delta.token_ids
                if engine is self.d:
                    if delta.finish_reason is not None:
                        self.ended.add(delta.request_id)
                elif hands_on:
                    self.go_on(delta.request_id)
            engine.check()

    def settle(self) -> None:
        """Until all is over."""
        for _ in range(300):
            self.wire.deliver()
            self.turn()
            self.wire.now_s += 0.1

    def leaves_nothing(self) -> None:
        for engine in (self.p, self.d):
            snapshot = engine.core.snapshot()
            assert (snapshot.num_used_blocks, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
            assert snapshot.num_kv_leases == 0
            assert not any(rank.reads or rank.writes for rank in engine.ranks)


def colocated(asked: EngineRequest) -> list[int]:
    return run(make_core(), msgspec.structs.replace(asked, handoff=None))[asked.request_id]


def test_the_tokens_are_those_of_one_engine_and_nothing_is_computed_twice():
    pair = Pair(p={"budget": 4})
    pair.begin(request("a", PROMPT, max_tokens=6))
    pair.settle()
    assert pair.tokens["a"] == colocated(request("a", PROMPT, max_tokens=6))
    snapshot = pair.d.core.snapshot()
    assert (snapshot.num_kv_received, snapshot.num_kv_recomputed, snapshot.num_kv_bytes) == (1, 0, 80)
    assert pair.p.core.snapshot().num_kv_sent == 1
    assert snapshot.num_prompt_tokens == 10
    pair.leaves_nothing()


def test_the_first_step_of_d_computes_the_first_token_alone():
    pair = Pair()
    pair.begin(request("a", PROMPT))
    steps = []
    pair.d.core.on_step = steps.append
    pair.settle()
    assert steps[0].num_prefill_tokens == 1


def test_a_request_that_waits_for_its_kv_is_no_work():
    pair = Pair()
    pair.begin(request("a", PROMPT))
    pair.turn()
    pair.wire.deliver(1)
    pair.turn()
    pair.turn()
    assert len(pair.tokens["a"]) == 1
    assert pair.d.core.snapshot().num_waiting == 1
    assert pair.d.core.snapshot().num_prefill_tokens == 1
    for _ in range(3):
        pair.turn()
    assert not pair.d.core.has_work
    assert not pair.p.core.has_work
    assert pair.p.core.snapshot().num_kv_leases == 1
    pair.settle()
    assert pair.ended == {"a"}
    pair.leaves_nothing()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 30])
def test_prompts_of_any_length_are_handed_over(length: int):
    pair = Pair(p={"budget": 8, "num_ranks": 1}, d={"num_ranks": 3})
    prompt = list(range(1, length + 1))
    pair.begin(request("a", prompt, max_tokens=9))
    pair.settle()
    assert pair.tokens["a"] == colocated(request("a", prompt, max_tokens=9))
    assert pair.d.core.snapshot().num_kv_received == 1
    pair.leaves_nothing()


def test_what_d_has_cached_is_not_sent_and_a_whole_prompt_is_not_even_asked_for():
    pair = Pair()
    run(pair.d.core, request("before", PROMPT[:8]))
    pair.begin(request("a", PROMPT))
    pair.settle()
    assert pair.d.core.snapshot().num_kv_bytes == 16
    assert pair.d.core.snapshot().num_cached_tokens == 8
    pair.begin(request("b", PROMPT[:8]))
    pair.settle()
    snapshot = pair.d.core.snapshot()
    assert (snapshot.num_kv_received, snapshot.num_kv_recomputed, snapshot.num_kv_bytes) == (2, 0, 16)
    assert pair.tokens["b"] == colocated(request("b", PROMPT[:8]))
    pair.leaves_nothing()


def test_what_p_has_cached_is_sent_without_being_computed():
    pair = Pair()
    run(pair.p.core, request("before", PROMPT))
    pair.begin(request("a", PROMPT))
    pair.settle()
    assert pair.p.core.snapshot().num_cached_tokens == 8
    assert pair.d.core.snapshot().num_kv_bytes == 80
    pair.leaves_nothing()


def test_what_came_is_cached_for_others():
    pair = Pair()
    pair.begin(request("a", PROMPT))
    pair.settle()
    run(pair.d.core, request("b", [*PROMPT[:8], 99]))
    assert pair.d.core.snapshot().num_cached_tokens == 8


def test_a_salt_keeps_what_came_apart():
    pair = Pair()
    pair.begin(request("a", PROMPT, salt="x"))
    pair.settle()
    assert pair.d.core.snapshot().num_kv_received == 1
    run(pair.d.core, request("b", PROMPT, salt="y"))
    assert pair.d.core.snapshot().num_cached_tokens == 0


def test_without_room_d_computes_the_prompt_when_it_can():
    pair = Pair(d={"num_blocks": 8})
    pair.tokens["big"] = []
    pair.d.core.add(request("big", [500] * 22, max_tokens=10))
    pair.turn()
    pair.begin(request("a", PROMPT))
    pair.settle()
    snapshot = pair.d.core.snapshot()
    assert (snapshot.num_kv_received, snapshot.num_kv_recomputed) == (0, 1)
    assert pair.tokens["a"] == colocated(request("a", PROMPT))
    pair.leaves_nothing()


def test_requests_that_wait_for_blocks_come_before_new_reservations():
    pair = Pair(d={"num_blocks": 12})
    pair.tokens["big"] = pair.tokens["next"] = []
    pair.d.core.add(request("big", [500] * 24, max_tokens=10))
    pair.turn()
    pair.d.core.add(request("next", [501] * 36, max_tokens=2))
    pair.turn()
    pair.begin(request("a", [5] * 4))
    pair.settle()
    assert pair.d.core.snapshot().num_kv_recomputed == 1
    assert {"big", "next", "a"} <= pair.ended
    pair.leaves_nothing()


def test_reserved_blocks_need_no_place_in_the_queue():
    """Whoever waits for blocks cannot hold up those that have theirs, and would give them back in the end."""
    pair = Pair(d={"num_blocks": 8, "max_num_seqs": 1})
    pair.begin(request("a", [5] * 11, max_tokens=3))
    pair.turn()
    pair.wire.deliver()
    pair.turn()
    pair.tokens["big"] = []
    assert pair.d.core.add(request("big", [500] * 22, max_tokens=2)) is None
    pair.settle()
    assert pair.ended == {"a", "big"}
    assert pair.d.core.snapshot().num_kv_received == 1
    pair.leaves_nothing()


def test_a_preempted_sequence_that_came_is_computed_again_as_any_other():
    pair = Pair(d={"num_blocks": 9})
    names = [f"r{index}" for index in range(3)]
    for index, name in enumerate(names):
        pair.begin(request(name, [100 + index] * 6, max_tokens=12))
    pair.settle()
    assert pair.d.core.snapshot().num_preemptions > 0
    assert pair.d.core.snapshot().num_kv_received == 3
    for index, name in enumerate(names):
        assert pair.tokens[name] == colocated(request(name, [100 + index] * 6, max_tokens=12))
    pair.leaves_nothing()


def test_a_prefill_that_loses_its_blocks_gives_the_hand_over_up():
    pair = Pair(p={"num_blocks": 8, "budget": 4})
    pair.tokens["old"] = []
    pair.p.core.add(request("old", [500] * 7, max_tokens=18, priority=-1))
    for _ in range(2):
        pair.turn(hands_on=False)
    pair.begin(request("a", [5] * 19))
    for _ in range(40):
        pair.wire.deliver()
        pair.turn(hands_on=False)
        pair.wire.now_s += 0.1
    assert pair.p.core.snapshot().num_preemptions > 0
    assert len(pair.tokens["a"]) == 1
    pair.go_on("a")
    pair.settle()
    assert pair.d.core.snapshot().num_kv_recomputed == 1
    assert pair.tokens["a"] == colocated(request("a", [5] * 19))
    pair.leaves_nothing()


@pytest.mark.parametrize("num_delivered", range(14))
def test_a_request_that_is_cancelled_at_any_moment_leaves_nothing(num_delivered: int):
    pair = Pair(p={"budget": 4, "num_ranks": 2}, d={"num_ranks": 3})
    pair.begin(request("a", PROMPT))
    for _ in range(num_delivered):
        pair.turn()
        pair.wire.deliver(2)
    if not pair.d.core.cancel("a"):
        pair.p.core.cancel("a")
    pair.d.core.release("t-a")
    pair.tokens["a"] = [0]
    for _ in range(100):
        pair.wire.deliver()
        pair.turn(hands_on=False)
        pair.wire.now_s += 0.1
    pair.leaves_nothing()


def test_the_death_of_p_lets_the_request_be_computed():
    pair = Pair()
    pair.begin(request("a", PROMPT))
    for _ in range(2):
        pair.turn(hands_on=False)
        pair.wire.deliver(2)
    pair.tokens["a"] = colocated(request("a", PROMPT))[:1]
    pair.go_on("a")
    waits = 0
    while not pair.ended:
        pair.wire.now_s += 0.1
        waits += 1
        pair.d.core.poll()
        for delta in pair.d.core.step() if pair.d.core.has_work else []:
            pair.tokens["a"] += delta.token_ids
            if delta.finish_reason is FinishReason.LENGTH:
                pair.ended.add("a")
        pair.wire.deliver()
    assert 20 <= waits <= 30  # two seconds of waiting
    assert pair.tokens["a"] == colocated(request("a", PROMPT))
    assert pair.d.core.snapshot().num_kv_recomputed == 1


def test_the_death_of_d_lets_p_free_its_blocks():
    pair = Pair()
    pair.begin(request("a", PROMPT))
    for _ in range(50):
        pair.p.core.poll()
        if pair.p.core.has_work:
            pair.p.core.step()
        pair.wire.now_s += 0.1
    assert pair.p.core.snapshot().num_used_blocks == 0
    assert pair.p.core.snapshot().num_kv_leases == 0


def test_engines_that_do_not_fit_exchange_nothing():
    pair = Pair()
    pair.d.peer = msgspec.structs.replace(pair.d.peer, block_size=8)
    pair.begin(request("a", PROMPT))
    pair.settle()
    assert pair.d.core.snapshot().num_kv_recomputed == 1
    pair.leaves_nothing()


def test_a_request_that_wants_its_prompt_s_logprobs_of_d_is_computed_there():
    pair = Pair()
    pair.begin(request("a", PROMPT, prompt_logprobs=0))
    pair.settle()
    assert pair.d.core.snapshot().num_kv_recomputed == 1
    pair.leaves_nothing()


@pytest.mark.parametrize("seed", range(12))
def test_a_random_walk_of_hand_overs_loses_and_leaks_nothing(seed: int):
    rng = random.Random(seed)
    wire = Wire(rng)
    wire.loses = rng.choice([0.0, 0.0, 0.03, 0.15])
    sizes = [
        {
            "num_blocks": rng.choice([10, 16, 40]),
            "max_num_seqs": rng.randint(2, 6),
            "budget": rng.choice([8, 16, 32]),
            "max_model_len": 40,
            "prefix_caching": rng.random() < 0.8,
            "micro_batches": rng.choice([1, 1, 2]),
            "num_ranks": rng.randint(1, 3),
        }
        for _ in range(2)
    ]
    pair = Pair(wire, p=sizes[0], d=sizes[1])
    expected: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    for turn in range(500):
        if turn < 300 and rng.random() < 0.25:
            name, length = f"r{turn}", rng.randint(1, 24)
            shared = [7] * rng.choice([0, 4, 8])
            asked = request(name, shared + [rng.randint(1, 5) for _ in range(length)], max_tokens=rng.randint(2, 8))
            if rng.random() < 0.8:
                pair.begin(asked)
            else:
                pair.tokens[name] = []
                pair.d.core.add(asked)
            expected[name] = colocated(asked)
        if expected and rng.random() < 0.05:
            name = rng.choice(list(expected))
            if name not in pair.ended and name not in cancelled:
                cancelled.add(name)
                pair.p.core.cancel(name)
                pair.d.core.cancel(name)
                pair.d.core.release(f"t-{name}")
        if rng.random() < 0.7:
            wire.deliver(rng.randint(1, 12))
        for engine in rng.sample([pair.p, pair.d], 2):
            engine.core.poll()
            for delta in engine.core.step() if engine.core.has_work else []:
                name = delta.request_id
                assert name not in cancelled
                pair.tokens[name] += delta.token_ids
                if engine is pair.p:
                    pair.go_on(name)
                elif delta.finish_reason is not None:
                    pair.ended.add(name)
            engine.check()
        wire.now_s += rng.choice([0.0, 0.02, 0.1])
    for _ in range(400):
        wire.deliver()
        pair.turn()
        wire.now_s += 0.1
    assert pair.ended == set(expected) - cancelled
    for name in pair.ended:
        assert pair.tokens[name] == expected[name]
    snapshot = pair.d.core.snapshot()
    assert snapshot.num_kv_received > 0
    assert (wire.num_lost > 0) == (wire.loses > 0)
    if not wire.loses and sizes[1]["num_blocks"] == 40 and sizes[0]["num_blocks"] == 40:
        assert snapshot.num_kv_received > snapshot.num_kv_recomputed
    pair.leaves_nothing()
