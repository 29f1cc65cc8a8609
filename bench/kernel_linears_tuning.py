"""Finds the configurations of a decoder's linear layers on this GPU, for the tables that kernels/linear reads.

Every candidate is checked and timed for every number of rows that steps are padded to. What is measured, and against
what, is kernel_linears'; which configurations are worth it, kernel_candidates'.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch

from manta.kernels import linear, runtime
from manta.kernels.gemm import DETERMINISTIC_TILES, GemmTiles
from manta.kernels.gemm_skinny import SkinnyTiles, padded_rows
from manta.kernels.gemv import GemvTiles

from .kernel_candidates import candidates, fits
from .kernel_linears import DETERMINISTIC_ROWS, EPS, HEAD_ROWS, Layer, Operands, layers_of, rank_layers_of
from .kernel_timing import MODELS, RANKS_OF_TWO, Peaks, time_us

TUNED_ROWS = (1, 2, 4, 8, 16, 32, 48, *range(64, 256, 16), *range(256, 1024, 32), 1024, 2048, 4096, 8192)
"""As decode steps are padded: what the library takes changes from one number of rows to the next."""
PIECED_ROWS, PIECES = 8192, (2048, 4096)
SUSTAINED_S = 1.5
"""Long enough for a GPU at full load to lower its clock."""
DETERMINISTIC_CANDIDATES = (
    DETERMINISTIC_TILES,
    GemmTiles(128, 128, 64, 4, 3, programs=2),
    GemmTiles(128, 64, 64, 4, 4, programs=2),
    GemmTiles(64, 128, 64, 4, 4, programs=2),
    GemmTiles(64, 128, 128, 4, 4),
    GemmTiles(64, 64, 128, 4, 6),
    GemmTiles(64, 64, 128, 4, 3, programs=2),
    GemmTiles(64, 32, 128, 4, 4, programs=2),
)
MAX_RELATIVE_ERROR = 6e-3
"""Of 16-bit results with fp32 sums: rounding alone gives 1.7e-3, twice that where the normalized row is rounded too."""
COMPILERS = 12
"""Processes that compile candidates before any is timed."""


def tune(peaks: Peaks, device: torch.device, timings: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Entries of the table "linear" for all `MODELS`."""
    del peaks
    table = tune_layers([layer for model in MODELS for layer in layers_of(model)], device, timings)
    compare_deterministic(device)
    return table


def tune_ranks(peaks: Peaks, device: torch.device) -> dict[str, Any]:
    """Entries of the same table for ranks that share layers."""
    del peaks
    return tune_layers([layer for model in RANKS_OF_TWO for layer in rank_layers_of(model)], device)


def tune_layers(
    chosen: Sequence[Layer], device: torch.device, timings: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The fastest right candidate for each layer and row bucket.

    The library stays where nothing beats it by more than 2 %, and a bucket keeps its smaller neighbour's configuration
    where that is within 1 %. `timings` receives every measurement.
    """
    layers = {f"{layer.kind} {layer.n_size}x{layer.k_size}": layer for layer in chosen}
    buckets = {key: buckets_of(layer) for key, layer in layers.items()}
    failed = compile_all(layers, buckets, device)
    table: dict[str, Any] = {}
    for key, layer in layers.items():
        begin = time.monotonic()
        operands = Operands(layer, max(buckets[key]), device)
        winners: list[linear.Tiles | None] = []
        for rows in buckets[key]:
            found = measure(operands, rows, failed, device, winners[-1] if winners else None, timings)
            winners.append(found)
        table[key] = entries_of(buckets[key], winners)
        if layer.name != "head":
            table[key][-1] |= {"piece": piece} if (piece := best_piece(operands, table[key])) else {}
        print(f"{key}: {time.monotonic() - begin:.0f} s", flush=True)
        del operands
        torch.cuda.empty_cache()
    return table


def buckets_of(layer: Layer) -> list[int]:
    return [rows for rows in TUNED_ROWS if layer.name != "head" or rows <= HEAD_ROWS]


def measure(
    operands: Operands,
    rows: int,
    failed: set[str],
    device: torch.device,
    before: linear.Tiles | None,
    timings: list[dict[str, Any]] | None,
) -> linear.Tiles | None:
    """The winner among the candidates for one layer and number of rows."""
    layer = operands.layer
    expected = operands.expected(rows)
    library_us = time_us(operands.calls(None, rows))
    found: list[tuple[float, linear.Tiles]] = []
    tried = candidates(layer.kind, layer.n_size, layer.k_size, rows, runtime.num_multiprocessors(device))
    if before is not None and before not in tried and not isinstance(before, GemvTiles) and fits(before, rows):
        tried.append(before)
    for tiles in tried:
        if variant(layer, rows, tiles) in failed:
            continue
        error = operands.relative_error(tiles, rows, expected)
        us = time_us(operands.calls(tiles, rows)) if error <= MAX_RELATIVE_ERROR else float("inf")
        if error > MAX_RELATIVE_ERROR:
            print(f"WRONG {layer.name} {rows} rows {tiles}: relative error {error:.2e}", flush=True)
        else:
            found.append((us, tiles))
        if timings is not None:
            timings.append({**asdict(layer), "rows": rows, **asdict(tiles), "us": us, "error": error})
    if timings is not None:
        timings.append({**asdict(layer), "rows": rows, "library_us": library_us})
    if not found:
        return None
    best_us, best = min(found, key=lambda pair: pair[0])
    for us, tiles in found:
        if tiles == before and us <= 1.01 * best_us:
            best_us, best = us, tiles
    print(
        f"{layer.name:8}{rows:6} rows{best_us:9.1f} us, library {library_us:9.1f}, x{library_us / best_us:.2f} {best}"
    )
    return best if library_us > 1.02 * best_us else None


def entries_of(buckets: Sequence[int], winners: Sequence[linear.Tiles | None]) -> list[dict[str, Any]]:
    """A plan's JSON form; neighbours with one configuration become one entry, the last stands for all above."""
    entries: list[dict[str, Any]] = []
    for rows, tiles in zip(buckets, winners, strict=True):
        entry: dict[str, Any] = {"kernel": linear.kernel_name(tiles), **({} if tiles is None else asdict(tiles))}
        if entries and {name: size for name, size in entries[-1].items() if name != "rows"} == entry:
            entries.pop()
        entries.append({"rows": rows, **entry})
    if entries[-1]["kernel"] in ("gemv", "skinny"):
        entries.append({"kernel": "library"})
    else:
        del entries[-1]["rows"]
    return entries


def best_piece(operands: Operands, entries: Sequence[dict[str, Any]]) -> int | None:
    """Rows of one launch with which `PIECED_ROWS` rows take the least time; None when all at once is within 1 %.

    Each way runs for a while without a pause: a GPU at full load lowers its clock, and what saves traffic saves power.
    """
    plan = linear.parse_plan(entries)
    found = {size: sustained_us(operands.pieced_call(plan, PIECED_ROWS, size)) for size in (PIECED_ROWS, *PIECES)}
    print(f"{operands.layer.name:8}{PIECED_ROWS} rows by pieces: {found}", flush=True)
    size = min(found, key=lambda size: found[size])
    return size if found[size] < 0.99 * found[PIECED_ROWS] else None


def sustained_us(call: Callable[[], None]) -> float:
    """Microseconds of one call, among as many as fill `SUSTAINED_S`, the first third left out."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    call()
    end.record()
    end.synchronize()
    count = max(3, int(SUSTAINED_S * 1e3 / begin.elapsed_time(end)))
    for index in range(count):
        if index == count // 3:
            begin.record()
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / (count - count // 3)


def variant(layer: Layer, rows: int, tiles: linear.Tiles) -> str:
    """What the compiler sees of a call: equal strings, equal machine code."""
    width = padded_rows(rows) if isinstance(tiles, SkinnyTiles) else 0
    if isinstance(tiles, GemmTiles):
        tiles = replace(tiles, programs=1)
    return f"{layer.kind} {layer.has_norm} {width} {layer.k_size % tiles.block_k == 0} {tiles}"


def compile_all(layers: dict[str, Layer], buckets: dict[str, list[int]], device: torch.device) -> set[str]:
    """Fill Triton's cache from many processes; the variants that do not compile or do not fit the device."""
    multiprocessors = runtime.num_multiprocessors(device)
    jobs: dict[str, tuple[Layer, int, linear.Tiles]] = {}
    for key, layer in layers.items():
        for rows in buckets[key]:
            for tiles in candidates(layer.kind, layer.n_size, layer.k_size, rows, multiprocessors):
                # The code does not depend on N: a small matrix of the same divisibility compiles the same.
                jobs.setdefault(variant(layer, rows, tiles), (replace(layer, n_size=2048), rows, tiles))
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
        errors = dict(zip(jobs, pool.map(compile_one, jobs.values(), chunksize=4), strict=True))
    failed = {name: error for name, error in errors.items() if error is not None}
    print(f"{len(jobs)} variants compiled in {time.monotonic() - begin:.0f} s, {len(failed)} failed", flush=True)
    for name, error in failed.items():
        print(f"FAILED {name}: {error}")
    return set(failed)


def compile_one(job: tuple[Layer, int, linear.Tiles]) -> str | None:
    """Run one candidate once; what went wrong, or None. An error must not end the tuning of all others."""
    layer, rows, tiles = job
    device = torch.device("cuda")
    x, weight = (torch.zeros(size, layer.k_size, dtype=torch.bfloat16, device=device) for size in (rows, layer.n_size))
    residual = torch.zeros(rows, layer.n_size, dtype=torch.bfloat16, device=device) if layer.kind == "add" else None
    norm_weight = x[0] if layer.has_norm else None
    try:
        linear.apply(tiles, x, weight, norm_weight=norm_weight, eps=EPS, gated=layer.kind == "gated", residual=residual)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compare_deterministic(device: torch.device) -> None:
    """Print what tiles for the deterministic mode would cost: the sum over one decoder layer's products, by rows.

    The mode has one configuration for all rows, a constant in kernels/gemm; this is how it was chosen.
    """
    layers = layers_of(MODELS[0])[:4]
    operands = [Operands(layer, max(DETERMINISTIC_ROWS), device) for layer in layers]
    for tiles in DETERMINISTIC_CANDIDATES:
        sums = [sum(time_us(each.calls(tiles, rows)) for each in operands) for rows in DETERMINISTIC_ROWS]
        costs = ", ".join(f"{rows} rows {us:.0f} us" for rows, us in zip(DETERMINISTIC_ROWS, sums, strict=True))
        print(f"deterministic {tiles}: {costs}", flush=True)
