"""What `manta explain` prints: how a request was routed, decision by decision, as tables. Knows no HTTP and no Ray."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

_TERMS = {
    "queue": "queue_s", "prefill": "prefill_s", "transfer": "transfer_s", "decode": "decode_s",
    "others": "interference_s", "session": "affinity_s",
}  # fmt: skip
"""Columns of a candidate's costs, and the terms that they show."""


def print_explanation(console: Console, found: dict[str, Any]) -> None:
    """The answer of a server's /explain."""
    console.print(f"request {found['request_id']}, served by edge {found.get('edge_id', '?')}", **_PLAIN)
    for sequence in found["sequences"]:
        for number, decision in enumerate(sequence["decisions"], 1):
            console.print()
            console.print(_headline(sequence["sequence_id"], number, decision), **_PLAIN)
            console.print(f"  {decision['reason']}", **_PLAIN)
            console.print(f"  {_outcome(decision)}", **_PLAIN)
            if decision["candidates"]:
                console.print(candidate_table(decision))


def candidate_table(decision: dict[str, Any]) -> Table:
    """All replicas, or pairs of them, that were considered: seconds of each term, and why others were rejected.

    Those whose totals, each give or take its noise, overlap with the least one's are level: requests decide there."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("replica", "prompt on", "cached"):
        table.add_column(column, overflow="fold")
    for column in (*_TERMS, "total", "noise", "requests"):
        table.add_column(column, justify="right")
    table.add_column("rejected because it", overflow="fold")
    chosen = (decision["replica_id"], decision["prefill_replica_id"])
    for one in decision["candidates"]:
        terms = one["terms"]
        numbers = [""] * (len(_TERMS) + 4)
        if terms is not None:
            seconds = [*(terms[name] for name in (*_TERMS.values(), "total_s")), one["noise_s"]]
            cells = [f"{value:.4f}" for value in seconds]
            numbers = [str(terms["num_cached_tokens"]), *cells, str(one["num_requests"])]
        is_chosen = (one["replica_id"], one["prefill_replica_id"]) == chosen and not one["rejected"]
        table.add_row(
            ("> " if is_chosen else "  ") + one["replica_id"],
            one["prefill_replica_id"] or "",
            *numbers,
            one["rejected"] or "",
        )
    return table


def _headline(sequence_id: str, number: int, decision: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(decision["decided_at_s"]).strftime("%H:%M:%S")
    waited = f", after {decision['waited_s']:.3f} s in the edge" if decision["waited_s"] >= 0.001 else ""
    where = decision["replica_id"] or "no replica"
    if decision["prefill_replica_id"] is not None:
        where += f", prompt on {decision['prefill_replica_id']}"
    return f"{sequence_id}, decision {number} at {at}{waited}: {where}"


def _outcome(decision: dict[str, Any]) -> str:
    estimate, parts = decision.get("estimate"), []
    if estimate is not None:
        parts.append(f"first token estimated after {estimate['first_token_s']:.4f} s")
    if decision.get("estimated_wait_s") is not None:
        parts.append(f"estimated wait {decision['estimated_wait_s']:.4f} s")
    if decision["actual_s"] is not None:
        parts.append(f"came after {decision['actual_s']:.4f} s")
    if decision["num_cached_tokens"] is not None:
        parts.append(f"{decision['num_cached_tokens']} prompt tokens were cached")
    return "; ".join([*parts, decision["outcome"]])


_PLAIN: dict[str, Any] = {"highlight": False, "markup": False}
