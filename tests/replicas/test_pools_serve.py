"""Prefill and decode pools on Ray Serve with the real model: golden tokens, clients that leave, kills, roles.

One application with one replica in each pool. Every prompt is handed over, since the deployment says so.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.test_serve import ROOT, Served, wait_until
from tests.gpus import needs_two_gpus
from tests.replicas.edge.server import Server, at_once, eventually
from tests.replicas.edge.test_cases_model import GOLDEN, assert_golden_tokens, assert_golden_tokens_streamed
from tests.replicas.test_serve_api import running

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

SETTINGS = (
    "pools.prefill.num_replicas=1", "pools.decode.engine={max_num_seqs: 32}", "detour_from_tokens=1", "dtype=float32",
    "max_model_len=256", "max_num_seqs=32", "cpu_cache_gib=0.3", "kv_checksums=true", "kv_lease_s=10", "kv_wait_s=5",
)  # fmt: skip


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(Served(*SETTINGS, target="smollm2-135m", device=request.param)) as one:
        yield one


def replicas(server: Server) -> list[dict[str, Any]]:
    return server.http.get("/ready").json()["replicas"]


def replica_of(server: Server, role: str) -> dict[str, Any]:
    (found,) = [one for one in replicas(server) if one["role"] == role]
    return found


def pids(server: Server, pool: str) -> list[int]:
    gangs = server.http.get("/cluster").json()["gangs"]
    return [rank["pid"] for gang in gangs if gang["pool"] == pool for rank in gang["ranks"] if rank["pid"]]


def by_role(server: Server) -> dict[str, int]:
    return server.http.get("/ready").json()["roles"]


def transfers(server: Server) -> tuple[float, float]:
    """Hand-overs whose KV was used, and those that were computed again."""
    return server.metric("manta_kv_received_total"), server.metric("manta_kv_recomputed_total")


def assert_both_sides_are_free(server: Server) -> None:
    def held() -> float:
        return sum(one["num_used_blocks"] + one["num_kv_leases"] + one["num_running"] for one in replicas(server))

    assert eventually(lambda: held() == 0, within_s=60), replicas(server)


def wait_whole(server: Server) -> None:
    wait_until(lambda: by_role(server) == {"prefill": 1, "decode": 1}, timeout_s=90)
    wait_until(lambda: len(replicas(server)) == 2)


def manta(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manta", *arguments, "--url", server.base_url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_golden_tokens_come_over_both_pools_and_nothing_is_computed_twice(server: Server) -> None:
    assert by_role(server) == {"prefill": 1, "decode": 1}
    assert_golden_tokens(server)
    assert_golden_tokens_streamed(server)
    received, recomputed = transfers(server)
    assert received == server.metric("manta_handoffs_total") >= len(GOLDEN)
    assert recomputed == 0
    assert server.metric("manta_kv_bytes_total") > 0
    assert_both_sides_are_free(server)


def test_choices_logprobs_and_stop_strings_are_those_of_the_golden_text(server: Server) -> None:
    golden = next(one for one in GOLDEN if one["kind"] != "chat" and len(one["continuation_ids"]) >= 12)
    prompt, tokens = golden["prompt_ids"], golden["continuation_ids"]
    fields = {"max_tokens": len(tokens), "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = server.complete(prompt, n=2, logprobs=1, **fields)
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens, tokens]
    assert answer["usage"]["completion_tokens"] == 2 * len(tokens)
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(golden["logprobs"], abs=2e-3)
    # A stop string inside the text, and one that is the first token's.
    text = answer["choices"][0]["text"]
    for stop in (text[len(text) // 2 : len(text) // 2 + 4], text[:1]):
        stopped = server.complete(prompt, stop=[stop], **fields)["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert stopped["text"] == text[: text.index(stop)]
    assert_both_sides_are_free(server)


def test_p24_abandoning_a_request_during_the_hand_over_leaks_nothing_on_either_side(server: Server) -> None:
    context = server.max_model_len
    rng = random.Random(24)
    prompt = "w " * (context // 3)
    want = server.text(prompt, max_tokens=16, temperature=0)
    before = server.metric("manta_engine_cancelled_total")

    def quit_at(seconds: float) -> None:
        body = {"prompt": [rng.randrange(20, 200)] + [9] * (context // 2), "max_tokens": 64, "stream": True}
        try:
            reply = httpx.post(
                f"{server.base_url}/v1/completions",
                json={"model": server.model, **body},
                timeout=httpx.Timeout(seconds, connect=5.0),
                trust_env=False,
            )
        except httpx.TimeoutException:
            return
        assert reply.status_code in (200, 429, 503)

    killed = pids(server, "prefill")
    for number in range(15):
        if number == 10:
            os.kill(killed[0], signal.SIGKILL)
        at_once([lambda: quit_at(rng.uniform(0.005, 0.6)) for _ in range(16)])
    assert server.metric("manta_engine_cancelled_total") > before
    wait_whole(server)
    assert pids(server, "prefill") != killed
    assert_both_sides_are_free(server)
    assert server.text(prompt, max_tokens=16, temperature=0) == want  # reused blocks were not written by a late copy


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_kill_on_either_side_is_survived_and_the_pair_works_again(server: Server, pool: str) -> None:
    wait_whole(server)
    golden = next(one for one in GOLDEN if one["kind"] != "chat" and len(one["continuation_ids"]) >= 16)
    tokens = golden["continuation_ids"][:16]
    fields = {"max_tokens": len(tokens), "temperature": 0, "return_token_ids": True}
    (pid,) = pids(server, pool)
    moved = server.metric("manta_replicas_lost_total")

    def ask(index: int) -> list[int]:
        if index == 5:
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
        answer = server.complete(golden["prompt_ids"], ignore_eos=True, **fields)
        return answer["choices"][0]["token_ids"]

    answers = at_once([lambda index=index: ask(index) for index in range(6)])
    assert answers == [tokens] * 6
    # While one side is missing the other does it all.
    assert ask(0) == tokens
    wait_whole(server)
    assert server.metric("manta_replicas_lost_total") > moved
    assert pids(server, pool) != [pid]
    received = transfers(server)[0]
    fresh = [random.Random(pid).randrange(1000, 20000) for _ in range(100)]
    server.complete(fresh, max_tokens=4, temperature=0)
    assert eventually(lambda: transfers(server)[0] > received, within_s=10)
    assert_both_sides_are_free(server)


def test_roles_are_shown_and_changed_without_a_reload(server: Server) -> None:
    wait_whole(server)
    prefill, decode = replica_of(server, "prefill")["replica_id"], replica_of(server, "decode")["replica_id"]
    before = pids(server, "prefill") + pids(server, "decode")
    shown = manta(server, "status")
    assert shown.returncode == 0, shown.stderr
    assert "ready: 1 prefill, 1 decode" in shown.stdout
    refused = manta(server, "role", prefill, "decode")
    assert refused.returncode == 1
    assert f"Replica {prefill} is the only one that is ready for prefill" in refused.stderr
    unknown = server.http.post("/cluster/role", json={"replica": prefill, "role": "both"})
    assert unknown.status_code == 400
    changed = manta(server, "role", prefill, "mixed")
    assert changed.returncode == 0, changed.stderr
    assert f"replica {prefill} is mixed" in changed.stdout
    assert by_role(server) == {"prefill": 0, "decode": 1, "mixed": 1}
    assert_golden_tokens(server)
    # Now the two change places.
    for replica, role in ((decode, "prefill"), (prefill, "decode")):
        assert manta(server, "role", replica, role).returncode == 0
    received, recomputed = transfers(server)
    assert_golden_tokens(server)
    assert transfers(server)[0] > received
    assert transfers(server)[1] == recomputed
    assert pids(server, "prefill") + pids(server, "decode") == before
    assert json.loads(manta(server, "status", "--json").stdout)["roles"] == {"prefill": 1, "decode": 1}
