"""GGUF blocks that are kept stand for what the `gguf` package makes of them, whole and in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from manta.engine.errors import CheckpointError, ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.llama import LLAMA
from manta.engine.quant.gguf_blocks import DECODERS
from manta.engine.quant.kernel_form import kernel_form
from manta.engine.weights.parameters import allocate_parameters, destinations
from manta.kernels.quantized import layout
from tests.engine.parallel.shards import generate, random_shape

Type = GGMLQuantizationType
KINDS = list(DECODERS)


def random_blocks(kind: GGMLQuantizationType, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Rows of any bits but for their fp16 scales, which are small numbers."""
    rng = np.random.default_rng(seed)
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (num_rows, num_columns // elements, size), dtype=np.uint8)
    unit = 0.08 / {Type.Q8_0: 128, Type.Q6_K: 32 * 128, Type.Q4_K: 15 * 63}.get(kind, 15)
    places = {Type.Q4_1: (0, 2), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}.get(kind, (0,))
    for place in places:
        scale = rng.uniform(0.5, 1.5, blocks.shape[:2]) * unit * (-7 if place and kind is Type.Q4_1 else 1)
        blocks[..., place : place + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kept_blocks_are_exact(kind: GGMLQuantizationType):
    raw = random_blocks(kind, 24, 768)
    weight = DECODERS[kind](torch.from_numpy(raw).view(24, -1, GGML_QUANT_SIZES[kind][1]), 768)
    expected = torch.from_numpy(dequantize(raw, kind))
    torch.testing.assert_close(weight.dequantize(), expected, rtol=2e-7, atol=1e-9)
    for part in (range(256, 512), range(32, 300)):
        found = weight.columns(part).dequantize()
        torch.testing.assert_close(found, expected[:, part.start : part.stop], rtol=2e-7, atol=1e-9)
    bits = 8 * weight.num_bytes / expected.numel()
    assert bits < {Type.Q8_0: 8.51, Type.Q6_K: 8.6, Type.Q4_0: 4.51, Type.Q4_1: 5.01, Type.Q4_K: 4.7}[kind]
    if (form := kernel_form(weight)) is not None:
        torch.testing.assert_close(layout.dequantize(form.weight), expected, rtol=1e-4, atol=1e-6)
    assert (form is None) == (kind is Type.Q6_K)  # groups of 16 have no kernel


def save_model(file: Path, shape: ModelShape, kind: GGMLQuantizationType) -> None:
    """Products in blocks of `kind`, everything else in fp32."""
    views = destinations(shape, allocate_parameters(shape, dtype=torch.float32, device=torch.device("cpu")))
    rng = np.random.default_rng(1)
    writer = GGUFWriter(file, "llama")
    for seed, (parameter, view) in enumerate(views.items()):
        name = LLAMA.gguf_name(parameter)
        if parameter.part in ("q", "k", "v", "output", "gate", "up", "down"):
            writer.add_tensor(name, random_blocks(kind, *view.shape, seed=seed), raw_dtype=kind)
        elif parameter.part.endswith("norm"):
            writer.add_tensor(name, np.ones(view.shape, np.float32))
        else:
            writer.add_tensor(name, rng.normal(size=tuple(view.shape)).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q6_K, Type.Q5_0], ids=lambda kind: kind.name)
def test_a_model_of_kept_blocks_gives_the_inflated_one_s_tokens_over_ranks(tmp_path: Path, kind: GGMLQuantizationType):
    file, columns = tmp_path / "model.gguf", 256
    shape = random_shape(q=16, kv=4, hidden_size=columns, intermediate_size=2 * columns, num_layers=2)
    save_model(file, shape, kind)
    source = ModelSource("tiny", "gguf", file, None)
    prompts = [[5, 6, 7] * 9, [1, 2] * 20]
    inflated = generate(shape, prompts, 8, source=source)
    for tp_size in (1, 2, 3):
        kept = generate(shape, prompts, 8, source=source, tp_size=tp_size, quantization="keep")
        assert kept.token_ids == inflated.token_ids
        torch.testing.assert_close(kept.logprobs, inflated.logprobs, rtol=0, atol=1e-3)


def test_a_short_file_is_named(tmp_path: Path):
    file = tmp_path / "model.gguf"
    shape = random_shape(q=4, kv=2, num_layers=1, intermediate_size=128)
    save_model(file, shape, Type.Q4_0)
    file.write_bytes(file.read_bytes()[:-600])
    with pytest.raises(CheckpointError, match=r"model\.gguf is cut short"):
        generate(shape, [[1]], 1, source=ModelSource("tiny", "gguf", file, None), quantization="keep")


def test_only_gguf_files_have_blocks_to_keep():
    with pytest.raises(ConfigError, match="'keep'"):
        generate(random_shape(q=4, kv=2), [[1]], 1, quantization="keep")
