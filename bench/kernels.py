"""Times each kernel on a GPU at the shapes of Llama-3.1-8B, beside its floor and a library. Knows no engine.

Every figure is the median of CUDA graph replays; buffers rotate over more than the L2 cache. The floor is the bytes or
operations that cannot be avoided, divided by a peak that the same run measures.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from manta.engine.errors import ConfigError
from manta.kernels import activation, attention_decode, attention_prefill, kv_cache, rmsnorm, rope, runtime, sampling
from manta.kernels.runtime import jit

HIDDEN, INTER, HEADS, KV_HEADS, DIM, VOCAB, PAGE = 4096, 14336, 32, 8, 128, 128256, 64
ROTATE_BYTES = 200_000_000
REPLAYS = 15
TOKENS = (1, 64, 4096)
DECODE_SHAPES = ((1, 1024), (1, 32768), (8, 1024), (32, 1024), (64, 576), (128, 1024), (256, 1024))
PREFILL_LENGTHS = (512, 2048, 8192, 32768)
ROWS = (1, 16, 64, 256)

Calls = Sequence[Callable[[], Any]]
"""One call per rotated buffer."""


@dataclass(frozen=True)
class Peaks:
    """What this device reaches on the simplest work."""

    read_bytes_per_s: float
    matmul_flop_per_s: float


@dataclass(frozen=True)
class Line:
    """One kernel at one shape. `share_of_floor` 1.0 is the hardware's limit; `ratio` above 1.0 beats the library."""

    kernel: str
    shape: str
    time_us: float
    floor_us: float
    share_of_floor: float
    library: str | None
    library_us: float | None
    ratio: float | None


def run(json_path: Path | None = None) -> dict[str, Any]:
    """Measure everything, print a table, write JSON to `json_path` if given, and return what was written.

    Raises ConfigError without a CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("Kernel timings need a CUDA GPU and torch sees none: run this on a GPU machine.")
    torch.manual_seed(0)
    device = torch.device("cuda")
    peaks = measure_peaks(device)
    print(f"read {peaks.read_bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {peaks.matmul_flop_per_s / 1e12:.0f} TFLOP/s")
    print(f"{'kernel':22}{'shape':24}{'us':>10}{'floor us':>10}{'of floor':>10}  library")
    lines: list[Line] = []
    for measure in SECTIONS:
        for line in measure(peaks, device):
            lines.append(line)
            against = f"{line.library} {line.library_us:.1f} us, x{line.ratio:.2f}" if line.library_us else ""
            numbers = f"{line.time_us:10.1f}{line.floor_us:10.1f}{line.share_of_floor:10.2f}"
            print(f"{line.kernel:22}{line.shape:24}{numbers}  {against}", flush=True)
    result = {
        "benchmark": "kernels",
        "command": "manta bench kernels",
        "hardware": torch.cuda.get_device_name(device),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "model": "Llama-3.1-8B shapes, bfloat16",
        "peaks": asdict(peaks),
        "lines": [asdict(line) for line in lines],
        "figures": figures(peaks, lines),
    }
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def figures(peaks: Peaks, lines: list[Line]) -> dict[str, float]:
    """Flat name -> number, the unit in the name."""
    flat = {"read_tb_per_s": peaks.read_bytes_per_s / 1e12, "matmul_tflop_per_s": peaks.matmul_flop_per_s / 1e12}
    for line in lines:
        name = f"{line.kernel}_{line.shape}".replace(" ", "_")
        flat[f"{name}_us"] = round(line.time_us, 2)
        flat[f"{name}_share_of_floor"] = round(line.share_of_floor, 3)
        if line.ratio is not None:
            flat[f"{name}_ratio_to_library"] = round(line.ratio, 3)
    return flat


def time_us(calls: Calls) -> float:
    """Median time of one call over replays of a graph that makes all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and fills library caches
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    graph.reset()
    return statistics.median(times)


def num_rotations(bytes_per_call: int) -> int:
    return max(2, min(64, math.ceil(ROTATE_BYTES / bytes_per_call)))


def line_of(
    kernel: str, shape: str, calls: Calls, floor_s: float, library: str | None = None, others: Calls | None = None
) -> Line:
    ours = time_us(calls)
    theirs = time_us(others) if others is not None else None
    floor_us = floor_s * 1e6
    ratio = theirs / ours if theirs is not None else None
    return Line(kernel, shape, ours, floor_us, floor_us / ours, library, theirs, ratio)


@jit
def _read_kernel(x_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(pid * BLOCK, elements, tl.num_programs(0) * BLOCK):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr + pid, tl.sum(total))


def measure_peaks(device: torch.device) -> Peaks:
    x = torch.zeros(1 << 29, dtype=torch.bfloat16, device=device)  # 1 GiB
    programs = 4 * runtime.num_multiprocessors(device)
    out = torch.zeros(programs, device=device)
    read_us = time_us([lambda: _read_kernel[(programs,)](x, out, x.numel(), BLOCK=8192, num_warps=8)] * 2)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    matmul_us = time_us([lambda: torch.matmul(a, a)] * 4)
    return Peaks(x.numel() * 2 / (read_us * 1e-6), 2 * 8192**3 / (matmul_us * 1e-6))


def random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def bench_elementwise(peaks: Peaks, device: torch.device) -> Iterator[Line]:
    for tokens in TOKENS:
        yield bench_rms_norm(peaks, device, tokens)
        yield bench_silu(peaks, device, tokens)
        yield from bench_rope_and_store(peaks, device, tokens)


def bench_rms_norm(peaks: Peaks, device: torch.device, tokens: int) -> Line:
    weight = random(device, HIDDEN)
    count = 4 * tokens * HIDDEN * 2
    pairs = [(random(device, tokens, HIDDEN), random(device, tokens, HIDDEN)) for _ in range(num_rotations(count))]

    def by_torch(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), (HIDDEN,), weight, 1e-5)

    return line_of(
        "rms_norm_residual",
        f"{tokens} tokens",
        [partial(rmsnorm.rms_norm, x, weight, 1e-5, residual) for x, residual in pairs],
        count / peaks.read_bytes_per_s,
        "torch add + rms_norm",
        [partial(by_torch, x, residual) for x, residual in pairs],
    )


def bench_silu(peaks: Peaks, device: torch.device, tokens: int) -> Line:
    count = 3 * tokens * INTER * 2
    inputs = [random(device, tokens, 2 * INTER) for _ in range(num_rotations(count))]

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x[:, :INTER]) * x[:, INTER:]

    return line_of(
        "silu_and_mul",
        f"{tokens} tokens",
        [partial(activation.silu_and_mul, x) for x in inputs],
        count / peaks.read_bytes_per_s,
        "torch silu * up",
        [partial(by_torch, x) for x in inputs],
    )


def bench_rope_and_store(peaks: Peaks, device: torch.device, tokens: int) -> Iterator[Line]:
    cos_sin = torch.randn(8192, DIM, device=device)
    keys, values = torch.zeros(2, 256, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
    positions = torch.arange(tokens, device=device)
    slots = torch.randperm(256 * PAGE, device=device)[:tokens]
    count = 2 * tokens * (HEADS + 2 * KV_HEADS) * DIM * 2
    split = [
        random(device, tokens, HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
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
        4 * tokens * KV_HEADS * DIM * 2 / peaks.read_bytes_per_s,
        "torch index_copy",
        [partial(store_by_torch, k, v, keys, values, slots) for _, k, v in split],
    )


def store_by_torch(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    for cache, new in ((key_cache, k), (value_cache, v)):
        cache.view(-1, KV_HEADS, DIM).index_copy_(0, slots, new)


def tables(device: torch.device, num_seqs: int, length: int, num_blocks: int) -> list[torch.Tensor]:
    """Block tables [seqs, blocks] that together pass over a cache of `num_blocks`."""
    blocks = -(-length // PAGE)
    order = torch.randperm(num_blocks, device=device).int()
    size = num_seqs * blocks
    return [order[i * size : (i + 1) * size].view(num_seqs, blocks) for i in range(min(64, num_blocks // size))]


def bench_decode(peaks: Peaks, device: torch.device) -> Iterator[Line]:
    for num_seqs, length in DECODE_SHAPES:
        count = 2 * num_seqs * length * KV_HEADS * DIM * 2
        num_blocks = num_rotations(count) * num_seqs * -(-length // PAGE)
        caches = random(device, 2, num_blocks, PAGE, KV_HEADS, DIM)
        q = random(device, num_seqs, HEADS, DIM)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
        workspace = attention_decode.DecodeWorkspace.allocate(
            max_num_seqs=num_seqs, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, device=device
        )
        call = partial(
            attention_decode.attention_decode, q, caches[0], caches[1],
            seq_lens=lengths, scale=DIM**-0.5, workspace=workspace, max_seq_len=length,
        )  # fmt: skip
        calls = [partial(call, block_table=table) for table in tables(device, num_seqs, length, num_blocks)]
        yield line_of("attention_decode", f"{num_seqs} x {length}", calls, count / peaks.read_bytes_per_s)


def bench_prefill(peaks: Peaks, device: torch.device) -> Iterator[Line]:
    for length in PREFILL_LENGTHS:
        num_blocks = 4 * length // PAGE
        caches = random(device, 2, num_blocks, PAGE, KV_HEADS, DIM)
        q = random(device, length, HEADS, DIM)
        start = torch.tensor([0, length], dtype=torch.int32, device=device)
        call = partial(
            attention_prefill.attention_prefill, q, caches[0], caches[1], query_start=start, seq_lens=start[1:],
            scale=DIM**-0.5, max_query_len=length, max_seq_len=length,
        )  # fmt: skip
        calls = [partial(call, block_table=table) for table in tables(device, 1, length, num_blocks)]
        dense = [x.transpose(0, 1)[None].contiguous() for x in (q, *caches.flatten(1, 2)[:, :length])]
        flop = 2 * length * length * HEADS * DIM  # two products over half of the square
        others = [partial(causal_by_cudnn, *dense)] * 4
        yield line_of(
            "attention_prefill", f"{length} tokens", calls, flop / peaks.matmul_flop_per_s, "cuDNN SDPA", others
        )


def causal_by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


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


def bench_sampling(peaks: Peaks, device: torch.device) -> Iterator[Line]:
    for rows in ROWS:
        shape, count = f"{rows} rows", rows * VOCAB * 2
        inputs = [random(device, rows, VOCAB) * 2.5 for _ in range(num_rotations(count))]
        floor_s = count / peaks.read_bytes_per_s
        ours = [partial(sampling.argmax, x) for x in inputs]
        yield line_of("argmax", shape, ours, floor_s, "torch.argmax", [partial(torch.argmax, x, -1) for x in inputs])

        temperature = torch.full((rows,), 0.8, device=device)
        others = [partial(softmax_race, x, temperature) for x in inputs]
        ours = sample_calls(inputs, temperature, 0, 1.0)
        yield line_of("sample", shape, ours, floor_s, "torch softmax + race", others)
        for name, k, p in (("sample_top_k50_top_p95", 50, 0.95), ("sample_top_p95", 0, 0.95)):
            others = [partial(top_k_top_p_by_sort, x, temperature, k or VOCAB, p) for x in inputs]
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


SECTIONS = (bench_elementwise, bench_decode, bench_prefill, bench_sampling)
