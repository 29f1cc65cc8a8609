"""The API's cases on the demo model in float32 on the CPU, and its golden tokens over HTTP, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manta.engine.config import EngineConfig
from tests.replicas.edge.cases import ApiCases
from tests.replicas.edge.local_server import local_server
from tests.replicas.edge.server import CHAT, COMPLETIONS, Server, at_once

pytestmark = pytest.mark.model

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "data" / "golden" / "smollm2_135m_q4_1.json").read_text(encoding="utf-8")
)["prompts"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = EngineConfig.build(
        "smollm2-135m", dtype="float32", device="cpu", max_model_len=256, max_num_seqs=32, cpu_cache_gib=0.5
    )
    with local_server(config) as local:
        yield local.server
        local.core.scheduler.check()


class TestDemoModel(ApiCases):
    num_dropped = 32
    num_neighbours = 3
    stop_distance = 50
    num_tokens = 20


def body_of(golden: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    common = {"max_tokens": 64, "temperature": 0, "return_token_ids": True}
    if golden["kind"] == "chat":
        return CHAT, {"messages": [{"role": "user", "content": golden["prompt"]}], **common}
    return COMPLETIONS, {"prompt": golden["prompt"], **common}


def assert_golden_tokens(server: Server) -> None:
    """All prompts at once, not streamed."""

    def check(golden: dict[str, Any]) -> None:
        path, body = body_of(golden)
        answer = server.ok(path, **body)
        choice = answer["choices"][0]
        assert choice["token_ids"] == golden["continuation_ids"]
        assert answer["usage"]["prompt_tokens"] == len(golden["prompt_ids"])
        assert answer["usage"]["completion_tokens"] == len(golden["continuation_ids"])
        prompt_ids = answer["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
        assert prompt_ids == golden["prompt_ids"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text == golden["text"].removesuffix("<|im_end|>")
        assert choice["finish_reason"] == ("stop" if golden["text"].endswith("<|im_end|>") else "length")

    at_once([lambda golden=golden: check(golden) for golden in GOLDEN])


def assert_golden_tokens_streamed(server: Server) -> None:
    """All prompts at once, streamed."""

    def check(golden: dict[str, Any]) -> None:
        path, body = body_of(golden)
        choices = [event["choices"][0] for event in server.events(path, **body) if event != "[DONE]"]
        assert [token for choice in choices for token in choice.get("token_ids", ())] == golden["continuation_ids"]
        texts = [choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices]
        assert "".join(texts) == golden["text"].removesuffix("<|im_end|>")

    at_once([lambda golden=golden: check(golden) for golden in GOLDEN])


def test_golden_tokens(server: Server) -> None:
    assert_golden_tokens(server)


def test_golden_tokens_streamed(server: Server) -> None:
    assert_golden_tokens_streamed(server)


def test_chat_logprobs_have_exact_bytes(server: Server) -> None:
    golden = next(golden for golden in GOLDEN if golden["kind"] == "chat")
    _, body = body_of(golden)
    choice = server.ok(CHAT, **body, logprobs=True, top_logprobs=2)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(golden["continuation_ids"])
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == golden["text"]
    for entry, logprob in zip(entries, golden["logprobs"], strict=True):
        assert entry["logprob"] == pytest.approx(logprob, abs=2e-3)
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert len(entry["top_logprobs"]) == 2
