"""Ray's tables of nodes and placement groups become topology and reservations."""

from __future__ import annotations

from typing import Any

from manta.cluster.discover import GangReservation, reservations_of, topology_of


def node(name: str, address: str, *, alive: bool = True, **more: Any) -> dict[str, Any]:
    resources = {"CPU": 8.0, "GPU": 4.0, **more.pop("resources", {})}
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources, "Labels": {}, **more}


def test_dead_nodes_are_left_out_and_free_resources_joined() -> None:
    tables = [
        node("b", "10.0.0.2", Labels={"manta/gpu": "H200", "manta/gpu-sockets": "0.0.1.1"}),
        node("a", "10.0.0.1", resources={"node:__internal_head__": 1.0}),
        node("c", "10.0.0.3", alive=False),
    ]
    first, second = topology_of(tables, {"a": {"CPU": 3.0, "GPU": 4.0}, "b": {"CPU": 8.0}}).nodes
    assert (first.node_id, first.is_head, first.free_cpus, first.free_gpus) == ("a", True, 3.0, 4.0)
    assert (second.node_id, second.is_head, second.num_gpus, second.free_gpus) == ("b", False, 4.0, 0.0)
    assert (second.labels["manta/gpu"], second.gpu_sockets) == ("H200", (0, 0, 1, 1))


def test_reservations_are_those_of_the_deployment_s_replicas() -> None:
    def group(name: str, state: str, nodes: dict[int, str]) -> dict[str, Any]:
        return {"name": name, "state": state, "bundles_to_node_id": nodes}

    table = {
        "1": group("SERVE_REPLICA::manta#engine#x1", "CREATED", {1: "b", 0: "a"}),
        "2": group("SERVE_REPLICA::manta#engine#x0", "PENDING", {0: "", 1: ""}),
        "3": group("SERVE_REPLICA::manta#engine#x2", "REMOVED", {}),
        "4": group("SERVE_REPLICA::other#engine#x3", "CREATED", {0: "a"}),
        "5": group("mine", "CREATED", {0: "a"}),
    }
    assert reservations_of(table, "manta", "engine") == [
        GangReservation("x0", is_placed=False, node_ids=()),
        GangReservation("x1", is_placed=True, node_ids=("a", "b")),
    ]
