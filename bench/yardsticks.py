"""What the engine's figures are held against: another engine on the same GPU, and the floor. Knows no engine of ours.

The floor of a figure is the time that the least work of its workload takes at the device's measured peaks
(`StepTimeModel.floor`): bytes and operations that no schedule and no kernel can avoid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from manta.engine.config import QuantizationConfig
from manta.engine.model_shape import ModelShape
from manta.engine.precision import precision_of
from manta.engine.step_time import StepShape, StepTimeModel, hardware_of

VLLM_LLAMA_8B_BF16_H200 = {
    "b1_tpot_ms": 4.90,
    "b8_tpot_ms": 5.15,
    "b32_tpot_ms": 5.86,
    "b64_tpot_ms": 6.70,
    "b128_tpot_ms": 8.68,
    "b256_tpot_ms": 13.80,
    "ttft_512_ms": 16.8,
    "ttft_2048_ms": 52.0,
    "ttft_8192_ms": 213.8,
    "ttft_32768_ms": 1193.0,
    "d1_s": 16.65,
    "d2_s": 23.2,
    "prefix_cold_s": 0.618,
    "prefix_warm_s": 0.582,
    "ready_cold_s": 93.5,
    "ready_warm_s": 57.5,
}
"""vLLM 0.24.0 with its defaults (V1, torch.compile, CUDA graphs, FlashAttention 3) in process on one H200, November
2026: the workloads of `workloads.py` in the sizes of `engine.Sizes`, dummy weights, greedy, medians of 3 to 5 (torch
2.11.0+cu130, driver 580.159). ready_* is import and construction, without and with a filled compile cache."""

VLLM_LLAMA_8B_FP8_H200 = {
    "b1_tpot_ms": 3.47,
    "b8_tpot_ms": 3.66,
    "b32_tpot_ms": 4.87,
    "b64_tpot_ms": 5.17,
    "b128_tpot_ms": 7.09,
    "b256_tpot_ms": 11.45,
    "ttft_512_ms": 11.9,
    "ttft_2048_ms": 33.9,
    "ttft_8192_ms": 145.4,
    "ttft_32768_ms": 940.0,
    "d1_s": 11.60,
    "d2_s": 20.3,
    "ready_cold_s": 80.7,
}
"""The same with weights and activations in FP8 (dynamic), KV in bf16. Its random weights made inputs of down_proj
quantize to zeros, on which products run faster: figures of prefills and large batches flatter it."""


@dataclass(frozen=True)
class Headline:
    """One of the figures that an engine is judged by; over vLLM's below 1 is better, over the floor 1 is the end."""

    name: str
    value: float
    vllm: float | None
    floor: float | None

    @property
    def ratios(self) -> dict[str, float]:
        pairs = (("vllm", self.vllm), ("floor", self.floor))
        return {f"{self.name}_over_{other}": self.value / known for other, known in pairs if known}


@dataclass(frozen=True)
class Yardsticks:
    """What there is for one model on one device."""

    model: StepTimeModel | None
    """None for a device whose peaks are not known."""
    vllm: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        dtype: str,
        device: str,
        are_usual_sizes: bool,
        quantization: QuantizationConfig | None = None,
        tp: int = 1,
        pp: int = 1,
    ) -> Yardsticks:
        """`device` is its full name, of which there are `tp` times `pp`; vLLM's figures are of one, and hold for the
        usual sizes of the workloads only."""
        quantization = quantization or QuantizationConfig()
        hardware, precision = hardware_of(device), precision_of(quantization)
        model = None
        if hardware is not None and precision is not None:
            model = StepTimeModel(
                shape,
                hardware,
                dtype=dtype,
                weight_bits=precision.weight_bits,
                activation_bits=precision.activation_bits,
                kv_dtype=None if quantization.kv_cache == "auto" else quantization.kv_cache,
                tp=tp,
                pp=pp,
            )
        vllm: Mapping[str, float] = {}
        if are_usual_sizes and tp * pp == 1 and precision is not None and quantization.kv_cache == "auto":
            vllm = vllm_figures(shape, dtype=dtype, device=device, weights=precision.name)
        return cls(model, vllm)

    def headline(self, name: str, value: float, least_work: Sequence[StepShape] = ()) -> Headline:
        """`value` in ms or s, as the name ends; `least_work` as steps, one after the other."""
        floor = None
        if self.model is not None and least_work:
            floor = sum(self.model.floor(step) for step in least_work) * (1e3 if name.endswith("_ms") else 1.0)
        return Headline(name, value, self.vllm.get(name), floor)


def vllm_figures(shape: ModelShape, *, dtype: str, device: str, weights: str = "bf16") -> Mapping[str, float]:
    """vLLM's figures for this model on this device, or nothing."""
    sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    is_llama_8b = (*sizes, shape.intermediate_size, shape.vocab_size) == (32, 4096, 32, 8, 128, 14336, 128256)
    known = {"bf16": VLLM_LLAMA_8B_BF16_H200, "fp8": VLLM_LLAMA_8B_FP8_H200}
    return known.get(weights, {}) if is_llama_8b and dtype == "bfloat16" and device == "NVIDIA H200" else {}


def decode_work(num_seqs: int, prompt_len: int, output_len: int) -> list[StepShape]:
    """A mean step of `num_seqs` sequences that generate `output_len` tokens each."""
    context = num_seqs * (prompt_len + output_len // 2)
    return [StepShape(num_decode_seqs=num_seqs, num_decode_context_tokens=context)]


def prefill_work(length: int) -> list[StepShape]:
    return [StepShape(num_prefill_tokens=length, num_prefill_pairs=_causal_pairs(length))]


def batch_work(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> list[StepShape]:
    """All requests as if in one step: every token's operations, its KV entries read for every output, weights once."""
    pairs = context = 0
    for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True):
        pairs += _causal_pairs(prompt_len)
        context += _causal_pairs(prompt_len + output_len - 1) - _causal_pairs(prompt_len)
    return [StepShape(sum(prompt_lens), sum(output_lens) - len(output_lens), context, pairs)]


def shared_prefix_work(
    num_requests: int, prefix_len: int, suffix_len: int, output_len: int, *, is_cached: bool
) -> list[StepShape]:
    """One prefill and `output_len - 1` decode steps of all requests; the prefix is computed and read once."""
    tokens, pairs = num_requests * suffix_len, num_requests * (suffix_len * prefix_len + _causal_pairs(suffix_len))
    if not is_cached:
        tokens, pairs = tokens + prefix_len, pairs + _causal_pairs(prefix_len)
    context = prefix_len + num_requests * (suffix_len + output_len // 2)
    decode = StepShape(num_decode_seqs=num_requests, num_decode_context_tokens=context)
    return [StepShape(num_prefill_tokens=tokens, num_prefill_pairs=pairs)] + [decode] * (output_len - 1)


def headline_table(rows: Sequence[Headline]) -> Table:
    table = Table(title="headline figures", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("figure")
    for column in ("value", "vLLM 0.24", "ratio", "floor", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row.value:,.4g}"]
        for known in (row.vllm, row.floor):
            cells += [f"{known:,.4g}", f"{row.value / known:.3f}"] if known else ["", ""]
        table.add_row(row.name, *cells)
    return table


def _causal_pairs(length: int) -> int:
    """Query-key pairs of a sequence's tokens with themselves and all before."""
    return length * (length + 1) // 2
