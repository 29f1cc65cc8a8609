"""Times each kernel on a GPU at two models' shapes, beside its floor and a library, and makes the tuned tables.

Norms, activations, rope, cache writes and sampling are measured here; matrix products and attention in files of their
own (bench/kernel_*.py). Knows no engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
import triton

from manta.engine.errors import ConfigError
from manta.kernels import activation, kv_cache, rmsnorm, rope, sampling

from . import (
    kernel_decode,
    kernel_decode_tuning,
    kernel_linears,
    kernel_linears_tuning,
    kernel_prefill,
    kernel_quantized,
    kernel_quantized_tuning,
)
from .kernel_timing import (
    HEADER,
    LLAMA_8B,
    MODELS,
    Calls,
    Line,
    ModelShape,
    Peaks,
    Section,
    Tuner,
    line_of,
    measure_peaks,
    num_rotations,
    random,
    row_of,
)

TOKENS = (1, 64, 4096)
ROWS = (1, 16, 64, 256)

T = TypeVar("T")


def run(json_path: Path | None = None, *, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all or the named sections, print a table, write JSON to `json_path` if given, return what was written.

    Raises ConfigError for an unknown section and without a CUDA GPU.
    """
    chosen = _chosen("section", sections, SECTIONS)
    device = _device()
    peaks = measure_peaks(device)
    print(f"read {peaks.read_bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {peaks.matmul_flop_per_s / 1e12:.0f} TFLOP/s")
    lines: dict[str, list[Line]] = {model.name: [] for model in MODELS}
    head = {
        "benchmark": "kernels",
        "command": "manta bench kernels" + (f" --sections {','.join(chosen)}" if sections else ""),
        "hardware": torch.cuda.get_device_name(device),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "models": {model.name: asdict(model) for model in MODELS} | {"dtype": "bfloat16"},
        "peaks": asdict(peaks),
    }
    result = head
    for model in MODELS:
        print(f"{model.name}\n{HEADER}")
        for measure in chosen.values():
            for line in measure(peaks, device, model):
                lines[model.name].append(line)
                print(row_of(line), flush=True)
            # After each section: a later one that fails takes nothing with it.
            of_models = {name: [asdict(line) for line in of_model] for name, of_model in lines.items()}
            result = head | {"lines": of_models, "figures": figures(peaks, lines)}
            if json_path is not None:
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def tune(operations: Sequence[str], path: Path) -> dict[str, Any]:
    """Find the configurations of `operations` on this GPU and enter them in the table at `path`, which is returned.

    What the file says about other operations stays; `linear_ranks` and `attention_decode_ranks` (the shapes of ranks
    that share layers) also leave other shapes. Raises ConfigError for an unknown operation and without a GPU.
    """
    chosen = _chosen("operation", operations, TUNERS)
    device = _device()
    peaks = measure_peaks(device)
    for operation, find in chosen.items():
        found = find(peaks, device)
        # Read again for each: nothing is lost when a later operation fails.
        table = json.loads(path.read_text()) if path.exists() else {}
        name = operation.removesuffix("_ranks")
        table[name] = (table.get(name, {}) if name != operation else {}) | found
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    return json.loads(path.read_text())


def _chosen(what: str, names: Sequence[str] | None, known: Mapping[str, T]) -> dict[str, T]:
    for name in names or ():
        if name not in known:
            raise ConfigError(f"There is no {what} {name!r}: choose from {', '.join(known)}.", field=what)
    return {name: known[name] for name in names or known}


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("Kernel timings need a CUDA GPU and torch sees none: run this on a GPU machine.")
    torch.manual_seed(0)
    return torch.device("cuda")


def figures(peaks: Peaks, lines: Mapping[str, Sequence[Line]]) -> dict[str, float]:
    """Flat name -> number, the unit in the name; the model's name stands first except for Llama-3.1-8B."""
    flat = {"read_tb_per_s": peaks.read_bytes_per_s / 1e12, "matmul_tflop_per_s": peaks.matmul_flop_per_s / 1e12}
    for model, of_model in lines.items():
        prefix = "" if model == LLAMA_8B.name else f"{model}_"
        for line in of_model:
            name = prefix + f"{line.kernel}_{line.shape}".replace(" ", "_")
            flat[f"{name}_us"] = round(line.time_us, 2)
            flat[f"{name}_share_of_floor"] = round(line.share_of_floor, 3)
            if line.ratio is not None:
                flat[f"{name}_ratio_to_library"] = round(line.ratio, 3)
    return flat


def bench_elementwise(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    for tokens in TOKENS:
        yield bench_rms_norm(peaks, device, model, tokens)
        yield bench_silu(peaks, device, model, tokens)
        yield from bench_rope_and_store(peaks, device, model, tokens)


def bench_rms_norm(peaks: Peaks, device: torch.device, model: ModelShape, tokens: int) -> Line:
    weight = random(device, model.hidden)
    count = 4 * tokens * model.hidden * 2
    pairs = [
        (random(device, tokens, model.hidden), random(device, tokens, model.hidden))
        for _ in range(num_rotations(count))
    ]

    def by_torch(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), (model.hidden,), weight, 1e-5)

    return line_of(
        "rms_norm_residual",
        f"{tokens} tokens",
        [partial(rmsnorm.rms_norm, x, weight, 1e-5, residual) for x, residual in pairs],
        count / peaks.read_bytes_per_s,
        "torch add + rms_norm",
        [partial(by_torch, x, residual) for x, residual in pairs],
    )


def bench_silu(peaks: Peaks, device: torch.device, model: ModelShape, tokens: int) -> Line:
    count = 3 * tokens * model.inter * 2
    inputs = [random(device, tokens, 2 * model.inter) for _ in range(num_rotations(count))]

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x[:, : model.inter]) * x[:, model.inter :]

    return line_of(
        "silu_and_mul",
        f"{tokens} tokens",
        [partial(activation.silu_and_mul, x) for x in inputs],
        count / peaks.read_bytes_per_s,
        "torch silu * up",
        [partial(by_torch, x) for x in inputs],
    )


def bench_rope_and_store(peaks: Peaks, device: torch.device, model: ModelShape, tokens: int) -> Iterator[Line]:
    cos_sin = torch.randn(8192, model.dim, device=device)
    keys, values = torch.zeros(2, 256, model.page, model.kv_heads, model.dim, dtype=torch.bfloat16, device=device)
    positions = torch.arange(tokens, device=device)
    slots = torch.randperm(256 * model.page, device=device)[:tokens]
    count = 2 * tokens * (model.heads + 2 * model.kv_heads) * model.dim * 2
    split = [
        random(device, tokens, model.heads + 2 * model.kv_heads, model.dim).split(
            [model.heads, model.kv_heads, model.kv_heads], dim=1
        )
        for _ in range(num_rotations(count))
    ]
    yield line_of(
        "rope_and_store",
        f"{tokens} tokens",
        [partial(rope.rope_and_store, q, k, v, positions, cos_sin, keys, values, slots) for q, k, v in split],
        count / peaks.read_bytes_per_s,
    )

    yield line_of(
        "store_kv",
        f"{tokens} tokens",
        [partial(kv_cache.store_kv, k, v, keys, values, slots) for _, k, v in split],
        4 * tokens * model.kv_heads * model.dim * 2 / peaks.read_bytes_per_s,
        "torch index_copy",
        [partial(store_by_torch, k, v, keys, values, slots) for _, k, v in split],
    )


def store_by_torch(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    for cache, new in ((key_cache, k), (value_cache, v)):
        cache.flatten(0, 1).index_copy_(0, slots, new)


def top_k_top_p_by_sort(logits: torch.Tensor, temperature: torch.Tensor, k: int, p: float) -> torch.Tensor:
    """What sampling with torch alone costs: sort, mask, softmax, draw by the exponential race."""
    values, ids = (logits.float() / temperature[:, None]).sort(dim=-1, descending=True)
    values[:, k:] = -torch.inf
    probabilities = values.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities >= p] = 0
    race = torch.empty_like(probabilities).exponential_()
    return ids.gather(1, (probabilities / race).argmax(-1, keepdim=True)).squeeze(1)


def softmax_race(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    probabilities = (logits.float() / temperature[:, None]).softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def bench_sampling(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    for rows in ROWS:
        shape, count = f"{rows} rows", rows * model.vocab * 2
        inputs = [random(device, rows, model.vocab) * 2.5 for _ in range(num_rotations(count))]
        floor_s = count / peaks.read_bytes_per_s
        ours = [partial(sampling.argmax, x) for x in inputs]
        yield line_of("argmax", shape, ours, floor_s, "torch.argmax", [partial(torch.argmax, x, -1) for x in inputs])

        temperature = torch.full((rows,), 0.8, device=device)
        others = [partial(softmax_race, x, temperature) for x in inputs]
        ours = sample_calls(inputs, temperature, 0, 1.0)
        yield line_of("sample", shape, ours, floor_s, "torch softmax + race", others)
        for name, k, p in (("sample_top_k50_top_p95", 50, 0.95), ("sample_top_p95", 0, 0.95)):
            others = [partial(top_k_top_p_by_sort, x, temperature, k or model.vocab, p) for x in inputs]
            yield line_of(name, shape, sample_calls(inputs, temperature, k, p), floor_s, "torch.sort", others)


def sample_calls(inputs: list[torch.Tensor], temperature: torch.Tensor, k: int, p: float) -> Calls:
    seeds = torch.arange(len(temperature), device=temperature.device)
    call = partial(
        sampling.sample,
        temperature=temperature,
        top_k=torch.full_like(seeds, k).int(),
        top_p=torch.full_like(temperature, p),
        min_p=torch.zeros_like(temperature),
        seeds=seeds,
        positions=seeds,
        all_greedy=False,
        need_filter=k > 0 or p < 1,
    )
    return [partial(call, x) for x in inputs]


SECTIONS: dict[str, Section] = {
    "elementwise": bench_elementwise,
    "decode": kernel_decode.bench,
    "prefill": kernel_prefill.bench,
    "linears": kernel_linears.bench,
    "quantized": kernel_quantized.bench,
    "sampling": bench_sampling,
}
TUNERS: dict[str, Tuner] = {
    "linear": kernel_linears_tuning.tune,
    "linear_ranks": kernel_linears_tuning.tune_ranks,
    "attention_decode": kernel_decode_tuning.tune,
    "attention_decode_ranks": kernel_decode_tuning.tune_ranks,
    "attention_decode_codes": kernel_decode_tuning.tune_codes,
    "attention_shared_prefix": kernel_decode_tuning.tune_shared_prefix,
    "attention_prefill": kernel_prefill.tune,
    **{scheme.name: partial(kernel_quantized_tuning.tune, scheme.name) for scheme in kernel_quantized.SCHEMES},
}
