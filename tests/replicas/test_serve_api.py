"""The API's cases against the real thing: `manta serve`, Ray Serve, its proxy, the channel; and the demo model's golden
tokens through all of it. Every started server ends without anything left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.deploy.test_serve import Served
from tests.replicas.edge.cases import ApiCases
from tests.replicas.edge.local_server import write_byte_model
from tests.replicas.edge.server import Server
from tests.replicas.edge.test_cases_model import assert_golden_tokens, assert_golden_tokens_streamed

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]


@contextmanager
def running(served: Served) -> Iterator[Server]:
    """The server once it is ready; ended as with Ctrl-C, after which nothing of it is left."""
    try:
        served.wait_line("Ctrl-C stops it.")
        server = Server(served.url, *facts_of(served))
        yield server
        server.assert_idle(within_s=20)
        server.http.close()
        served.process.send_signal(signal.SIGINT)
        assert served.wait_exit() == 0, served.output
        served.assert_nothing_left()
    finally:
        served.close()


def facts_of(served: Served) -> tuple[str, int, int, int]:
    """Name, context, vocabulary and block size, as the API's tests want to know them."""
    model = httpx.get(f"{served.url}/v1/models", trust_env=False).json()["data"][0]
    vocab_size = {"bytes": 258, "smollm2-135m": 49152}[model["id"]]
    return model["id"], model["max_model_len"], vocab_size, 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_byte_model(tmp_path_factory.mktemp("bytes"))
    settings = [
        "load_format=dummy", "served_model_name=bytes", "max_model_len=1024", "block_size=16", "num_blocks=4096",
        "max_num_seqs=64", "max_num_batched_tokens=2048",
    ]  # fmt: skip
    with running(Served(*settings, target=str(folder), device="sim:1ms")) as server:
        yield server


class TestServedApi(ApiCases):
    num_dropped = 160


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_golden_tokens_through_ray_serve_streamed_and_not(device: str) -> None:
    settings = ["dtype=float32", "max_model_len=256", "max_num_seqs=32", "cpu_cache_gib=0.5"]
    with running(Served(*settings, target="smollm2-135m", device=device)) as server:
        assert_golden_tokens(server)
        assert_golden_tokens_streamed(server)
