"""Loads in columns: they follow every change of the views, and decisions by them are those of the cost's definition."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from manta.cluster.routing.decision import Considered, Decision, NoRoom, RouteRequest, RoutingSettings
from manta.cluster.routing.load_table import LoadTable
from manta.cluster.routing.policy import decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.prefix_cache import CacheEvents
from manta.engine.stats import Snapshot
from manta.engine.step_costs import StepCosts

BLOCK_SIZE = 16
HASHES = [number.to_bytes(16, "little") for number in range(200)]
SETTINGS = RoutingSettings()


def costs(rng: random.Random) -> StepCosts:
    return StepCosts(
        overhead_s=rng.uniform(1e-4, 1e-2),
        weights_s=rng.uniform(1e-3, 1e-2),
        token_s=rng.uniform(1e-5, 1e-4),
        pair_s=rng.uniform(0, 1e-8),
        context_token_s=rng.uniform(0, 1e-7),
    )


def view(number: int, rng: random.Random, *, role: Role = Role.MIXED, is_known: bool = True) -> ReplicaView:
    return ReplicaView(
        f"replica-{number}",
        role=role,
        block_size=BLOCK_SIZE,
        num_blocks=1000,
        max_num_seqs=16,
        max_requests=rng.choice([24, 64]),
        tokens_a_step=rng.choice([256, 1024, 4096]),
        costs=costs(rng) if is_known else None,
        kv_bytes_per_token=1e5,
        ready_at_s=rng.choice([-math.inf, -math.inf, 95.0]),
    )


def snapshot(rng: random.Random) -> Snapshot:
    num_running = rng.randint(0, 16)
    return Snapshot(
        num_running=num_running,
        num_waiting=rng.choice([0, 0, rng.randint(0, 10)]),
        num_blocks=1000,
        num_used_blocks=rng.randint(0, 1000),
        num_prefill_tokens=rng.choice([0, rng.randint(0, 20_000)]),
        num_context_tokens=num_running * rng.randint(0, 500),
        num_finished=rng.randint(0, 100),
    )


def change(one: ReplicaView, rng: random.Random, now_s: float) -> None:
    """Something that happens to a view."""
    match rng.randrange(6):
        case 0 | 1:
            one.learn(snapshot(rng), now_s)
        case 2:
            num_tokens = rng.randint(1, 3000)
            one.sent(str(rng.randrange(4)), rng.randint(1, num_tokens), num_tokens, now_s, estimate_s=rng.random())
        case 3:
            one.began(str(rng.randrange(4)), now_s)
        case 4:
            one.ended(str(rng.randrange(4)))
        case _:
            one.learn_transfer(1e9, rng.uniform(0.01, 1.0))


def request(rng: random.Random) -> RouteRequest:
    num_tokens = rng.choice([10, 500, 3200, 6000])
    return RouteRequest(
        request_id="r",
        num_prompt_tokens=num_tokens,
        block_hashes=HASHES[: min(num_tokens // BLOCK_SIZE, len(HASHES))],
        expected_output_tokens=rng.choice([1, 100, 1000]),
        session=rng.choice([None, "s"]),
        deadline_s=rng.choice([None, 101.0]),
        may_detour=rng.random() < 0.8,
        excluded=frozenset(["replica-1"]) if rng.random() < 0.2 else frozenset(),
    )


def index(views: list[ReplicaView], rng: random.Random) -> PrefixIndex:
    found = PrefixIndex(max_blocks=1000)
    for one in views:
        found.add_replica(one.replica_id)
        found.apply(one.replica_id, CacheEvents(sequence=0, stored=HASHES[: rng.choice([0, 8, 8, 50, 200])]))
    return found


def rows(answer: Decision | NoRoom) -> tuple[Considered, ...]:
    return answer.considered


def told(answer: Decision | NoRoom) -> list[object]:
    """All that can be seen of an answer."""
    own = [answer.estimated_wait_s] if isinstance(answer, NoRoom) else [answer.replica_id, answer.prefill_replica_id]
    return [answer.reason, *own, *rows(answer)]


@pytest.mark.parametrize("seed", range(20))
def test_a_table_that_lives_on_answers_as_one_that_is_made_for_the_moment(seed: int) -> None:
    rng = random.Random(seed)
    roles = rng.choice([[Role.MIXED], [Role.PREFILL, Role.DECODE], [*Role]])
    knows = rng.choice([1.0, 1.0, 0.5, 0.0])
    views = [view(number, rng, role=rng.choice(roles), is_known=rng.random() < knows) for number in range(6)]
    table, number = LoadTable(views), 6
    for turn in range(60):
        now_s = 100.0 + turn / 100
        for one in rng.sample(views, rng.randint(0, len(views))):
            change(one, rng, now_s)
        if turn % 10 == 9:
            gone = views.pop(rng.randrange(len(views)))
            table.remove(gone)
            gone.learn(snapshot(rng), now_s)
            views.append(view(number, rng, role=rng.choice(roles), is_known=rng.random() < knows))
            table.add(views[-1])
            number += 1
        asked, known, tie = request(rng), index(views, rng), rng.random()
        answers = [decide(asked, one, known, now_s=now_s, settings=SETTINGS, tie=tie) for one in (table, views)]
        assert told(answers[0]) == told(answers[1])


def test_what_explains_a_decision_stays_as_it_was_when_loads_change() -> None:
    rng = random.Random(0)
    views = [view(number, rng) for number in range(4)]
    table, known = LoadTable(views), index(views, rng)
    for one in views:
        one.learn(snapshot(rng), 100.0)
    before = rows(decide(request(random.Random(1)), table, known, now_s=100.0, settings=SETTINGS, tie=0.0))
    answer = decide(request(random.Random(1)), table, known, now_s=100.0, settings=SETTINGS, tie=0.0)
    for one in views:
        one.learn(snapshot(rng), 100.1)
    decide(request(rng), table, known, now_s=100.2, settings=SETTINGS, tie=0.0)
    assert rows(answer) == before


def defined_cost(one: ReplicaView, asked: RouteRequest, num_cached: int, waiting: float) -> float:
    """The cost of a replica alone as docs/routing.md defines it, one number after another."""
    pace = one.pace(None)
    assert pace is not None
    num_new, num_tokens = asked.num_prompt_tokens - num_cached, asked.num_prompt_tokens
    missing = num_new - (pace.free_blocks - 1) * BLOCK_SIZE
    queue_s = max(pace.queue_s, pace.slot_s, missing * pace.block_s / BLOCK_SIZE)
    num_full = math.ceil(num_new / pace.chunk) - 1
    tokens = num_new - num_full * pace.chunk + pace.num_decodes
    prefill_s = num_full * pace.chunk_s + pace.fixed_s + max(pace.weights_s, tokens * pace.token_s)
    prefill_s += num_new * (2 * num_tokens - num_new) * 0.5 * pace.pair_s
    lost_s = (prefill_s - (num_full + 1) * pace.step_s) * pace.num_decodes
    lost_s += asked.expected_output_tokens * num_tokens * pace.num_decodes * pace.context_token_s
    step_s = pace.decode_step_s + num_tokens * pace.context_token_s
    decode_s = asked.expected_output_tokens * step_s
    weights = SETTINGS.decode_weight, SETTINGS.interference_weight, SETTINGS.work_weight * waiting
    return queue_s + prefill_s + weights[0] * decode_s + weights[1] * lost_s + weights[2] * prefill_s


@pytest.mark.parametrize("seed", range(20))
def test_every_candidate_costs_what_the_definition_says_and_the_level_one_with_the_fewest_requests_is_taken(
    seed: int,
) -> None:
    rng = random.Random(seed)
    views = [view(number, rng) for number in range(12)]
    known = index(views, rng)
    for one in views:
        one.ready_at_s, one.max_requests = -math.inf, 1000
        one.learn(snapshot(rng), 100.0)
        change(one, rng, 100.0)
        one.learn(snapshot(rng), 100.0)
    asked = replace(request(rng), session=None, deadline_s=None, excluded=frozenset())
    matched = known.match(asked.block_hashes)
    paces = {one.replica_id: one.pace(None) for one in views}
    waiting = sum(pace.has_prompts_waiting for pace in paces.values() if pace is not None) / len(views)
    most = (asked.num_prompt_tokens - 1) // BLOCK_SIZE
    wanted = {
        one.replica_id: defined_cost(one, asked, BLOCK_SIZE * min(matched.get(one.replica_id, 0), most), waiting)
        for one in views
    }
    answer = decide(asked, LoadTable(views), known, now_s=100.0, settings=SETTINGS, tie=0.0)
    assert isinstance(answer, Decision)
    found = {row.replica_id: row.terms.total_s for row in rows(answer) if row.terms is not None}
    assert found == pytest.approx(wanted, rel=1e-9)
    best = min(rows(answer), key=lambda row: wanted[row.replica_id])
    level = [
        row
        for row in rows(answer)
        if wanted[row.replica_id] - row.noise_s <= wanted[best.replica_id] + best.noise_s + SETTINGS.tie_s
    ]
    assert answer.replica_id in {row.replica_id for row in level}
    assert min(row.num_requests for row in level) == answer.narrowing.num_requests
    assert answer.narrowing.num_level == len(level)
