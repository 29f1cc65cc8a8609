"""The choice of a replica: which term of the cost decides, with literal numbers."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from manta.cluster.routing.policy import Decision, NoRoom, NoRoomReason, RouteRequest, RoutingSettings, decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.cluster.routing.roles import Role
from manta.engine.prefix_cache import CacheEvents
from manta.engine.stats import Snapshot
from manta.engine.step_costs import StepCosts

COSTS = StepCosts(overhead_s=0.001, weights_s=0.004, token_s=2e-5, pair_s=0.0, context_token_s=3e-8)
"""8,000 tokens take 0.162 s."""
FLAT = StepCosts(overhead_s=0.001, weights_s=0.004, token_s=2e-5, pair_s=0.0, context_token_s=0.0)
"""The same, with steps of 5 ms however many tokens of context are read."""
HASHES = [bytes([number]) * 16 for number in range(125)]
"""Of 8,000 tokens."""
SETTINGS = RoutingSettings(decode_weight=1.0, interference_weight=0.02, work_weight=0.0)


def view(name: str, **fields: Any) -> ReplicaView:
    defaults: dict[str, Any] = {
        "block_size": 64,
        "num_blocks": 10_000,
        "max_num_seqs": 64,
        "max_requests": 128,
        "tokens_a_step": 8192,
        "costs": COSTS,
        "kv_bytes_per_token": 131_072.0,
    }
    return ReplicaView(name, **(defaults | fields))


def cached(index: PrefixIndex, name: str, num_blocks: int) -> None:
    index.add_replica(name)
    index.apply(name, CacheEvents(sequence=0, stored=HASHES[:num_blocks]))


def ask(
    views: Sequence[ReplicaView],
    index: PrefixIndex | None = None,
    *,
    settings: RoutingSettings = SETTINGS,
    now_s: float = 100.0,
    tie: float = 0.0,
    **fields: Any,
) -> Decision | NoRoom:
    defaults: dict[str, Any] = {
        "request_id": "r",
        "num_prompt_tokens": 8000,
        "block_hashes": HASHES,
        "expected_output_tokens": 100,
    }
    request = RouteRequest(**(defaults | fields))
    index = index or PrefixIndex(max_blocks=1000)
    return decide(request, views, index, now_s=now_s, settings=settings, tie=tie)


def chosen(answer: Decision | NoRoom) -> str:
    assert isinstance(answer, Decision), answer
    return answer.replica_id


def busy(name: str, num_prefill_tokens: int = 0, num_running: int = 0, **fields: Any) -> ReplicaView:
    one = view(name, **fields)
    load = Snapshot(
        num_running=num_running,
        num_context_tokens=num_running * 1000,
        num_prefill_tokens=num_prefill_tokens,
        num_waiting=1 if num_prefill_tokens else 0,
        last_step_s=0.006,
    )
    one.learn(load, 100.0)
    return one


def test_a_cached_prefix_decides_between_idle_replicas():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "b", 100)
    answer = ask([view("a"), view("b"), view("c")], index)
    assert isinstance(answer, Decision)
    assert (answer.replica_id, answer.prefill_replica_id, answer.estimate.num_cached_tokens) == ("b", None, 6400)
    assert answer.estimate.prefill_s == pytest.approx(0.001 + 1600 * 2e-5)
    assert answer.estimate.queue_s == answer.estimate.transfer_s == answer.estimate.affinity_s == 0.0
    assert answer.estimate.total_s == pytest.approx(answer.estimate.first_token_s + answer.estimate.decode_s)


def test_one_token_at_least_is_computed_however_much_is_cached():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "a", 125)
    answer = ask([view("a")], index)
    assert isinstance(answer, Decision)
    assert answer.estimate.num_cached_tokens == 124 * 64


def test_a_hot_prefix_spreads_when_waiting_takes_longer_than_computing_it_again():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "hot", 120)
    assert chosen(ask([busy("hot", num_prefill_tokens=4000), view("cold")], index)) == "hot"
    assert chosen(ask([busy("hot", num_prefill_tokens=12_000), view("cold")], index)) == "cold"


def test_a_burst_with_one_prefix_goes_to_few_replicas_but_not_to_one_alone():
    index = PrefixIndex(max_blocks=1000)
    views = [view(name) for name in "abcdefgh"]
    for one in views:
        index.add_replica(one.replica_id)
    counts: Counter[str] = Counter()
    for number in range(64):
        answer = ask(views, index, num_prompt_tokens=8600, tie=0.0)
        name = chosen(answer)
        assert isinstance(answer, Decision)
        [there] = [one for one in views if one.replica_id == name]
        there.sent(str(number), 8600 - answer.estimate.num_cached_tokens, 8600, 100.0)
        index.expect(name, HASHES, until_s=200.0)
        counts[name] += 1
    assert len(counts) >= 2
    assert max(counts.values()) <= 64 / 3


def test_the_less_loaded_is_taken_where_nothing_is_cached():
    assert chosen(ask([busy("a", num_prefill_tokens=9000), busy("b", num_prefill_tokens=1000)])) == "b"
    assert chosen(ask([busy("a", num_running=60), busy("b", num_running=3)])) == "b"


def test_a_prompt_stalls_few_decodes_rather_than_many():
    weighed = RoutingSettings(interference_weight=1.0, decode_weight=0.0, work_weight=0.0)
    index = PrefixIndex(max_blocks=1000)
    views = [busy("many", num_running=50), busy("few", num_running=10, num_prefill_tokens=3000)]
    answer = ask(views, index, settings=weighed)
    assert chosen(answer) == "few"
    unweighed = RoutingSettings(interference_weight=0.0, decode_weight=0.0, work_weight=0.0)
    assert chosen(ask(views, index, settings=unweighed)) == "many"


def test_candidates_that_are_alike_in_everything_are_drawn_by_the_number_given():
    views = [view(name) for name in "abcd"]
    assert [chosen(ask(views, tie=tie)) for tie in (0.0, 0.3, 0.6, 0.99)] == ["a", "b", "c", "d"]
    answer = ask(views, tie=0.3)
    assert isinstance(answer, Decision)
    assert answer.reason.endswith("of 4 candidates: fewest requests (0) of 4 that are level, drawn among 4")


def test_of_candidates_that_differ_by_less_than_the_phase_of_a_step_the_one_with_the_fewest_requests_is_taken():
    def observed(name: str, num_running: int, ratio: float) -> ReplicaView:
        one = busy(name, num_running=num_running, costs=FLAT)
        one.sent("x", 10, 10, 100.0, estimate_s=0.01)
        one.began("x", 100.0 + 0.01 * ratio)
        one.ended("x")
        return one

    short = {"num_prompt_tokens": 20, "block_hashes": ()}
    views = [observed("quick", 9, 0.8), observed("few", 2, 1.5)]
    answer = ask(views, **short)
    assert isinstance(answer, Decision)
    quick, few = answer.considered  # the cheapest first
    assert quick.terms is not None
    assert few.terms is not None
    assert SETTINGS.tie_s < few.terms.total_s - quick.terms.total_s < few.noise_s + quick.noise_s
    assert (answer.replica_id, few.num_requests, quick.num_requests) == ("few", 2, 9)
    assert answer.estimate == few.terms
    assert answer.reason.endswith("of 2 candidates: fewest requests (2) of 2 that are level")


def test_noise_is_what_a_step_under_way_makes_uncertain_and_an_idle_replica_has_none():
    answer = ask([busy("busy", num_running=9, costs=FLAT), view("idle", costs=FLAT)], num_prompt_tokens=20)
    assert isinstance(answer, Decision)
    assert {one.replica_id: one.noise_s for one in answer.considered} == {
        "busy": pytest.approx(0.005 / math.sqrt(12)),
        "idle": 0.0,
    }


def test_of_level_candidates_with_as_many_requests_the_one_with_less_to_read_is_taken():
    views = [busy(name, num_running=5) for name in "ab"]
    views[1].learn(Snapshot(num_running=5, num_context_tokens=4900), 100.0)
    assert {chosen(ask(views, tie=tie, expected_output_tokens=1)) for tie in (0.0, 0.9)} == {"b"}


def test_a_burst_of_short_prompts_spreads_evenly_over_replicas_that_are_alike():
    views = [busy(name, num_running=1, costs=FLAT) for name in "ab"]
    views[0].correction, views[1].correction = 0.97, 1.03
    counts: Counter[str] = Counter()
    for number in range(16):
        name = chosen(ask(views, num_prompt_tokens=20, block_hashes=(), tie=0.5))
        [there] = [one for one in views if one.replica_id == name]
        there.sent(str(number), 20, 20, 100.0)
        there.began(str(number))
        there.learn(Snapshot(num_running=2 + counts[name], num_context_tokens=20 * (2 + counts[name])), 100.0)
        counts[name] += 1
    assert counts == {"a": 8, "b": 8}


def test_a_session_keeps_its_own_replica_among_level_ones_whatever_requests_others_have():
    views = [busy(name, num_running=4, costs=FLAT) for name in "abcd"]
    home = chosen(ask(views, session="s", num_prompt_tokens=20))
    views = [busy(one.replica_id, num_running=9 if one.replica_id == home else 4, costs=FLAT) for one in views]
    unattached = RoutingSettings(affinity_s=0.0, work_weight=0.0)
    assert chosen(ask(views, session="s", num_prompt_tokens=20, settings=unattached)) == home
    assert chosen(ask(views, num_prompt_tokens=20, settings=unattached)) != home


def test_a_session_stays_where_it_is_while_candidates_are_nearly_level():
    views = [view(name) for name in "abcdefgh"]
    homes = {session: chosen(ask(views, session=session)) for session in map(str, range(200))}
    for session, home in homes.items():
        assert {chosen(ask(views[::-1], session=session, tie=tie)) for tie in (0.2, 0.9)} == {home}
    counts = Counter(homes.values())
    assert len(counts) == 8
    assert max(counts.values()) < 50
    session, home = next(iter(homes.items()))
    loaded = [busy(one.replica_id, num_prefill_tokens=5000) if one.replica_id == home else one for one in views]
    assert chosen(ask(loaded, session=session)) != home


def test_a_replica_without_costs_is_taken_by_its_load_alone():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "new", 120)
    unknown = view("new", costs=None)
    answer = ask([view("old"), unknown], index)
    assert isinstance(answer, Decision)
    assert {one.replica_id: one.terms.num_cached_tokens for one in answer.considered if one.terms} == {
        "old": 0,
        "new": 0,
    }
    assert chosen(ask([busy("old", num_prefill_tokens=500), unknown], index)) == "new"


def test_where_nobody_s_speed_is_known_the_least_load_decides_and_nothing_is_promised():
    views = [view(name, costs=None) for name in "abc"]
    views[0].sent("x", 500, 500, 100.0)
    views[1].sent("y", 100, 100, 100.0)
    views[2].sent("z", 300, 300, 100.0)
    answer = ask(views, deadline_s=100.001)
    assert isinstance(answer, Decision)
    assert (answer.replica_id, answer.is_by_load, answer.estimate.total_s) == ("b", True, 0.0)
    assert answer.reason == "least load of 3 candidates of unknown speed"


def test_a_silent_replica_waits_at_least_as_long_as_it_was_silent_and_has_nothing_cached():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "silent", 120)
    silent, other = busy("silent"), busy("other", num_prefill_tokens=8000)
    other.learn(other.snapshot, 103.0)
    answer = ask([silent, other], index, now_s=103.0)
    assert chosen(answer) == "other"
    assert isinstance(answer, Decision)
    terms = {one.replica_id: one.terms for one in answer.considered}["silent"]
    assert terms is not None
    assert (terms.num_cached_tokens, terms.queue_s) == (0, pytest.approx(3.0))
    assert chosen(ask([silent, other], index, now_s=101.5)) == "silent"


def test_a_replica_that_warms_up_gets_a_few_requests_and_more_as_they_begin():
    cold, warm = view("cold", ready_at_s=100.0), busy("warm", num_prefill_tokens=50_000)
    assert chosen(ask([cold, warm])) == "cold"
    cold.sent("r0", 10, 10, 100.0)
    answer = ask([cold, warm])
    assert chosen(answer) == "warm"
    assert isinstance(answer, Decision)
    [held] = [one for one in answer.considered if one.rejected]
    assert (held.replica_id, held.rejected) == ("cold", "warms up: 1 requests are enough for now")
    cold.began("r0")
    assert chosen(ask([cold, warm])) == "cold"
    for number in range(1, 9):
        cold.sent(f"r{number}", 10, 10, 100.0)
    assert chosen(ask([cold, warm])) == "warm"
    assert chosen(ask([cold, warm], now_s=105.0)) == "cold"


def test_replicas_that_warm_up_take_everything_when_there_is_no_other():
    views = [view(name, ready_at_s=100.0) for name in "ab"]
    for one in views:
        for number in range(5):
            one.sent(f"{one.replica_id}{number}", 10, 10, 100.0)
    assert isinstance(ask(views), Decision)


def test_full_replicas_are_passed_by_and_when_all_are_full_the_wait_is_told():
    full = view("full", max_requests=2, max_num_seqs=2)
    for number in range(2):
        full.sent(str(number), 4000, 4000, 100.0)
    answer = ask([full, busy("other", num_prefill_tokens=100_000)])
    assert chosen(answer) == "other"
    assert isinstance(answer, Decision)
    assert [one.rejected for one in answer.considered] == [None, "is full: 2 of 2 requests"]
    answer = ask([full])
    assert isinstance(answer, NoRoom)
    assert answer.reason is NoRoomReason.FULL
    assert answer.estimated_wait_s > 0.16
    assert [one.rejected for one in answer.considered] == ["is full: 2 of 2 requests"]


def test_no_replica_at_all_is_no_room():
    answer = ask([])
    assert isinstance(answer, NoRoom)
    assert (answer.reason, answer.considered) == (NoRoomReason.NO_REPLICA, ())


def test_excluded_replicas_and_those_of_other_models_are_not_asked():
    views = [view("a", model_name="m"), view("b", model_name="m"), view("c", model_name="other")]
    answer = ask(views, model_name="m", excluded=frozenset({"a"}))
    assert chosen(answer) == "b"
    assert isinstance(answer, Decision)
    assert [one.rejected for one in answer.considered] == [
        None,
        "is excluded: it has just refused or lost the request",
        "serves other",
    ]
    answer = ask(views, model_name="none")
    assert isinstance(answer, NoRoom)
    assert answer.reason is NoRoomReason.NO_REPLICA


def test_a_deadline_is_a_matter_of_the_first_token():
    slow, quick = busy("slow", num_prefill_tokens=20_000), busy("quick", num_running=60)
    plain = RoutingSettings(
        decode_weight=50.0, work_weight=0.0
    )  # tokens after the first are so dear that the empty one is taken
    assert chosen(ask([slow, quick], settings=plain)) == "slow"
    assert chosen(ask([slow, quick], settings=plain, deadline_s=100.4)) == "quick"
    answer = ask([slow, quick], settings=plain, deadline_s=100.1)
    assert isinstance(answer, NoRoom)
    assert answer.reason is NoRoomReason.DEADLINE
    assert 0.1 < answer.estimated_wait_s < 0.4
    assert all(one.rejected is not None for one in answer.considered)


def test_a_wait_that_nobody_should_have_is_refused():
    answer = ask([busy("a", num_prefill_tokens=10**6)], settings=RoutingSettings(max_wait_s=10.0))
    assert isinstance(answer, NoRoom)
    assert answer.reason is NoRoomReason.WAIT
    assert answer.estimated_wait_s == pytest.approx(20.4, rel=0.05)


def test_what_a_prompt_takes_itself_is_no_wait():
    """Whenever it comes, it takes as long: there is nothing to try again for."""
    settings, tokens = RoutingSettings(max_wait_s=1.0), 60_000
    answer = ask([view("a")], num_prompt_tokens=tokens, settings=settings)
    assert isinstance(answer, Decision)
    assert answer.estimate.first_token_s > 1.0
    assert [one.rejected for one in answer.considered] == [None]
    behind = ask([busy("a", num_prefill_tokens=10**6)], num_prompt_tokens=tokens, settings=settings)
    assert isinstance(behind, NoRoom)
    assert behind.reason is NoRoomReason.WAIT
    assert behind.estimated_wait_s > answer.estimate.first_token_s


def test_a_long_prompt_takes_the_detour_when_it_would_stall_many_decodes():
    views = [view("p", role=Role.PREFILL), busy("d", num_running=50, role=Role.DECODE)]
    answer = ask(views)
    assert isinstance(answer, Decision)
    assert (answer.replica_id, answer.prefill_replica_id) == ("d", "p")
    moved_s = 8000 * 131_072 / 5e9
    # All but 0.161 s of it is hidden behind computing. Then comes the decodes' step, and half of one on average.
    assert answer.estimate.transfer_s == pytest.approx(0.003 + moved_s - 0.161 + 1.5 * 0.0065, rel=0.02)


def test_short_and_well_cached_prompts_skip_the_detour():
    views = [view("p", role=Role.PREFILL), busy("d", num_running=50, role=Role.DECODE)]
    answer = ask(views, num_prompt_tokens=100, block_hashes=HASHES[:1])
    assert isinstance(answer, Decision)
    assert answer.prefill_replica_id is None
    index = PrefixIndex(max_blocks=1000)
    cached(index, "d", 120)
    answer = ask(views, index)
    assert isinstance(answer, Decision)
    assert answer.prefill_replica_id is None


def test_what_is_cached_where_it_decodes_is_not_moved():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "d", 100)
    cached(index, "p", 100)
    views = [view("p", role=Role.PREFILL), busy("d", num_running=50, role=Role.DECODE)]
    answer = ask(views, index)
    assert isinstance(answer, Decision)
    [pair] = [one.terms for one in answer.considered if one.prefill_replica_id]
    assert pair is not None
    assert pair.num_cached_tokens == 6400
    assert pair.transfer_s == pytest.approx(0.003 + 1600 * 131_072 / 5e9 - 0.033 + 1.5 * 0.0065, rel=0.02)


def test_a_measured_transfer_rate_counts_instead_of_the_assumed_one():
    decodes = busy("d", num_running=50, role=Role.DECODE)
    decodes.learn_transfer(1e9, 10.0)
    answer = ask([view("p", role=Role.PREFILL), decodes])
    assert isinstance(answer, Decision)
    assert answer.prefill_replica_id is None  # 0.1 GB a second: 10 s for the prompt's KV


def test_every_pair_that_could_win_is_considered():
    rng = random.Random(3)
    for _ in range(30):
        prefills = [
            busy(f"p{number}", num_prefill_tokens=rng.randint(0, 20_000), role=Role.PREFILL) for number in range(3)
        ]
        decodes = [busy(f"d{number}", num_running=rng.randint(0, 60), role=Role.DECODE) for number in range(3)]
        answer = ask([*prefills, *decodes])
        assert isinstance(answer, Decision)
        best = math.inf
        for one in prefills:
            for other in decodes:
                alone = ask([one, other])
                assert isinstance(alone, Decision)
                best = min(best, alone.estimate.total_s)
        assert answer.estimate.total_s <= best + 1e-4


def test_an_explanation_has_every_candidate_the_cheapest_first():
    views = [busy(name, num_prefill_tokens=tokens) for name, tokens in (("a", 9000), ("b", 100), ("c", 3000))]
    answer = ask(views)
    assert isinstance(answer, Decision)
    assert [one.replica_id for one in answer.considered] == ["b", "c", "a"]
    assert answer.considered[0].terms == answer.estimate
    before = answer.considered
    for one in views:
        one.learn(Snapshot(num_running=50), 101.0)
    assert answer.considered == before  # as it was when it was decided


def test_while_many_have_prompts_waiting_computing_a_prompt_again_counts_for_more():
    index = PrefixIndex(max_blocks=1000)
    cached(index, "hot", 120)
    views = [busy("hot", num_prefill_tokens=20_000), busy("cold", num_prefill_tokens=9000)]
    assert chosen(ask(views, index)) == "cold"
    assert chosen(ask(views, index, settings=RoutingSettings(work_weight=1.0))) == "hot"


def test_a_deadline_is_promised_where_nearly_all_waits_keep_it_and_not_where_only_usual_ones_do():
    rng, uneven = random.Random(0), view("uneven", max_num_seqs=8)
    for number in range(100):  # one of eight slots becomes free at uneven times
        now_s = 90.0 + number / 10 + rng.random() / 20
        load = Snapshot(num_running=8, num_finished=number + 3 * rng.randint(0, 3), num_context_tokens=8)
        uneven.learn(load, now_s)
    pace = uneven.pace(None)
    assert pace is not None
    assert pace.doubt_s > 0.1
    soon = ask([uneven], num_prompt_tokens=100, block_hashes=())
    assert isinstance(soon, Decision)
    usual_s = soon.estimate.first_token_s
    kept = ask([uneven], num_prompt_tokens=100, block_hashes=(), deadline_s=100.0 + usual_s + pace.doubt_s + 0.01)
    assert chosen(kept) == "uneven"
    refused = ask([uneven], num_prompt_tokens=100, block_hashes=(), deadline_s=100.0 + usual_s + pace.doubt_s / 2)
    assert isinstance(refused, NoRoom)
    assert refused.reason is NoRoomReason.DEADLINE
    assert refused.estimated_wait_s == pytest.approx(usual_s + pace.doubt_s)
