"""What figures are held against: floors computed by hand, and the other engine's figures for its own case only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from manta.bench.yardsticks import (
    Headline,
    Yardsticks,
    batch_work,
    decode_work,
    headline_table,
    prefill_work,
    shared_prefix_work,
    vllm_figures,
)
from manta.engine.config import QuantizationConfig
from manta.engine.step_time import StepShape
from tests.shapes import LLAMA_8B


def test_vllm_s_figures_are_for_one_model_in_one_dtype_on_one_device() -> None:
    assert vllm_figures(LLAMA_8B, dtype="bfloat16", device="NVIDIA H200")["b256_tpot_ms"] == 13.80
    assert not vllm_figures(LLAMA_8B, dtype="float16", device="NVIDIA H200")
    assert not vllm_figures(LLAMA_8B, dtype="bfloat16", device="NVIDIA H100 80GB HBM3")
    assert not vllm_figures(replace(LLAMA_8B, num_layers=31), dtype="bfloat16", device="NVIDIA H200")
    other_sizes = Yardsticks.of(LLAMA_8B, dtype="bfloat16", device="NVIDIA H200", are_usual_sizes=False)
    assert not other_sizes.vllm
    assert other_sizes.model is not None


def test_a_quantized_model_has_its_own_floor_and_vllm_s_figures_in_fp8() -> None:
    around: dict[str, Any] = {"dtype": "bfloat16", "device": "NVIDIA H200", "are_usual_sizes": True}
    fp8 = Yardsticks.of(LLAMA_8B, **around, quantization=QuantizationConfig(weights="fp8"))
    row = fp8.headline("b1_tpot_ms", 2.5, decode_work(1, 128, 256))
    assert row.vllm == 3.47
    assert row.floor == pytest.approx(1.78, rel=0.01)  # 8.03 GB at 4.53 TB/s
    int4 = Yardsticks.of(LLAMA_8B, **around, quantization=QuantizationConfig(weights="int4"))
    assert int4.headline("b1_tpot_ms", 2.2, decode_work(1, 128, 256)).floor == pytest.approx(1.03, rel=0.01)
    assert not int4.vllm
    assert not Yardsticks.of(LLAMA_8B, **around, quantization=QuantizationConfig(kv_cache="fp8")).vllm
    unknown = Yardsticks.of(LLAMA_8B, **around, quantization=QuantizationConfig(weights="nf4"))
    assert unknown.model is None


def test_ratios_to_both_yardsticks() -> None:
    rows = Yardsticks.of(LLAMA_8B, dtype="bfloat16", device="NVIDIA H200", are_usual_sizes=True)
    row = rows.headline("b1_tpot_ms", 4.41, decode_work(1, 128, 256))
    assert row.floor == pytest.approx(3.32, rel=0.01)  # 15.0 GB at 4.53 TB/s
    assert row.ratios["b1_tpot_ms_over_vllm"] == pytest.approx(0.9)
    assert row.ratios["b1_tpot_ms_over_floor"] == pytest.approx(4.41 / 3.32, rel=0.01)
    unknown = Yardsticks(None).headline("d1_s", 3.0, prefill_work(5))
    assert unknown == Headline("d1_s", 3.0, None, None)
    assert unknown.ratios == {}
    assert headline_table([row, unknown]).row_count == 2


def test_the_floor_of_a_batch_of_requests_is_all_their_work() -> None:
    rows = Yardsticks.of(LLAMA_8B, dtype="bfloat16", device="NVIDIA H200", are_usual_sizes=True)
    floor = rows.headline("d1_s", 16.65, batch_work([1024] * 512, [128] * 512)).floor
    linears_s = 512 * (1024 + 127) * 13.96e9 / 792e12
    cache_s = 512 * 127 * (1024 + 64) * 131072 / 4.53e12
    assert floor == pytest.approx(linears_s + cache_s, rel=0.03)


def test_work_in_small_numbers() -> None:
    assert decode_work(3, 10, 4) == [StepShape(num_decode_seqs=3, num_decode_context_tokens=36)]
    assert prefill_work(3) == [StepShape(num_prefill_tokens=3, num_prefill_pairs=6)]
    # 2 tokens in, 3 out: the second and third output are decodes that read 3 and 4 tokens.
    assert batch_work([2, 1], [3, 1]) == [StepShape(3, 2, 7, 3 + 1)]
    cold = shared_prefix_work(2, 4, 1, 3, is_cached=False)
    assert cold[0] == StepShape(num_prefill_tokens=6, num_prefill_pairs=10 + 2 * 5)
    assert cold[1:] == [StepShape(num_decode_seqs=2, num_decode_context_tokens=4 + 2 * 2)] * 2
    assert shared_prefix_work(2, 4, 1, 3, is_cached=True)[0] == StepShape(num_prefill_tokens=2, num_prefill_pairs=10)
