"""The frame of the kernel benchmarks: peaks of the device, timing by graph replays, table lines. Knows no kernel.

Every figure is the median of replays of CUDA graphs of a millisecond; buffers rotate over more than the L2 cache. The
floor is the bytes or operations that cannot be avoided, divided by a peak that the same run measures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from manta.kernels import runtime
from manta.kernels.runtime import jit

ROTATE_BYTES = 200_000_000
MAX_ROTATIONS = 256
REPLAYS = 11
GRAPH_US = 1000.0
"""At least so long a graph is replayed: some microseconds of its launch count in the time between two events."""

Calls = Sequence[Callable[[], Any]]
"""One call per rotated buffer."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that kernels see: of a whole model or of one rank of it."""

    name: str
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    page: int = 64

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in one layer, at 16 bits."""
        return 2 * self.kv_heads * self.dim * 2


LLAMA_8B = ModelShape("8b", hidden=4096, inter=14336, heads=32, kv_heads=8, dim=128, vocab=128256)
"""Llama-3.1-8B on one GPU."""
LLAMA_70B_RANK = ModelShape("70b_tp8", hidden=8192, inter=3584, heads=8, kv_heads=1, dim=128, vocab=16032)
"""One rank of Llama-3.1-70B at tensor parallel 8."""
MODELS = (LLAMA_8B, LLAMA_70B_RANK)
RANKS_OF_TWO = (
    ModelShape("8b_tp2", hidden=4096, inter=7168, heads=16, kv_heads=4, dim=128, vocab=64128),
    ModelShape("70b_tp2", hidden=8192, inter=14336, heads=32, kv_heads=4, dim=128, vocab=64128),
)
"""One rank of Llama-3.1-8B and of 70B at tensor parallel 2, tuned by names of their own (`linear_ranks`)."""


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


Section = Callable[[Peaks, torch.device, ModelShape], Iterator[Line]]
"""Times the kernels of one kind at one model's shapes."""
Tuner = Callable[[Peaks, torch.device], dict[str, Any]]
"""Finds the configurations of one operation for all `MODELS`: shape key -> what kernels/tuned keeps for it."""


def time_us(calls: Calls) -> float:
    """Median time of one call over replays of a graph that makes all of them, in turn for about a millisecond."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and fills library caches
            call()
    torch.cuda.current_stream().wait_stream(stream)
    once = _replay_us(calls, 3)
    turns = math.ceil(GRAPH_US / once)
    return _replay_us([*calls] * turns, REPLAYS) / (turns * len(calls))


def _replay_us(calls: Calls, replays: int) -> float:
    """Median time of all calls as one graph, its launch and all."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    graph.reset()
    return statistics.median(times)


def num_rotations(bytes_per_call: int) -> int:
    return max(2, min(MAX_ROTATIONS, math.ceil(ROTATE_BYTES / bytes_per_call)))


def line_of(
    kernel: str, shape: str, calls: Calls, floor_s: float, library: str | None = None, others: Calls | None = None
) -> Line:
    ours = time_us(calls)
    theirs = time_us(others) if others is not None else None
    floor_us = floor_s * 1e6
    ratio = theirs / ours if theirs is not None else None
    return Line(kernel, shape, ours, floor_us, floor_us / ours, library, theirs, ratio)


HEADER = f"{'kernel':26}{'shape':24}{'us':>10}{'floor us':>10}{'of floor':>10}  library"


def row_of(line: Line) -> str:
    """The line as a row under `HEADER`."""
    against = f"{line.library} {line.library_us:.1f} us, x{line.ratio:.2f}" if line.library_us else ""
    numbers = f"{line.time_us:10.1f}{line.floor_us:10.1f}{line.share_of_floor:10.2f}"
    return f"{line.kernel:26}{line.shape:24}{numbers}  {against}"


@jit
def _read_kernel(x_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(2 * pid * BLOCK, elements, 2 * tl.num_programs(0) * BLOCK):
        total += tl.load(x_ptr + start + offs).to(tl.float32)
        total += tl.load(x_ptr + start + BLOCK + offs).to(tl.float32)
    tl.store(out_ptr + pid, tl.sum(total))


def measure_peaks(device: torch.device) -> Peaks:
    """The rates of a sum over 1 GiB and of the faster of two square matrix products in bfloat16."""
    x = torch.zeros(1 << 29, dtype=torch.bfloat16, device=device)
    programs = 4 * runtime.num_multiprocessors(device)
    out = torch.zeros(programs, device=device)
    read_us = time_us([lambda: _read_kernel[(programs,)](x, out, x.numel(), BLOCK=8192, num_warps=8)] * 2)
    matmul_flop_per_s = 0.0
    for size in (4096, 8192):
        a = random(device, size, size)
        matmul_us = time_us([lambda a=a: torch.matmul(a, a)] * 4)
        matmul_flop_per_s = max(matmul_flop_per_s, 2 * size**3 / (matmul_us * 1e-6))
    return Peaks(x.numel() * 2 / (read_us * 1e-6), matmul_flop_per_s)


def random(device: torch.device, *shape: int) -> torch.Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def block_tables(device: torch.device, num_seqs: int, blocks: int, num_blocks: int) -> list[torch.Tensor]:
    """Tables [seqs, blocks] int32 of distinct blocks that together pass over a cache of `num_blocks`."""
    order = torch.randperm(num_blocks, device=device).int()
    size = num_seqs * blocks
    return [
        order[i * size : (i + 1) * size].view(num_seqs, blocks) for i in range(min(MAX_ROTATIONS, num_blocks // size))
    ]
