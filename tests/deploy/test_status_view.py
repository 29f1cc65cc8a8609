"""`manta status` shows replicas, ranks and nodes, and what a replica waits for."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from manta.deploy.status_view import ServerStatus, print_status

READY = {
    "status": "ready",
    "model": "m",
    "roles": {"prefill": 1, "decode": 0},
    "replicas": [
        {
            "replica_id": "x1",
            "role": "prefill",
            "ready": True,
            "draining": False,
            "last_frame_age_s": 0.21,
            "num_running": 3,
            "num_waiting": 17,
            "kv_cache_usage": 0.42,
            "num_steps": 1234,
        },
        {"replica_id": "x2", "role": "decode", "ready": False, "draining": True, "last_frame_age_s": None},
    ],
}
RANK = {"rank": 0, "state": "up", "address": "10.0.0.2", "pid": 77, "gpu_ids": ["0"], "phases_s": {"weights": 4.25}}
ABSENT = {"rank": 1, "state": "absent", "address": None, "pid": None, "gpu_ids": [], "phases_s": {}}
CLUSTER = {
    "missing": "needs 8 GPUs in one node, the largest free block is 6",
    "gangs": [
        {"replica_id": "x1", "pool": "prefill", "state": "placed", "nodes": ["10.0.0.2"], "ranks": [RANK, ABSENT]},
        {"replica_id": "x9", "pool": "decode", "state": "waiting", "nodes": [], "ranks": []},
    ],
    "nodes": [
        {
            "address": "10.0.0.2",
            "node_id": "ab",
            "is_head": True,
            "num_gpus": 8.0,
            "free_gpus": 6.0,
            "num_cpus": 64.0,
            "free_cpus": 63.25,
            "labels": {"ray.io/node-id": "ab", "manta/gpu": "NVIDIA-H200"},
        }
    ],
}


def printed(status: ServerStatus) -> str:
    out = io.StringIO()
    print_status(Console(file=out, width=200), status)
    return "\n".join(" ".join(line.split()) for line in out.getvalue().splitlines())


def status(code: int = 200, ready: dict[str, Any] = READY, cluster: dict[str, Any] | None = CLUSTER) -> ServerStatus:
    return ServerStatus("http://h:8000", code, ready, cluster, ["m"])


def test_replicas_are_shown_with_queue_and_cache() -> None:
    text = printed(status())
    assert "http://h:8000: ready" in text
    assert "model m" in text
    assert "ready: 1 prefill, 0 decode" in text
    assert "x1 │ prefill │ ready │ 3 │ 17 │ 42% │ 1234 │ 0.2 s ago" in text
    assert "x2 │ decode │ draining │" in text


def test_ranks_are_shown_with_their_phases_of_start_up() -> None:
    text = printed(status())
    assert "prefill │ x1 │ 0 │ up │ 10.0.0.2 │ 77 │ 0 │ weights 4.2 s" in text
    assert "prefill │ x1 │ 1 │ absent │" in text
    assert "decode │ x9 │ │ waiting for room │" in text


def test_nodes_are_shown_with_what_is_free_and_their_labels() -> None:
    assert "10.0.0.2 (head) │ 6 of 8 │ 63.25 of 64 │ manta/gpu=NVIDIA-H200" in printed(status())


def test_what_a_replica_waits_for_is_said() -> None:
    text = printed(status(503, {"status": "loading", "replicas": []}))
    assert "not ready (loading)" in text
    assert "A replica waits for room: it needs 8 GPUs in one node, the largest free block is 6." in text


def test_a_server_without_a_cluster_is_shown_too() -> None:
    assert "nodes" not in printed(status(cluster=None))


def test_machines_get_one_object() -> None:
    tree = status().as_tree()
    assert tree["is_ready"] is True
    assert tree["replicas"] == READY["replicas"]
    assert tree["cluster"] == CLUSTER
    assert tree["missing"].startswith("needs 8 GPUs")
