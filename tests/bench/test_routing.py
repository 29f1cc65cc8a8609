"""The routing bench on small loads: what it offers, what it compares, what it reports, and what the policies do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manta.autoscaling.simulator.workload import SimRequest, shared_hash
from manta.bench.fleet_run import Hardware, weighted_percentile
from manta.bench.routing import POLICIES, Setting, Variant, run, run_variant, variants
from manta.bench.routing_loads import Load, ZipfPrefixes, find_load, share_of_first, trace_load, zipf_load
from manta.bench.routing_policies import BoundedLoadHash, LeastLoaded, PowerOfTwo, RoundRobin
from manta.bench.traces import TraceRow
from manta.deploy.config import load_engine_config
from manta.engine.errors import ConfigError

IDS = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return Hardware.of(load_engine_config("sim-h200"), "h200")


def a_request(name: str, *, block: int | None = None, num_tokens: int = 1024) -> SimRequest:
    hashes = () if block is None else (shared_hash(block), shared_hash(block + 1))
    return SimRequest(name, 0.0, num_tokens, 10, hashes)


def test_a_mooncake_trace_keeps_its_blocks_and_its_rate_can_be_set() -> None:
    load = find_load("mooncake_conversation_1000", limit=200, longest=131_072)
    assert (len(load.requests), load.block_size) == (200, 512)
    first = load.requests[0]
    assert (first.num_prompt_tokens, first.num_output_tokens, len(first.block_hashes)) == (6758, 500, 13)
    assert first.block_hashes[0] == load.requests[1].block_hashes[0]
    assert load.highest_hit_rate == pytest.approx(0.0593, abs=1e-4)
    arrivals = [request.arrival_s for request in load.at_rate(10.0)]
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(19.9)


def test_prompts_of_a_trace_without_blocks_share_nothing() -> None:
    load = trace_load("plain", [TraceRow(0.0, 200, 5), TraceRow(1.0, 200, 5), TraceRow(2.0, 90_000, 5)], longest=4096)
    assert (load.block_size, load.num_left_out, load.highest_hit_rate) == (64, 1, 0.0)
    assert len({block_hash for request in load.requests for block_hash in request.block_hashes}) == 6


def test_the_hot_prefix_has_its_share() -> None:
    made = ZipfPrefixes(num_requests=2000, num_prefixes=100, exponent=1.5)
    load = zipf_load(made)
    hot = sum(request.block_hashes[0] == shared_hash(0) for request in load.requests)
    assert hot / 2000 == pytest.approx(share_of_first(made), abs=0.03)


def test_of_the_hot_prefix_s_load_any_number_is_made_and_a_longer_one_begins_as_a_shorter_one() -> None:
    usual = ZipfPrefixes().num_requests
    longer, shorter = (find_load("zipf", limit=usual + more, longest=131_072).requests for more in (10, 0))
    assert len(longer) == usual + 10
    assert longer[:usual] == shorter


def test_a_load_without_arrival_times_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="no arrival times"):
        Load("still", (a_request("a"),), 512).at_rate(1.0)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin(IDS)
    routes = [router.route(a_request(str(i)), 0.0) for i in range(5)]
    assert [route.replica_id for route in routes if route is not None] == ["a", "b", "c", "d", "a"]


def test_least_loaded_goes_by_what_was_sent_and_has_not_ended() -> None:
    router = LeastLoaded(IDS, measure="prefill_tokens")
    places = [router.route(a_request(str(i), num_tokens=100 * (i + 1)), 0.0) for i in range(5)]
    assert {place.replica_id for place in places[:4] if place is not None} == set(IDS)
    assert places[4] == places[0]  # which had the shortest prompt


def test_power_of_two_never_takes_the_most_loaded() -> None:
    router = PowerOfTwo(["a", "b"], measure="requests")
    for i in range(10):
        router.route(a_request(str(i)), 0.0)
    assert [known.num_requests for known in router.known] == [5, 5]


def test_bounded_load_hashing_keeps_a_prefix_together_until_its_replica_has_too_many() -> None:
    for factor, most in ((4.0, 20), (2.0, 10)):
        router = BoundedLoadHash(IDS, num_blocks=1, factor=factor)
        for i in range(20):
            router.route(a_request(str(i), block=7), 0.0)
        assert max(known.num_requests for known in router.known) == most  # so many times the mean of 5


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_every_request(policy: str, hardware: Hardware) -> None:
    setting = Setting(find_load("mooncake_conversation_1000", limit=60, longest=131_072), hardware, 3)
    figures = run_variant(setting, next(variants(policy)), 4.0)
    assert (figures.num_requests, figures.num_refused) == (60, 0)
    assert 0 < figures.ttft_p50_s <= figures.ttft_p95_s
    assert figures.max_over_mean_load >= 1.0


def test_prefix_aware_routing_finds_more_than_round_robin(hardware: Hardware) -> None:
    load = zipf_load(ZipfPrefixes(num_requests=300, num_prefixes=40))
    setting = Setting(load, hardware, 8)
    hits = {name: run_variant(setting, Variant(name), 20.0).prefix_hit_rate for name in ("manta", "round_robin")}
    assert hits["manta"] > hits["round_robin"] + 0.1


def test_a_run_is_the_same_again(hardware: Hardware) -> None:
    setting = Setting(zipf_load(ZipfPrefixes(num_requests=200)), hardware, 4)
    first, second = (run_variant(setting, Variant("manta"), 30.0) for _ in range(2))
    assert (first.ttft_p95_s, first.prefix_hit_rate) == (second.ttft_p95_s, second.prefix_hit_rate)


def test_the_command_reports_each_policy_at_each_load_and_takes_parameters_from_another_run(tmp_path: Path) -> None:
    config, names = load_engine_config("sim-h200"), ("manta", "least_loaded", "oracle")
    path = tmp_path / "found.json"
    run(config, trace="zipf", num_replicas=4, policies=names, num_requests=150, json_path=path)
    found = json.loads(path.read_text())
    assert set(found["policies"]) == set(names)
    assert set(found["loads"]) == {"0.7", "0.95"}
    for policy in found["policies"].values():
        for name in ("ttft_p50_s", "ttft_p95_s", "prefix_hit_rate", "max_over_mean_load", "decision_us_p50"):
            assert policy[name] > 0
    assert len(found["tried_ttft_p95_s"]) == 3 + 2
    assert found["figures"]["hit_rate_over_oracle"] > 0.5
    again = run(
        config,
        trace="zipf",
        num_replicas=8,
        policies=("manta", "least_loaded"),
        num_requests=150,
        loads=(0.7,),
        like=path,
    )
    assert again["workload"]["capacity_per_s"] == pytest.approx(2 * found["workload"]["capacity_per_s"], rel=1e-3)
    assert again["policies"]["least_loaded"]["parameters"] == found["policies"]["least_loaded"]["parameters"]
    with pytest.raises(ConfigError, match="for 'zipf', not 'azure2023_code'"):
        run(config, trace="azure2023_code", num_requests=100, like=path)


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ConfigError, match="'fastest'"):
        run(load_engine_config("sim-h200"), trace="zipf", policies=("fastest",), num_requests=100)


def test_a_percentile_of_counted_values() -> None:
    from collections import Counter

    assert weighted_percentile(Counter({10: 98, 500: 2}), 99) == 500
    assert weighted_percentile(Counter({10: 98, 500: 2}), 50) == 10
