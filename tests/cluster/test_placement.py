"""Placement on clusters of 2 to 64 nodes: literal cases with their sentences, and invariants on random clusters."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from manta.cluster.placement import CannotPlace, Placement, demand, place, place_pools
from manta.cluster.spec import GangSpec, PoolSpec, matches
from manta.cluster.topology import Node, Topology


def cluster(*free_gpus: float, num_gpus: float = 8, free_cpus: float = 64, labels: dict | None = None) -> Topology:
    return Topology(
        tuple(
            Node(f"n{i}", f"10.0.0.{i}", num_gpus, free, 64, free_cpus, labels=labels or {})
            for i, free in enumerate(free_gpus)
        )
    )


def gpu_gang(tp_size: int, pp_size: int = 1, **more) -> GangSpec:
    return GangSpec(tp_size, pp_size, gpus_per_rank=1, **more)


def placed(topology: Topology, spec: GangSpec, num_replicas: int = 1) -> tuple[tuple[str, ...], ...]:
    result = place(topology, spec, num_replicas=num_replicas)
    assert isinstance(result, Placement), result
    return result.nodes


def missing(topology: Topology, spec: GangSpec, num_replicas: int = 1) -> str:
    result = place(topology, spec, num_replicas=num_replicas)
    assert isinstance(result, CannotPlace), result
    return result.missing


def test_a_stage_is_one_bundle_and_the_first_holds_serve_s_process_too() -> None:
    spec = gpu_gang(4, 2, cpus_per_rank=0.5, replica_cpus=0.1)
    assert spec.bundles() == [{"CPU": 2.1, "GPU": 4}, {"CPU": 2.0, "GPU": 4}]
    assert [spec.bundle_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert demand(spec).strategy == "PACK"
    assert demand(spec).bundle_labels is None


def test_a_single_stage_is_packed_strictly_with_its_labels() -> None:
    asked = demand(gpu_gang(8, labels={"gpu": "h200"}))
    assert (asked.strategy, asked.bundle_labels) == ("STRICT_PACK", ({"gpu": "h200"},))


def test_ranks_on_cpus_ask_for_no_gpu() -> None:
    assert GangSpec(tp_size=2).bundles() == [{"CPU": 1.1}]
    assert placed(cluster(0, 0, num_gpus=0), GangSpec(tp_size=2), 2) == (("n0",), ("n1",))


def test_ranks_can_share_a_gpu() -> None:
    spec = GangSpec(tp_size=2, gpus_per_rank=0.5)
    assert spec.bundles() == [{"CPU": 1.1, "GPU": 1.0}]
    assert placed(cluster(1, num_gpus=1), spec) == (("n0",),)


def test_replicas_are_spread_over_nodes() -> None:
    assert placed(cluster(8, 8, 8), gpu_gang(2), 3) == (("n0",), ("n1",), ("n2",))


def test_a_fourth_replica_goes_where_room_is_left() -> None:
    assert Counter(nodes[0] for nodes in placed(cluster(8, 2, 2), gpu_gang(2), 6)) == {"n0": 4, "n1": 1, "n2": 1}


def test_stages_stay_in_one_node_that_is_large_enough() -> None:
    assert placed(cluster(4, 8, 4), gpu_gang(4, 2)) == (("n1", "n1"),)


def test_stages_go_across_nodes_when_one_is_too_small() -> None:
    assert placed(cluster(6, 8, 5), gpu_gang(4, 3)) == (("n1", "n1", "n0"),)


def test_a_small_leftover_is_used_before_a_large_block_is_broken() -> None:
    assert placed(cluster(8, 2, 3), gpu_gang(2)) == (("n1",),)


def test_eight_gpus_in_one_node_and_six_free() -> None:
    assert missing(cluster(6, 4), gpu_gang(8)) == (
        "needs 8 GPUs in one node, the largest free block is 6 (of 8, node 10.0.0.0)"
    )


def test_sixty_four_small_nodes_are_not_one_large_node() -> None:
    assert missing(cluster(*[4] * 64, num_gpus=4), gpu_gang(8)).startswith("needs 8 GPUs in one node, the largest free")
    assert len(placed(cluster(*[4] * 64, num_gpus=4), gpu_gang(4, 2), 32)) == 32


def test_too_few_blocks_for_the_stages_are_counted() -> None:
    assert missing(cluster(3, 2, 1), gpu_gang(2, 4)) == (
        "needs 4 blocks of 2 GPUs, one for each pipeline stage and each in one node, and there is room for 2"
    )


def test_a_replica_too_many_says_how_many_find_room() -> None:
    result = place(cluster(8, 4), gpu_gang(4), num_replicas=4)
    assert isinstance(result, CannotPlace)
    assert result.num_placed == 3
    assert result.missing.startswith("3 of 4 replicas find room; the next one needs 4 GPUs in one node")


def test_parts_of_gpus_do_not_make_a_whole_one() -> None:
    assert missing(cluster(1.5, num_gpus=2), gpu_gang(2)) == (
        "needs 2 GPUs in one node, the largest free block is 1.5 (of 2, node 10.0.0.0)"
    )


def test_cpus_can_be_what_is_missing() -> None:
    assert missing(cluster(8, free_cpus=0.5), gpu_gang(2)) == (
        "needs 1.1 CPUs beside 2 GPUs in one node, the most that is free is 0.5 (of 64, node 10.0.0.0)"
    )
    assert missing(cluster(0, num_gpus=0, free_cpus=1), GangSpec(tp_size=3)) == (
        "needs 1.6 CPUs in one node, the most that is free is 1 (of 64, node 10.0.0.0)"
    )


def test_a_cluster_without_gpus_and_an_empty_one() -> None:
    assert missing(cluster(0, 0, num_gpus=0), gpu_gang(1)) == "needs 1 GPU in one node, and no node has any"
    assert missing(Topology(()), gpu_gang(1)) == "needs a node, and the cluster has none"


def test_only_nodes_with_the_labels_count() -> None:
    nodes = (
        Node("a", "10.0.0.1", 8, 8, 64, 64, labels={"gpu": "a100"}),
        Node("b", "10.0.0.2", 4, 4, 64, 64, labels={"gpu": "h200"}),
    )
    assert placed(Topology(nodes), gpu_gang(4, labels={"gpu": "h200"})) == (("b",),)
    assert missing(Topology(nodes), gpu_gang(8, labels={"gpu": "h200"})) == (
        "needs 8 GPUs in one node, the largest free block with these labels is 4 (of 4, node 10.0.0.2)"
    )
    assert missing(Topology(nodes), gpu_gang(1, labels={"gpu": "b200"})) == (
        "needs nodes with the labels gpu=b200, and none of 2 nodes has them"
    )


@pytest.mark.parametrize(
    ("selector", "is_met"),
    [("x", True), ("y", False), ("!x", False), ("!y", True), ("in(x, z)", True), ("in(y,z)", False), ("!in(x)", False)],
)
def test_labels_are_selected_in_ray_s_notation(selector: str, is_met: bool) -> None:
    assert matches({"kind": selector}, {"kind": "x"}) is is_met


def test_an_absent_label_equals_nothing() -> None:
    assert not matches({"kind": "x"}, {})
    assert matches({"kind": "!x"}, {})


def random_cluster(rng: random.Random) -> Topology:
    nodes = []
    for i in range(rng.randint(2, 64)):
        num_gpus = rng.randint(1, 8)
        labels = {"gpu": rng.choice(["a", "b"])}
        free = rng.randint(0, num_gpus)
        nodes.append(Node(f"n{i:02d}", f"10.0.0.{i}", num_gpus, free, 256, 256, labels=labels))
    return Topology(tuple(nodes))


@pytest.mark.parametrize("seed", range(300))
def test_on_a_random_cluster_nothing_is_overdrawn_torn_apart_or_refused_in_error(seed: int) -> None:
    rng = random.Random(seed)
    topology = random_cluster(rng)
    labels = rng.choice([{}, {"gpu": "a"}])
    spec = gpu_gang(rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 3, 4]), labels=labels)
    num_replicas = rng.randint(1, 6)
    usable = {node.node_id: node for node in topology.nodes if matches(labels, node.labels)}
    # Stages are all alike here (there is no lack of CPUs): a node holds so many, whoever they belong to.
    num_blocks = sum(node.free_block // spec.tp_size for node in usable.values())
    num_whole = sum(node.free_block >= spec.tp_size * spec.pp_size for node in usable.values())

    result = place(topology, spec, num_replicas=num_replicas)

    if isinstance(result, CannotPlace):
        assert result.num_placed == num_blocks // spec.pp_size < num_replicas
        return
    assert num_blocks >= num_replicas * spec.pp_size
    assert len(result.nodes) == num_replicas
    taken = Counter[str]()
    for nodes in result.nodes:
        assert len(nodes) == spec.pp_size
        taken.update({node_id: nodes.count(node_id) * spec.tp_size for node_id in set(nodes)})
    assert all(usable[node_id].free_gpus >= count for node_id, count in taken.items())
    if num_whole >= num_replicas:  # each has a node of its own
        assert all(len(set(nodes)) == 1 for nodes in result.nodes)
        assert len({nodes[0] for nodes in result.nodes}) == num_replicas
    elif num_whole:
        assert len(set(result.nodes[0])) == 1


def pool(name: str, gang: GangSpec, num_replicas: int) -> PoolSpec:
    return PoolSpec(name, gang, num_replicas)


def test_pools_take_what_others_left_the_largest_blocks_first() -> None:
    topology = Topology((Node("a", "10.0.0.1", 8, 8, 64, 64), Node("b", "10.0.0.2", 4, 4, 64, 64)))
    result = place_pools(topology, [pool("decode", gpu_gang(2), 4), pool("prefill", gpu_gang(4), 1)])
    assert not isinstance(result, CannotPlace)
    # One of four GPUs where that leaves the fewest over; then the others beside it.
    assert result["prefill"].nodes == (("b",),)
    assert result["decode"].nodes == (("a",), ("a",), ("a",), ("a",))


def test_the_pool_that_finds_no_room_is_named() -> None:
    topology = Topology((Node("a", "10.0.0.1", 8, 8, 64, 64),))
    result = place_pools(topology, [pool("prefill", gpu_gang(4), 1), pool("decode", gpu_gang(4), 2)])
    assert isinstance(result, CannotPlace)
    assert result.pool == "decode"
    assert result.missing.startswith("1 of 2 replicas find room; the next one needs 4 GPUs in one node")


def test_pools_keep_to_their_own_nodes() -> None:
    nodes = (Node("a", "10.0.0.1", 8, 8, 64, 64, labels={"gpu": "x"}), Node("b", "10.0.0.2", 8, 8, 64, 64))
    pools = [pool("prefill", gpu_gang(8, labels={"gpu": "x"}), 1), pool("decode", gpu_gang(8, labels={"gpu": "!x"}), 1)]
    result = place_pools(Topology(nodes), pools)
    assert not isinstance(result, CannotPlace)
    assert {name: placement.nodes for name, placement in result.items()} == {
        "prefill": (("a",),),
        "decode": (("b",),),
    }
