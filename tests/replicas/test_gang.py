"""A gang of two ranks on Ray Serve, gloo on CPUs or NCCL on two GPUs: tokens of one rank, seen from outside, and whole
or gone."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from manta import LLM, SamplingParams
from tests.deploy.test_serve import Served, manta, wait_until
from tests.gpus import needs_two_gpus
from tests.replicas.edge.local_server import write_byte_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPTS = ["The quick brown fox", "jumps over", "the lazy dog"]
NUM_TOKENS = 200
MODEL = {"load_format": "dummy", "max_model_len": 512, "dtype": "float32"}
DEVICE_SIZES: dict[str, dict[str, Any]] = {"cpu": {"cpu_cache_gib": 0.02}, "cuda": {"num_blocks": 64}}
"""Small: on a GPU another engine has to fit beside the gang."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(folder: Path, device: str) -> Iterator[Served]:
    settings = {**MODEL, **DEVICE_SIZES[device], "served_model_name": "bytes", "tensor_parallel_size": 2}
    one = Served(*(f"{name}={value}" for name, value in settings.items()), target=str(folder), device=device)
    try:
        one.wait_line("Ctrl-C stops it.")
        yield one
        one.process.send_signal(signal.SIGTERM)
        assert one.wait_exit() == 0, one.output
        one.assert_nothing_left()
    finally:
        one.close()


@pytest.fixture(scope="module")
def expected(folder: Path, device: str) -> list[list[int]]:
    """Of one rank in this process."""
    llm = LLM(str(folder), device=device, **{**MODEL, **DEVICE_SIZES[device]})
    try:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]
    finally:
        llm.close()


def generate(server: Served, prompt: str) -> list[int]:
    body: dict[str, Any] = {"model": "bytes", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def get(server: Served, path: str) -> dict[str, Any]:
    return httpx.get(f"{server.url}{path}", timeout=10, trust_env=False).json()


def num_ready(server: Served) -> int:
    return sum(replica["ready"] for replica in get(server, "/ready")["replicas"])


def gang(server: Served) -> dict[str, Any]:
    """The one gang that has its place."""
    (one,) = get(server, "/cluster")["gangs"]
    return one


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_ranks_give_the_tokens_of_one(server: Served, expected: list[list[int]]) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda prompt: generate(server, prompt), PROMPTS)) == expected


def test_status_shows_every_rank_with_its_start_up(server: Served) -> None:
    done = manta("status", "--url", server.url, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    ranks = status["cluster"]["gangs"][0]["ranks"]
    assert [(rank["rank"], rank["state"]) for rank in ranks] == [(0, "up"), (1, "up")]
    assert all("weights" in " ".join(rank["phases_s"]) for rank in ranks)
    assert len({rank["pid"] for rank in ranks}) == 2
    assert status["cluster"]["nodes"][0]["is_head"]
    assert status["missing"] is None
    assert "waiting" in manta("status", "--url", server.url).stdout


def test_logs_are_found_by_replica_and_rank(server: Served) -> None:
    replica_id = gang(server)["replica_id"]
    both = manta("logs", replica_id)
    assert both.returncode == 0, both.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] " in both.stdout
        assert f"rank {rank} of replica {replica_id} starts in process" in both.stdout
    one = manta("logs", replica_id, "--rank", "1", "--tail", "1000")
    assert "rank 0 of" not in one.stdout
    wrong = manta("logs", "nonsense")
    assert wrong.returncode == 1
    assert replica_id in wrong.stderr


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_that_dies_or_freezes_takes_its_gang_along_and_the_gang_comes_back_whole(
    server: Served, expected: list[list[int]], rank: int, number: signal.Signals
) -> None:
    before = gang(server)
    pids = [one["pid"] for one in before["ranks"]]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        streams = [pool.submit(generate, server, prompt) for prompt in PROMPTS]
        wait_until(lambda: server.num_running() == len(PROMPTS))
        os.kill(pids[rank], number)
        struck_at_s = time.monotonic()
        wait_until(lambda: num_ready(server) == 0, timeout_s=10)
        assert time.monotonic() - struck_at_s < 5.0
        wait_until(lambda: num_ready(server) == 1, timeout_s=120)
        print(f"rank {rank}, {number.name}: serving again after {time.monotonic() - struck_at_s:.1f} s")
        # Streams that were on their way end as if nothing had happened.
        assert [stream.result() for stream in streams] == expected
    after = gang(server)
    assert after["replica_id"] != before["replica_id"]
    assert [one["state"] for one in after["ranks"]] == ["up", "up"]
    assert not set(pids) & {one["pid"] for one in after["ranks"]}
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
