"""What steps need is compiled before the first one: shown with a driver that has a target and no device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manta.engine.batch import SlotState
from manta.engine.compile_steps import compile_steps
from manta.engine.decode_step import DecodeBuffers, DecodeStep, Draw, StepKind
from manta.engine.kv_cache import CacheLayout
from manta.engine.layers.linear import Linear
from manta.engine.model_shape import ModelShape
from manta.engine.models.decoder import Decoder
from manta.engine.prefill_graphs import PrefillGraphs
from manta.engine.weights.parameters import allocate_parameters
from manta.kernels import runtime
from manta.kernels.attention_decode import DecodeWorkspace
from manta.kernels.compile_ahead import compiling_only
from tests.kernels.target_only import count_compilations, target_only

CPU = torch.device("cpu")
SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=3,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=4096,
    max_position_embeddings=1024,
)
LAYOUT = CacheLayout.of(SHAPE, block_size=64, dtype=torch.bfloat16)
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "decode_sizes": [1, 2, 8], "deterministic": False}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(Linear, "pack", lambda self: None)  # as on a GPU
    workspace = DecodeWorkspace.allocate(max_num_seqs=8, num_heads=4, num_kv_heads=2, head_dim=64, device=CPU)
    with torch.inference_mode():
        parameters = allocate_parameters(SHAPE, dtype=torch.bfloat16, device=CPU)
        for parameter in (parameters.embedding, parameters.final_norm):
            parameter.zero_()
        return Decoder(SHAPE, parameters, max_position=1024, workspace=workspace)


@pytest.fixture
def target(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launchers take their kernels, for a GPU that is not there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "use_triton", lambda tensor: True)
    monkeypatch.setattr(runtime, "has_inline_ptx", lambda tensor: True)
    with target_only():
        yield


@pytest.mark.aot
def test_after_it_steps_compile_nothing(model: Decoder, target: None) -> None:
    with count_compilations() as compiled:
        compile_steps(model, LAYOUT, **SIZES, max_num_tokens=48, device=CPU)
    assert {"_prepare_decode_kernel", "_attention_decode_kernel", "_argmax_kernel", "_rope_and_store_kernel"} <= set(
        compiled
    )
    assert any(name.startswith("_attention_prefill") for name in compiled)
    state = SlotState.allocate(max_num_seqs=8, max_model_len=1024, block_size=64, device=CPU)
    caches = LAYOUT.allocate(2, CPU)
    kinds = [(Draw.GREEDY, 1), (Draw.GREEDY, 2), (Draw.GREEDY, 8), (Draw.PLAIN, 1), (Draw.FILTERED, 1)]
    with count_compilations() as more, compiling_only(1), torch.inference_mode():
        for draw, size in kinds:
            buffers = DecodeBuffers(size, no_slot=8, device=CPU)
            for tensor in buffers.upload.tensors.values():
                tensor.zero_()
            step = DecodeStep(
                StepKind(draw),
                buffers,
                model=model,
                caches=caches,
                state=state,
                block_size=64,
                decodes_as_prefills=False,
            )
            step.run()
        sizes = {"max_num_seqs": 8, "max_num_tokens": 48, "block_size": 64}
        PrefillGraphs(model, caches, state, **sizes, capture=None, device=CPU).run_largest()
    assert more == []


def test_it_goes_through_every_step_without_a_kernel_too(model: Decoder) -> None:
    before = model.layers
    compile_steps(model, LAYOUT, **SIZES, max_num_tokens=48, device=CPU)
    assert model.layers is before
