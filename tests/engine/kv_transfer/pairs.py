"""Two real engines in one process, one to prefill and one to decode, and what an edge does between them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.kv_transfer.messages import KvPeer, SendKv, TakeKv
from manta.engine.request import EngineRequest, RequestDelta, SamplingParams
from manta.engine.startup import start_engine

WAIT_S = 300.0

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 307,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""Nine heads and three KV heads, as the demo model has; weights are random, and the same for every engine."""


def tiny_model(folder: Path) -> str:
    """A model without weights of its own, for `load_format: dummy`."""
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def start(model: str, **overrides: Any) -> EngineCore:
    """On CPU in float32, small, and ready to exchange KV unless `overrides` say otherwise."""
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "load_format": "auto" if model == "smollm2-135m" else "dummy",
        "num_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_transfer": True,
        "kv_checksums": True,
    }
    return start_engine(EngineConfig.build(model, **{**defaults, **overrides}))


class Pair:
    """P and D. Requests go by name: `NAME` under P and D alike, ticket t-NAME."""

    def __init__(self, p: EngineCore, d: EngineCore) -> None:
        self.p, self.d = p, d
        self.tokens: dict[str, list[int]] = {}
        self.deltas: dict[str, list[RequestDelta]] = {}
        self.ended: set[str] = set()
        self._requests: dict[str, EngineRequest] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.p.close()
        self.d.close()

    @property
    def peer(self) -> KvPeer:
        """D's."""
        assert self.d.info.kv is not None
        return self.d.info.kv

    def begin(self, name: str, prompt: list[int], params: SamplingParams, *, to: KvPeer | None = None) -> None:
        """D expects, P gets the request."""
        request = EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)
        self._requests[name], self.tokens[name], self.deltas[name] = request, [], []
        self.d.expect(f"t-{name}", prompt)
        params = msgspec.structs.replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
        handoff = SendKv(f"t-{name}", to or self.peer)
        assert self.p.add(msgspec.structs.replace(request, params=params, handoff=handoff)) is None

    def go_on(self, name: str) -> None:
        """D gets the request with what P has generated."""
        request, handoff = self._requests[name], TakeKv(f"t-{name}")
        params = msgspec.structs.replace(request.params, prompt_logprobs=None)
        tokens = list(self.tokens[name])
        assert (
            self.d.add(msgspec.structs.replace(request, params=params, output_token_ids=tokens, handoff=handoff))
            is None
        )

    def turn(self, *, hands_on: bool = True) -> None:
        """Both loops once."""
        for core in (self.p, self.d):
            core.poll()
            for delta in core.step() if core.has_work else []:
                self.tokens[delta.request_id] += delta.token_ids
                self.deltas[delta.request_id].append(delta)
                if core is self.p and hands_on:
                    self.go_on(delta.request_id)
                elif core is self.d and delta.finish_reason is not None:
                    self.ended.add(delta.request_id)
            core.check()

    def run_until(self, condition: Callable[[], object], *, hands_on: bool = True) -> None:
        """Turns until it holds; sleeps while there is nothing to do, as the engines' loops do."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, "it did not become true in time"
            self.turn(hands_on=hands_on)
            if not (self.p.has_work or self.d.has_work):
                poller = zmq.Poller()
                for source in (*self.p.pollables, *self.d.pollables):
                    poller.register(source, zmq.POLLIN)
                poller.poll(20)

    def run(self, *names: str) -> None:
        """Until the requests have ended and nothing is on its way."""
        self.run_until(lambda: self.ended >= set(names) and self.is_idle)

    @property
    def is_idle(self) -> bool:
        """Whether both engines hold nothing and wait for nothing."""
        snapshots = [core.snapshot() for core in (self.p, self.d)]
        return not any(
            one.num_running or one.num_waiting or one.num_kv_leases or one.num_used_blocks for one in snapshots
        ) and not (self.p.has_work or self.d.has_work)

    def forget_cached(self) -> None:
        """Both prefix caches are empty afterwards."""
        for core in (self.p, self.d):
            core.scheduler.cache.pool.evict_all()


def alone(core: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[RequestDelta]]:
    """What one engine makes of each prompt by itself, from an empty cache."""
    found = []
    for prompt in prompts:
        core.scheduler.cache.pool.evict_all()
        assert core.add(EngineRequest(request_id="alone", prompt_token_ids=prompt, params=params)) is None
        deltas: list[RequestDelta] = []
        while core.has_work:
            deltas += core.step()
        found.append(deltas)
    return found


def tokens_of(deltas: list[RequestDelta]) -> list[int]:
    """All tokens, in order."""
    return [token_id for delta in deltas for token_id in delta.token_ids]
