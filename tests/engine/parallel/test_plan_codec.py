"""Plans and reports arrive as they were sent."""

from __future__ import annotations

import random

import pytest

from manta.engine.kv_transfer.messages import KvAccept, KvOpen, KvOrder, KvPeer, KvRange, KvRevoke, KvShard, KvStop
from manta.engine.parallel.plan_codec import Order, StepReport, decode, decode_report, encode, encode_report
from manta.engine.plan import Row, StepPlan, StepResult
from manta.engine.request import TokenLogprobs
from tests.engine.engines import make_core, request


@pytest.mark.parametrize("seed", range(5))
def test_plans_of_a_random_walk_arrive_as_they_were_sent(seed: int):
    rng = random.Random(seed)
    core = make_core(num_blocks=20, budget=13, max_model_len=40)
    plans: list[StepPlan] = []
    launch = core._runner.launch
    core._runner.launch = lambda plan: plans.append(plan) or launch(plan)
    for turn in range(150):
        if turn < 100 and rng.random() < 0.3:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
            params = {
                "seed": rng.choice([0, 7, 2**64 - 1, -(2**63)]),
                "temperature": rng.choice([0.0, 0.7]),
                "logit_bias": rng.choice([None, {3: -1.5}]),
                "stop": rng.choice([(), ("é", "b")]),
                "stop_token_ids": rng.choice([(), (5,)]),
                "prompt_logprobs": rng.choice([None, 2]),
                "repetition_penalty": rng.choice([1.0, 1.25]),
            }
            core.add(request(f"r{turn}", prompt, max_tokens=rng.randint(0, 8), **params))
        core.step()
    assert any(plan.new for plan in plans)
    assert any(plan.freed_slots for plan in plans)
    assert any(row.new_block_ids for plan in plans for row in plan.rows)
    assert [decode(encode(plan)) for plan in plans] == plans


def test_256_decodes_take_less_than_3_kilobytes():
    rows = [Row(slot, 700 + slot, 1, [slot] if slot % 16 == 0 else [], True, True) for slot in range(256)]
    assert len(encode(StepPlan(10_000, [], [], rows))) < 3000


@pytest.mark.parametrize("order", list(Order))
def test_orders_arrive_as_they_were_sent(order: Order):
    assert decode(encode(order)) is order


@pytest.mark.parametrize("data", [b"", b"x", b"p", b"p\x01", b"pe"])
def test_what_is_no_message_is_refused(data: bytes):
    with pytest.raises(ValueError):
        decode(data)


def test_reports_arrive_with_their_logprobs():
    logprobs = TokenLogprobs(5, -0.5, [5, 6], [-0.5, -1.5])
    report = StepReport(7, StepResult([5, 9], {1: logprobs}, {0: [logprobs, logprobs]}, 0.25, 0.125))
    assert decode_report(encode_report(report)) == report


KV_PEER = KvPeer(
    control_url="tcp://127.0.0.1:1",
    rank_urls=["tcp://127.0.0.1:2", "tcp://127.0.0.1:3"],
    shards=[KvShard((0, 30), (0, 2)), KvShard((0, 30), (2, 3))],
    model="m",
    block_size=16,
    head_dim=64,
    dtype="float32",
    key=bytes(range(32)),
)


@pytest.mark.parametrize(
    "order",
    [
        KvOpen(2**62, KV_PEER, [4, 5], [0, 9]),
        KvRange(2**62, 16, 40, True),
        KvStop(7),
        KvAccept(7, [1, 2, 3], 16, 40),
        KvRevoke(7),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders_about_kv_arrive_as_they_were_sent(order: KvOrder):
    assert decode(encode(order)) == order


def test_a_plan_carries_what_its_ranks_send():
    plan = StepPlan(3, [], [], [Row(0, 16, 24, [], True, False)], sends=[KvRange(2**62, 16, 40, True)])
    assert decode(encode(plan)) == plan
