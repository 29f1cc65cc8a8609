"""Starts the edge over an engine core in this process. For tests only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from manta.engine.config import EngineConfig
from manta.engine.core import EngineCore
from manta.engine.model_source import resolve_model
from manta.engine.startup import start_engine
from manta.engine.tokenizer import Tokenizer
from manta.replicas.edge.app import create_app
from manta.replicas.edge.client import EdgeContext
from tests.replicas.edge.local_client import LocalClient, MemoryObserver
from tests.replicas.edge.server import Server, serving

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class LocalServer:
    """A server together with its inside."""

    server: Server
    context: EdgeContext
    core: EngineCore
    observer: MemoryObserver


@contextmanager
def local_server(config: EngineConfig, **context_fields: Any) -> Iterator[LocalServer]:
    """The API over a core that is started for it."""
    core = start_engine(config)
    try:
        with edge_over(core, config, **context_fields) as local:
            yield local
    finally:
        core.close()


@contextmanager
def edge_over(core: EngineCore, config: EngineConfig, **context_fields: Any) -> Iterator[LocalServer]:
    """The API over a core that lives on."""
    observer = MemoryObserver()
    tokenizer = Tokenizer.load(resolve_model(config.model), chat_template=config.model.chat_template)
    client = LocalClient(core, observer)
    name = core.info.model_name
    context = EdgeContext(client, tokenizer, name, observer=observer, **context_fields)
    try:
        with serving(create_app(context)) as base_url:
            info = core.info
            server = Server(base_url, name, info.max_model_len, info.vocab_size, info.block_size)
            yield LocalServer(server, context, core, observer)
            server.http.close()
    finally:
        client.close()


def write_byte_model(folder: Path) -> Path:
    """A model folder without weights whose tokens are single bytes: random tokens are broken characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(vocab),
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def sim_config(folder: Path, **overrides: Any) -> EngineConfig:
    """The byte model on a simulated device whose steps take a millisecond."""
    fields = {"device": "sim:1ms", "load_format": "dummy", "served_model_name": "bytes", "max_model_len": 1024}
    fields |= {"block_size": 16, "num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return EngineConfig.build(str(folder), **{**fields, **overrides})
