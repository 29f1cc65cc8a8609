"""Times prefill attention beside cuDNN's and finds the plans of its kernels. Knows the kernels' plans and the frame.

`python -m manta.bench.kernel_prefill --tune table.json` finds and writes this GPU's table and prints every candidate.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from manta.kernels import attention_prefill
from manta.kernels.attention_prefill_plan import PrefillPlan, table_key

from .kernel_timing import MODELS, Line, ModelShape, Peaks, block_tables, line_of, measure_peaks, random, time_us

MAX_RELATIVE_ERROR = 6e-3
"""Of 16-bit results with fp32 sums, where weights are rounded to 16 bits before they meet the values."""
TRY_SECONDS = 100.0
"""After which a candidate that is still compiling or running counts as wrong."""


@dataclass(frozen=True)
class Prompts:
    """`count` sequences of `length` tokens, of which the last `queries` are computed now."""

    name: str
    queries: int
    length: int
    count: int = 1

    def flop(self, model: ModelShape) -> float:
        """Of both products, counting what queries see."""
        seen = self.queries * (self.length - self.queries) + self.queries * (self.queries + 1) / 2
        return 4.0 * self.count * seen * model.heads * model.dim


WORK = (
    Prompts("512 tokens", 512, 512),
    Prompts("2048 tokens", 2048, 2048),
    Prompts("8192 tokens", 8192, 8192),
    Prompts("32768 tokens", 32768, 32768),
    Prompts("8192 at 24576", 8192, 32768),
    Prompts("512 at 7680", 512, 8192),
    Prompts("16 x 512 tokens", 512, 512, 16),
)
SINGLE_QUERIES = Prompts("64 single at 1024", 1, 1024, 64)
"""Decodes, which the deterministic mode sends through this kernel."""
BOUNDS = ((1024, (WORK[0], WORK[6])), (4096, (WORK[1],)), (16384, (WORK[2], WORK[5])), (None, (WORK[3], WORK[4])))
"""For each bucket of the longest sequence, what the plan is chosen by."""

_POINTERS = PrefillPlan("pointers", 64, 64, 4, 3, 3)
_SMALL = PrefillPlan("descriptors", 64, 64, 4, 3, 2)
_LARGE = PrefillPlan("descriptors", 128, 64, 8, 3, 2)
_HOPPER = PrefillPlan("specialized", 128, 128, 4, 2)
CANDIDATES = (
    _POINTERS,
    *(
        replace(plan, heads_first=heads_first, **options)
        for heads_first in (True, False)
        for plan, options in ((_SMALL, {}), (_SMALL, {"masked_stages": 1}), (_SMALL, {"num_stages": 2}), (_LARGE, {}))
    ),
    *(
        replace(_HOPPER, heads_first=heads_first, persistent=persistent, pinned=pinned, turns=turns)
        for heads_first in (True, False)
        for persistent in (False, True)
        for pinned in (False, True)
        for turns in (False, True)
    ),
)


class Operands:
    """Tensors of one piece of work, with as many block tables as pass over a cache of four times its tokens."""

    def __init__(self, work: Prompts, model: ModelShape, device: torch.device) -> None:
        self.work, self.model = work, model
        blocks = math.ceil(work.length / model.page)
        num_blocks = max(4 * blocks * work.count, 1024)
        self.caches = random(device, 2, num_blocks, model.page, model.kv_heads, model.dim)
        fused = random(device, work.count * work.queries, model.heads + 2 * model.kv_heads, model.dim)
        self.q = fused[:, : model.heads]
        self.tables = block_tables(device, work.count, blocks, num_blocks)[:8]
        self.query_start = torch.arange(work.count + 1, dtype=torch.int32, device=device) * work.queries
        self.lengths = torch.full((work.count,), work.length, dtype=torch.int32, device=device)

    def calls(
        self, plan: PrefillPlan | None = None, *, deterministic: bool = False
    ) -> list[Callable[[], torch.Tensor]]:
        call = partial(
            attention_prefill.attention_prefill, self.q, *self.caches, query_start=self.query_start,
            seq_lens=self.lengths, scale=self.model.dim**-0.5, max_query_len=self.work.queries,
            max_seq_len=self.work.length, plan=plan, deterministic=deterministic,
        )  # fmt: skip
        return [partial(call, block_table=table) for table in self.tables]

    def relative_error(self, plan: PrefillPlan | None) -> float:
        """Of some rows of one call, whose output was NaN before, against fp32; infinite if any element still is NaN."""
        out = torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)
        self.calls(plan)[0](out=out)  # pyright: ignore[reportCallIssue]
        if not bool(out.isfinite().all()):
            return float("inf")
        work, group = self.work, self.model.heads // self.model.kv_heads
        picked = sorted(
            {
                *range(min(3, work.queries)),
                *range(0, work.queries, 509),
                *range(max(0, work.queries - 66), work.queries),
            }
        )
        worst = 0.0
        for sequence in {0, work.count - 1}:
            keys, values = (
                cache[self.tables[0][sequence].long()].flatten(0, 1)[: work.length].float() for cache in self.caches
            )  # [length, kv_heads, dim]
            at = torch.tensor(picked, device=out.device)
            q = self.q[sequence * work.queries + at].float().unflatten(1, (self.model.kv_heads, group))
            scores = torch.einsum("qhgd,khd->hgqk", q, keys) * self.model.dim**-0.5
            seen = torch.arange(work.length, device=out.device)[None] <= (work.length - work.queries + at)[:, None]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            expected = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
            difference = out[sequence * work.queries + at].float() - expected
            worst = max(worst, float(difference.norm() / expected.norm()))
        return worst


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    """As shipped, by lengths, beside cuDNN over contiguous tensors; then the deterministic mode."""
    for work in WORK:
        operands = Operands(work, model, device)
        others = [partial(causal_by_cudnn, *dense_operands(operands))] * 4 if work.queries == work.length else None
        floor_s = work.flop(model) / peaks.matmul_flop_per_s
        library = "cuDNN SDPA" if others else None
        yield line_of("attention_prefill", work.name, operands.calls(), floor_s, library, others)
    for work in (*WORK, SINGLE_QUERIES):
        calls = Operands(work, model, device).calls(deterministic=True)
        floor_s = work.flop(model) / peaks.matmul_flop_per_s
        if work is SINGLE_QUERIES:
            floor_s = work.count * work.length * model.token_bytes / peaks.read_bytes_per_s
        yield line_of("deterministic_attention", work.name, calls, floor_s)


def dense_operands(operands: Operands) -> list[torch.Tensor]:
    """Queries, keys and values of like sizes [sequences, heads, length, dim], contiguous."""
    work = operands.work
    keys, values = operands.caches.flatten(1, 2)[:, : work.count * work.length]
    return [x.unflatten(0, (work.count, work.length)).transpose(1, 2).contiguous() for x in (operands.q, keys, values)]


def causal_by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def tune(peaks: Peaks, device: torch.device, timings: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The table "attention_prefill" of this device for all `MODELS`: the fastest right plan for each bucket of lengths.

    The deterministic plan is one for all lengths: the one with the least time in all, each piece of work relative to
    its fastest. `timings` receives every measurement.
    """
    right = try_all(CANDIDATES)
    table: dict[str, Any] = {}
    for model in MODELS:
        plans = [plan for plan in CANDIDATES if (model, plan) in right]
        times = {work: measure(work, model, plans, peaks, device, timings) for work in (*WORK, SINGLE_QUERIES)}
        group = model.heads // model.kv_heads
        entries: list[dict[str, Any]] = []
        for bound, bucket in BOUNDS:
            best = least(plans, times, bucket)
            entry = {"max_seq_len": bound} | asdict(best)
            if entries and {**entries[-1], "max_seq_len": bound} == entry:
                entries.pop()
            entries.append(entry)
        del entries[-1]["max_seq_len"]
        table[table_key(model.dim, group, False)] = entries
        table[table_key(model.dim, group, True)] = [asdict(least(plans, times, (*WORK, SINGLE_QUERIES)))]
    return table


def least(
    plans: Sequence[PrefillPlan], times: dict[Prompts, dict[PrefillPlan, float]], bucket: Sequence[Prompts]
) -> PrefillPlan:
    """The plan with the least product of times over `bucket`."""
    return min(plans, key=lambda plan: sum(math.log(times[work][plan]) for work in bucket))


def measure(
    work: Prompts,
    model: ModelShape,
    plans: Sequence[PrefillPlan],
    peaks: Peaks,
    device: torch.device,
    timings: list[dict[str, Any]] | None,
) -> dict[PrefillPlan, float]:
    """Microseconds of every plan, infinite for wrong ones; prints them, fastest first, beside cuDNN's."""
    operands = Operands(work, model, device)
    found: dict[PrefillPlan, float] = {}
    for plan in plans:
        error = operands.relative_error(plan)
        if error > MAX_RELATIVE_ERROR:
            print(f"WRONG {model.name} {work.name} {plan}: relative error {error:.2e}", flush=True)
        found[plan] = time_us(operands.calls(plan)) if error <= MAX_RELATIVE_ERROR else math.inf
        if timings is not None:
            timings.append({"model": model.name, "work": work.name, **asdict(plan), "us": found[plan], "error": error})
    library_us = math.nan
    if work.queries == work.length:
        library_us = time_us([partial(causal_by_cudnn, *dense_operands(operands))] * 4)
    print(f"{model.name} {work.name}: cuDNN {library_us:.1f} us")
    for plan, us in sorted(found.items(), key=lambda pair: pair[1]):
        rate = work.flop(model) / us / 1e6
        print(f"  {us:10.1f} us {rate:6.0f} TFLOP/s x{library_us / us:.2f} {describe(plan)}", flush=True)
    return found


def describe(plan: PrefillPlan) -> str:
    order = "heads first" if plan.heads_first else "tiles first"
    stages = f"stages {plan.num_stages}/{plan.masked_stages}"
    flags = [name for name in ("persistent", "pinned", "turns") if getattr(plan, name)]
    return " ".join((f"{plan.kernel} {plan.block_m}x{plan.tile} {plan.num_warps} warps {stages} {order}", *flags))


def try_all(plans: Sequence[PrefillPlan]) -> set[tuple[ModelShape, PrefillPlan]]:
    """Compile and check each plan in a process of its own, side by side; the ones that end in time and are right."""
    context = multiprocessing.get_context("spawn")
    begin = time.monotonic()
    running: list[tuple[PrefillPlan, Any, Connection]] = []
    for plan in plans:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_try, args=(plan, sender), daemon=True)
        process.start()
        sender.close()
        running.append((plan, process, receiver))
    right: set[tuple[ModelShape, PrefillPlan]] = set()
    for plan, process, receiver in running:
        for model in MODELS:
            left_s = max(0.0, begin + TRY_SECONDS - time.monotonic())
            try:
                verdict = receiver.recv() if receiver.poll(left_s) else f"no end after {TRY_SECONDS:.0f} s"
            except EOFError:
                verdict = "its process ended"
            if verdict is None:
                right.add((model, plan))
            else:
                print(f"FAILED {model.name} {describe(plan)}: {verdict}", flush=True)
        process.kill()
        process.join()
    print(f"{len(plans)} plans tried in {time.monotonic() - begin:.0f} s, {len(right)} right", flush=True)
    return right


def _try(plan: PrefillPlan, sender: Connection) -> None:
    """For each model, send None if the plan is right on small pieces of work, else what is wrong."""
    torch.manual_seed(0)
    for model in MODELS:
        try:
            works = Prompts("small", 300, 1000, 3), Prompts("single", 1, 65, 5)
            errors = [Operands(work, model, torch.device("cuda")).relative_error(plan) for work in works]
            sender.send(f"relative error {max(errors):.2e}" if max(errors) > MAX_RELATIVE_ERROR else None)
        except Exception as error:  # must not end the tuning of all others
            sender.send(f"{type(error).__name__}: {error}"[:300])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", type=Path, required=True, help="where the table goes, as JSON")
    path: Path = parser.parse_args(arguments).tune
    torch.manual_seed(0)
    device = torch.device("cuda")
    peaks = measure_peaks(device)
    print(f"read {peaks.read_bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {peaks.matmul_flop_per_s / 1e12:.0f} TFLOP/s")
    begin = time.monotonic()
    timings: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"attention_prefill": tune(peaks, device, timings)}
    path.write_text(json.dumps(table, indent=1) + "\n")
    path.with_suffix(".timings.json").write_text("\n".join(map(json.dumps, timings)) + "\n")
    print(f"tuned in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
