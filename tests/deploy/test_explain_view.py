"""What `manta explain` prints of a server's answer."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from manta.deploy.chat import ServerClient, ServerError
from manta.deploy.explain_view import print_explanation

TERMS = {
    "num_cached_tokens": 640, "queue_s": 0.01, "prefill_s": 0.02, "first_token_s": 0.03, "transfer_s": 0.0,
    "decode_s": 0.5, "interference_s": 0.001, "affinity_s": -0.01, "total_s": 0.521,
}  # fmt: skip
DECISION: dict[str, Any] = {
    "decided_at_s": 1_700_000_000.0,
    "waited_s": 0.25,
    "reason": "least cost of 2 candidates",
    "outcome": "finished",
    "num_cached_tokens": 624,
    "actual_s": 0.04,
    "replica_id": "replica-a",
    "prefill_replica_id": None,
    "estimate": TERMS,
    "candidates": [
        {
            "replica_id": "replica-a",
            "prefill_replica_id": None,
            "rejected": None,
            "terms": TERMS,
            "num_requests": 3,
            "noise_s": 0.0012,
        },
        {
            "replica_id": "replica-b",
            "prefill_replica_id": None,
            "rejected": "is full: 4 of 4 requests",
            "terms": None,
            "num_requests": 4,
            "noise_s": 0.0,
        },
    ],
}


def printed(*decisions: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    sequences = [{"sequence_id": "cmpl-1-0", "decisions": list(decisions)}]
    print_explanation(console, {"request_id": "cmpl-1", "edge_id": "edge-7", "sequences": sequences})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_candidate_is_shown_with_its_terms_the_chosen_one_marked() -> None:
    text = printed(DECISION)
    assert "request cmpl-1, served by edge edge-7" in text
    (chosen,) = [line for line in text.splitlines() if line.startswith("> ")]
    assert chosen.split() == [
        ">",
        "replica-a",
        "│",
        "│",
        "640",
        *_cells("0.0100 0.0200 0.0000 0.5000 0.0010 -0.0100 0.5210 0.0012 3"),
        "│",
    ]
    assert "is full: 4 of 4 requests" in text
    assert "first token estimated after 0.0300 s; came after 0.0400 s; 624 prompt tokens were cached; finished" in text
    assert "after 0.250 s in the edge" in text


def _cells(numbers: str) -> list[str]:
    return [cell for number in numbers.split() for cell in ("│", number)]


def test_a_refusal_is_shown_with_the_wait_that_it_would_have_been() -> None:
    refused = {**DECISION, "replica_id": None, "estimate": None, "actual_s": None, "num_cached_tokens": None}
    refused |= {"reason": "deadline", "estimated_wait_s": 2.5, "outcome": "refused: too late"}
    text = printed(refused)
    assert "no replica" in text
    assert "estimated wait 2.5000 s; refused: too late" in text
    assert not [line for line in text.splitlines() if line.startswith("> ")]


def test_a_request_that_nobody_remembers_is_one_sentence() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/explain/cmpl-1"
        return httpx.Response(404, json={"error": {"message": "No edge remembers it.", "type": "x"}})

    client = ServerClient("http://server", transport=httpx.MockTransport(answer))
    with pytest.raises(ServerError, match="No edge remembers it"):
        client.explain("cmpl-1")
