"""Logits of the decoder against transformers' on tiny random Llamas of all kinds, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manta.engine.layers.attention import AttentionBatch, DecodeRows, LastRows, LayerCache, PrefillRows
from manta.engine.layers.linear import Linear, can_pack
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource, load_shape
from manta.engine.models.decoder import Decoder
from manta.engine.weights.load import load_weights
from tests.engine.runners import save_tiny

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention biases only": {"attention_bias": True},
    "head_dim of its own": {"head_dim": 32},
    "one query head a KV head": {"num_key_value_heads": 6},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn with a factor": {"rope_parameters": {**YARN, "attention_factor": 1.3}},
}


def decoder_of(folder: Path) -> tuple[ModelShape, Decoder]:
    source = ModelSource("tiny", "safetensors", folder, None)
    shape = load_shape(source)
    parameters = load_weights(source, shape, dtype=torch.float32, device=CPU)
    return shape, Decoder(shape, parameters, max_position=256)


def whole_prompt(shape: ModelShape, num_tokens: int) -> tuple[AttentionBatch, list[LayerCache]]:
    """One prefill from position 0 in blocks 0, 1, ... of 16 tokens."""
    num_blocks = -(-num_tokens // 16)
    positions = torch.arange(num_tokens)
    rows = PrefillRows(
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        table_rows=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    size = (num_blocks, 16, shape.num_kv_heads, shape.head_dim)
    caches = [LayerCache(torch.zeros(size), torch.zeros(size)) for _ in range(shape.num_layers)]
    return AttentionBatch(positions, positions, None, rows), caches


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]):
    reference = save_tiny(tmp_path, **config)
    shape, decoder = decoder_of(tmp_path)
    token_ids = torch.randint(0, shape.vocab_size, (150,), generator=torch.Generator().manual_seed(1))
    batch, caches = whole_prompt(shape, len(token_ids))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
        found = decoder.logits(decoder.forward(token_ids, batch, caches))
    assert expected.std() > 0.3  # random, but not flat
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_mistral_without_a_window_is_the_same_decoder(tmp_path: Path):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=None,
        initializer_range=0.15,
    )
    reference = MistralForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    shape, decoder = decoder_of(tmp_path)
    assert shape.architecture == "MistralForCausalLM"
    token_ids = torch.arange(60) % 97
    batch, caches = whole_prompt(shape, 60)
    with torch.inference_mode():
        found = decoder.logits(decoder.forward(token_ids, batch, caches))
        torch.testing.assert_close(found, reference(token_ids[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_qwen3_normalizes_query_and_key_heads(tmp_path: Path, attention_bias: bool):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        attention_bias=attention_bias,
        initializer_range=0.15,
    )
    reference = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    shape, decoder = decoder_of(tmp_path)
    assert shape.qk_norm
    token_ids = torch.arange(60) % 97
    batch, caches = whole_prompt(shape, 60)
    with torch.inference_mode():
        found = decoder.logits(decoder.forward(token_ids, batch, caches))
        torch.testing.assert_close(found, reference(token_ids[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("as_prefills", [False, True])
@pytest.mark.parametrize("places", [[59], [9, 59], []])
def test_last_rows_alone_get_the_stream_of_all_and_leave_the_same_caches(
    tmp_path: Path, places: list[int], as_prefills: bool
):
    save_tiny(tmp_path)
    _, decoder = decoder_of(tmp_path)
    token_ids = torch.arange(60) % 97
    batch, caches = whole_prompt(decoder.shape, 60)
    assert batch.prefill is not None
    table, count = batch.prefill.block_table, len(places)
    # A prefix of the prompt ends where its last query sees nothing behind it: as rows of sequences of that length.
    rows, lens = torch.zeros(count, dtype=torch.int32), torch.tensor([place + 1 for place in places], dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32)
    last = LastRows(
        torch.tensor(places, dtype=torch.int64),
        None if as_prefills else DecodeRows(count, table, rows, lens, 60),
        PrefillRows(table, rows, lens, starts, 1, 60) if as_prefills else None,
    )
    with torch.inference_mode():
        found = decoder.forward(token_ids, batch, caches, last=last)
        _, other_caches = whole_prompt(decoder.shape, 60)
        expected = decoder.forward(token_ids, batch, other_caches)[places]
    assert found.shape == (count, decoder.shape.hidden_size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    for one, other in zip(caches, other_caches, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("num_rows", [1, 2, 8, 33])
def test_packing_changes_the_layout_and_not_the_product(num_rows: int):
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = torch.randn(70, 50, generator=generator), torch.randn(70, generator=generator)
    x = torch.randn(num_rows, 50, generator=generator)
    linear = Linear(weight.clone(), bias)
    linear.pack()
    torch.testing.assert_close(linear(x), x @ weight.T + bias, rtol=1e-5, atol=1e-5)
    assert linear.num_bytes == 4 * (70 * 50 + 70)


def test_only_fp32_on_the_cpu_is_packed():
    assert can_pack(torch.zeros(4, 4)) == torch.backends.mkldnn.is_available()
    assert not can_pack(torch.zeros(4, 4, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(4, 4, device="meta"))


def test_weights_are_counted_once(tmp_path: Path):
    for tied in (True, False):
        save_tiny(tmp_path / str(tied), tie_word_embeddings=tied)
        shape, decoder = decoder_of(tmp_path / str(tied))
        head_again = shape.vocab_size * shape.hidden_size if tied and can_pack(torch.zeros(1, 1)) else 0
        assert decoder.num_weight_bytes == 4 * (shape.num_parameters + head_again)
