"""What `manta status` prints: the answers of a server's /ready and /cluster as tables. Knows no HTTP and no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class ServerStatus:
    """What a server said about itself."""

    url: str
    ready_code: int
    ready: dict[str, Any]
    """Body of /ready."""
    cluster: dict[str, Any] | None
    """Body of /cluster, where there is one."""
    models: list[str]

    @property
    def is_ready(self) -> bool:
        return self.ready_code == 200

    @property
    def missing(self) -> str | None:
        """What a replica lacks that waits for room."""
        return (self.cluster or {}).get("missing") or self.ready.get("missing")

    def as_tree(self) -> dict[str, Any]:
        """For machines; one object, whose fields are those of /ready and /cluster."""
        return {
            "url": self.url,
            "is_ready": self.is_ready,
            "models": self.models,
            **self.ready,
            "cluster": self.cluster,
            "missing": self.missing,
        }


def print_status(console: Console, status: ServerStatus) -> None:
    """Everything that a person wants to see at once."""
    word = "ready" if status.is_ready else f"not ready ({status.ready.get('status', status.ready_code)})"
    console.print(f"{status.url}: {word}", highlight=False, markup=False)
    for name in status.models:
        console.print(f"  model {name}", highlight=False, markup=False)
    if status.missing:
        console.print(f"A replica waits for room: it {status.missing}.", style="yellow", markup=False, highlight=False)
    roles = status.ready.get("roles", {})
    if len(roles) > 1:
        counts = ", ".join(f"{count} {role}" for role, count in roles.items())
        console.print(f"  ready: {counts}", highlight=False, markup=False)
    replicas = status.ready.get("replicas", [])
    if replicas:
        console.print(replica_table(replicas))
    if status.cluster is not None:
        console.print(rank_table(status.cluster["gangs"]))
        console.print(node_table(status.cluster["nodes"]))


def replica_table(replicas: list[dict[str, Any]]) -> Table:
    """Queue and cache of each replica."""
    table = _table("replicas", "replica", "role", "state", "running", "waiting", "cache", "steps", "heard")
    for replica in replicas:
        state = "draining" if replica.get("draining") else "ready" if replica.get("ready") else "not ready"
        age_s = replica.get("last_frame_age_s")
        table.add_row(
            replica["replica_id"],
            replica.get("role") or "",
            state,
            _number(replica.get("num_running")),
            _number(replica.get("num_waiting")),
            "" if replica.get("kv_cache_usage") is None else f"{replica['kv_cache_usage']:.0%}",
            _number(replica.get("num_steps")),
            "" if age_s is None else f"{age_s:.1f} s ago",
        )
    return table


def rank_table(gangs: list[dict[str, Any]]) -> Table:
    """Every rank of every replica, with the phases of its start-up."""
    table = _table("ranks", "pool", "replica", "rank", "state", "node", "process", "GPU", "start-up")
    for gang in gangs:
        if gang["state"] != "placed":
            table.add_row(gang["pool"], gang["replica_id"], "", "waiting for room", "", "", "", "")
            continue
        for rank in gang["ranks"]:
            phases = rank["phases_s"]
            started = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items() if seconds >= 0.05)
            table.add_row(
                gang["pool"],
                gang["replica_id"],
                str(rank["rank"]),
                rank["state"],
                rank["address"] or "",
                _number(rank["pid"]),
                ", ".join(rank["gpu_ids"]),
                started,
            )
    return table


def node_table(nodes: list[dict[str, Any]]) -> Table:
    """Nodes, and what of each is free."""
    table = _table("nodes", "node", "GPUs free", "CPUs free", "labels")
    for node in nodes:
        labels = [f"{name}={value}" for name, value in node["labels"].items() if name != "ray.io/node-id"]
        table.add_row(
            node["address"] + (" (head)" if node["is_head"] else ""),
            f"{node['free_gpus']:g} of {node['num_gpus']:g}",
            f"{node['free_cpus']:.4g} of {node['num_cpus']:g}",
            " ".join(labels),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
