"""What an edge remembers of its decisions: every candidate with its costs, and no more than it may."""

from __future__ import annotations

from manta.cluster.routing.decision import Decision, RouteRequest, RoutingSettings
from manta.cluster.routing.policy import decide
from manta.cluster.routing.prefix_index import PrefixIndex
from manta.cluster.routing.replica_view import ReplicaView
from manta.engine.stats import Snapshot
from manta.engine.step_costs import StepCosts
from manta.replicas.edge.explanations import Explained, Explanations

COSTS = StepCosts(overhead_s=0.0, weights_s=1e-4, token_s=1e-5, pair_s=0.0, context_token_s=0.0)


def view(replica_id: str, *, num_running: int = 0) -> ReplicaView:
    one = ReplicaView(replica_id, block_size=16, num_blocks=100, max_num_seqs=4, tokens_a_step=512, costs=COSTS)
    one.learn(Snapshot(num_running=num_running, num_blocks=100), 0.0)
    return one


def explained(*views: ReplicaView, cached: dict[str, int] | None = None) -> Explained:
    index = PrefixIndex(max_blocks=100)
    hashes = [bytes([number] * 16) for number in range(4)]
    for replica_id, num_blocks in (cached or {}).items():
        index.add_replica(replica_id)
        index.expect(replica_id, hashes[:num_blocks], until_s=10.0)
    request = RouteRequest(request_id="r", num_prompt_tokens=100, block_hashes=hashes, expected_output_tokens=10)
    decision = decide(request, views, index, now_s=0.0, settings=RoutingSettings(), tie=0.0)
    return Explained(1000.0, 0.5, decision, num_candidates=len(views))


def test_a_decision_shows_every_candidate_its_costs_and_why_others_were_rejected() -> None:
    kept = Explanations()
    one = explained(view("a"), view("b"), view("full", num_running=4), cached={"b": 3})
    one.actual_s, one.num_cached_tokens, one.outcome = 0.25, 48, "finished"
    kept.add("cmpl-1-0", one)
    found = kept.find("cmpl-1")
    assert found is not None
    (sequence,) = found["sequences"]
    (decision,) = sequence["decisions"]
    assert (decision["replica_id"], decision["outcome"], decision["actual_s"]) == ("b", "finished", 0.25)
    assert decision["estimate"]["num_cached_tokens"] == 48
    by_id = {candidate["replica_id"]: candidate for candidate in decision["candidates"]}
    assert set(by_id) == {"a", "b", "full"}
    assert by_id["a"]["terms"]["total_s"] > by_id["b"]["terms"]["total_s"]
    assert by_id["a"]["terms"]["prefill_s"] > by_id["b"]["terms"]["prefill_s"]
    assert by_id["full"]["rejected"] == "is full: 4 of 4 requests"


def test_a_decision_shows_what_makes_candidates_level_and_which_of_them_has_the_fewest_requests() -> None:
    tree = explained(view("many", num_running=2), view("few", num_running=1)).tree()
    by_id = {candidate["replica_id"]: candidate for candidate in tree["candidates"]}
    assert tree["replica_id"] == "few"
    assert tree["reason"].endswith(": fewest requests (1) of 2 that are level")
    assert [by_id[name]["num_requests"] for name in ("many", "few")] == [2, 1]
    assert by_id["few"]["noise_s"] == round(1e-4 / 12**0.5, 6)


def test_sequences_of_a_response_are_found_together_and_alone() -> None:
    kept = Explanations()
    kept.add("cmpl-1-0", explained(view("a")))
    kept.add("cmpl-1-1", explained(view("a")))
    kept.add("cmpl-1-1", explained(view("a")))
    whole, second = kept.find("cmpl-1"), kept.find("cmpl-1-1")
    assert whole is not None
    assert second is not None
    assert [len(sequence["decisions"]) for sequence in whole["sequences"]] == [1, 2]
    assert [sequence["sequence_id"] for sequence in second["sequences"]] == ["cmpl-1-1"]
    assert kept.find("cmpl-1-2") is None
    assert kept.find("cmpl-2") is None


def test_a_refusal_shows_how_long_it_would_have_taken() -> None:
    kept = Explanations()
    kept.add("cmpl-1-0", explained(view("a", num_running=4)))
    found = kept.find("cmpl-1-0")
    assert found is not None
    decision = found["sequences"][0]["decisions"][0]
    assert (decision["replica_id"], decision["reason"]) == (None, "full")
    assert decision["estimated_wait_s"] > 0


def test_a_choice_by_load_alone_has_no_estimate() -> None:
    one = ReplicaView("a", block_size=16, num_blocks=100, max_num_seqs=4, tokens_a_step=512)
    found = explained(one)
    assert isinstance(found.decision, Decision)
    assert found.tree()["estimate"] is None


def test_the_oldest_are_forgotten_by_the_number_of_candidates() -> None:
    kept = Explanations(max_candidates=30)
    for number in range(100):
        kept.add(f"cmpl-{number}-0", explained(view("a"), view("b")))
    assert kept.num_responses == 10
    assert kept.find("cmpl-89") is None
    assert kept.find("cmpl-90") is not None
