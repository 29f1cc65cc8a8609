"""Finds the configurations of layers with quantized weights on this GPU, and what they are worth beside 16 bits.

All candidates are compiled by many processes while the first are measured; each is checked before it is timed. Results
are written layer by layer, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton

from manta.kernels.compile_ahead import compiling_only
from manta.kernels.linear import kernel_name
from manta.kernels.quantized import linear as quantized
from manta.kernels.quantized.layout import Format
from manta.kernels.quantized.weight_only import WeightOnlyTiles

from .kernel_linears import Layer, Operands, layers_of, shipped_tiles
from .kernel_quantized import ROWS, SCHEMES, QuantizedOperands, Scheme, bf16_us
from .kernel_quantized_candidates import TUNED_ROWS, candidates, fallback
from .kernel_timing import LLAMA_8B, Peaks, measure_peaks, time_us

MAX_RELATIVE_ERROR = 1e-2
"""Of 16-bit results: rounding gives 2e-3 to 4e-3, numbers on the edge between two 8-bit codes a little more."""
GAIN = 0.99
"""The library stays where nothing takes less than this share of its time."""
NUM_COMPILERS = 14


def run(
    table: Path | None,
    json_path: Path | None,
    *,
    schemes: Sequence[Scheme] = SCHEMES,
    time_limit_s: float = 150.0,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Tune all `schemes` for Llama-3.1-8B, enter them in the table file, write and return what was measured.

    Layers that would begin after `time_limit_s` are left out, and said so.
    """
    device = device or torch.device("cuda")
    torch.manual_seed(0)
    deadline = time.monotonic() + time_limit_s
    layers = layers_of(LLAMA_8B)[:4]
    with ProcessPoolExecutor(_num_compilers(), mp_context=multiprocessing.get_context("spawn")) as pool:
        dense_orders = order_dense(pool, layers, device)
        orders = {scheme.name: order(pool, scheme, layers) for scheme in schemes}
        peaks = measure_peaks(device)
        result: dict[str, Any] = {
            "benchmark": "kernels_quantized",
            "command": "manta bench quantized",
            "hardware": torch.cuda.get_device_name(device),
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
            "peaks": asdict(peaks),
            "lines": [],
            "skipped": [],
        }
        failures(dense_orders, deadline)
        dense = {layer.name: bf16_us(layer, TUNED_ROWS, device) for layer in layers}
        tables: dict[str, dict[str, Any]] = {}
        for scheme in schemes:
            failed = failures(orders[scheme.name], deadline)
            for layer in layers:
                if time.monotonic() > deadline:
                    result["skipped"].append(f"{scheme.name} {layer.name}")
                    continue
                entries, lines = tune_layer(scheme, layer, peaks, device, failed, tables)
                torch.cuda.empty_cache()
                key = quantized.shape_key(layer.kind, layer.n_size, layer.k_size, scheme.group)
                tables.setdefault(scheme.name, {})[key] = entries
                for line in lines:
                    line["bf16_us"], line["torch_us"] = dense[layer.name][line["rows"]]
                result["lines"] += lines
                write(table, tables, json_path, result)
        pool.shutdown(wait=False, cancel_futures=True)
    print(report(result), flush=True)
    return result


def tune(scheme_name: str, peaks: Peaks, device: torch.device) -> dict[str, Any]:
    """The table of one scheme, for Llama-3.1-8B's shapes."""
    scheme = next(scheme for scheme in SCHEMES if scheme.name == scheme_name)
    layers = layers_of(LLAMA_8B)[:4]
    with ProcessPoolExecutor(_num_compilers(), mp_context=multiprocessing.get_context("spawn")) as pool:
        failed = failures(order(pool, scheme, layers), float("inf"))
    found: dict[str, Any] = {}
    for layer in layers:
        key = quantized.shape_key(layer.kind, layer.n_size, layer.k_size, scheme.group)
        found[key] = tune_layer(scheme, layer, peaks, device, failed, {})[0]
    return found


def tune_layer(
    scheme: Scheme,
    layer: Layer,
    peaks: Peaks,
    device: torch.device,
    failed: Mapping[str, str],
    tables: Mapping[str, Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The table's entry of one layer, and a line for each number of rows."""
    begin = time.monotonic()
    operands = QuantizedOperands(scheme, layer, max(TUNED_ROWS), device)
    winners: list[Any] = []
    lines: list[dict[str, Any]] = []
    for rows in TUNED_ROWS:
        tried = [tiles for tiles in candidates(scheme, layer, rows) if variant(scheme, layer, tiles) not in failed]
        if scheme.activations is Format.FP8 and scheme.group is None:
            tried += weight_only_winner(layer, rows, tables)
        if operands.takes_library(rows):
            tried.append(None)
        times = time_all(operands, rows, tried)
        winner, line = settle(operands, rows, times)
        winners.append(winner)
        lines.append({**line, "floor_us": 1e6 * operands.floor_s(peaks, rows)})
    print(f"{scheme.name} {layer.name}: {time.monotonic() - begin:.1f} s", flush=True)
    return entries_of(winners), lines


def settle(operands: QuantizedOperands, rows: int, times: Mapping[Any, float]) -> tuple[Any, dict[str, Any]]:
    """Whose time counts, None for the library, and what is written about it. Without any time the library stands."""
    ours = {tiles: us for tiles, us in times.items() if tiles is not None}
    library_us = times.get(None)
    best = min(ours, key=lambda tiles: ours[tiles], default=None)
    if library_us is not None and best is not None and ours[best] > GAIN * library_us:
        best = None
    line: dict[str, Any] = {
        "scheme": operands.scheme.name,
        "layer": operands.layer.name,
        "rows": rows,
        "kernel": kernel_name(best, quantized.KERNELS),
        "us": times.get(best),
        "library_us": library_us,
        "product_us": None,
        "library_product_us": None,
        "candidates": [{**({} if tiles is None else asdict(tiles)), "us": us} for tiles, us in times.items()],
    }
    if operands.scheme.activations is not None:
        products = {tiles: us for tiles, us in ours.items() if not isinstance(tiles, WeightOnlyTiles)}
        fastest = min(products, key=lambda tiles: products[tiles], default=None)
        if fastest is not None:
            line["product_us"] = attempt(lambda: time_us(operands.bare_calls(fastest, rows)))
        if library_us is not None:
            line["library_product_us"] = attempt(lambda: time_us(operands.bare_calls(None, rows)))
    return best, line


def time_all(operands: QuantizedOperands, rows: int, tried: Sequence[Any]) -> dict[Any, float]:
    """Microseconds of the candidates that are right; a wrong one is said and gives place to its fallback."""
    expected: dict[bool, torch.Tensor] = {}
    times: dict[Any, float] = {}
    left = list(tried)
    while left:
        tiles = left.pop(0)
        rounds = not isinstance(tiles, WeightOnlyTiles)
        if rounds not in expected:
            expected[rounds] = operands.expected(rows, rounds=rounds)
        error = attempt(lambda tiles=tiles, e=expected[rounds]: operands.relative_error(tiles, rows, e))
        us = attempt(lambda tiles=tiles: time_us(operands.calls(tiles, rows))) if error is not None else None
        if us is not None and error is not None and error <= MAX_RELATIVE_ERROR:
            times[tiles] = us
            continue
        print(f"WRONG {operands.scheme.name} {operands.layer.name} {rows} rows {tiles}: error {error}", flush=True)
        other = fallback(tiles)
        if other is not None and other not in tried:
            left.append(other)
    return times


def attempt(measure: Callable[[], float]) -> float | None:
    """The measurement, or None with a word why not: one candidate must not end the others."""
    try:
        return measure()
    except Exception as error:
        print(f"FAILED {type(error).__name__}: {error}"[:300], flush=True)
        return None


def weight_only_winner(layer: Layer, rows: int, tables: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """What FP8 weights took with 16-bit activations, where that was measured before and is a kernel of ours."""
    name = quantized.scheme_name(Format.FP8, None, None)
    entries = tables.get(name, {}).get(quantized.shape_key(layer.kind, layer.n_size, layer.k_size, None))
    tiles = None if entries is None else quantized.parse_plan(entries, quantized.KERNELS).tiles_for(rows)
    return [] if tiles is None else [tiles]


def entries_of(winners: Sequence[Any]) -> list[dict[str, Any]]:
    """A plan's JSON form; neighbours with one configuration become one entry, the last stands for all above."""
    entries: list[dict[str, Any]] = []
    for rows, tiles in zip(TUNED_ROWS, winners, strict=True):
        entry = {"kernel": kernel_name(tiles, quantized.KERNELS), **({} if tiles is None else asdict(tiles))}
        if entries and {name: size for name, size in entries[-1].items() if name != "rows"} == entry:
            entries.pop()
        entries.append({"rows": rows, **entry})
    del entries[-1]["rows"]
    return entries


def variant(scheme: Scheme, layer: Layer, tiles: Any) -> str:
    """What the compiler sees of a call: equal strings, equal machine code."""
    return f"{scheme.name} {layer.kind} {layer.k_size if tiles is None else 0} {tiles}"


def order(pool: ProcessPoolExecutor, scheme: Scheme, layers: Sequence[Layer]) -> dict[str, Future[str | None]]:
    """Compilations of everything that a scheme's layers will try."""
    jobs: dict[str, tuple[Scheme, Layer, int, Any]] = {}
    for layer in layers:
        for rows in TUNED_ROWS:
            for tiles in candidates(scheme, layer, rows):
                jobs.setdefault(variant(scheme, layer, tiles), (scheme, layer, rows, tiles))
        if scheme.activations is None or scheme.group is None:
            jobs.setdefault(variant(scheme, layer, None), (scheme, layer, max(TUNED_ROWS), None))
    return {name: pool.submit(compile_one, *job) for name, job in jobs.items()}


def order_dense(
    pool: ProcessPoolExecutor, layers: Sequence[Layer], device: torch.device
) -> dict[str, Future[str | None]]:
    """Compilations of the same layers in bfloat16 as shipped."""
    jobs = {}
    for layer in layers:
        for rows in TUNED_ROWS:
            jobs.setdefault(f"bf16 {layer.name} {shipped_tiles(layer, rows, device)}", (layer, rows))
    return {name: pool.submit(compile_dense, *job) for name, job in jobs.items()}


def compile_dense(layer: Layer, rows: int) -> str | None:
    """As `compile_one`, for a layer in bfloat16 as shipped."""
    device = torch.device("cuda")
    try:
        operands = Operands(replace(layer, n_size=2048), rows, device, copies=1)
        with compiling_only(1):
            operands.calls(shipped_tiles(layer, rows, device), rows)[0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_one(scheme: Scheme, layer: Layer, rows: int, tiles: Any, device: str = "cuda") -> str | None:
    """Compile one candidate into Triton's cache without a launch; what went wrong, or None."""
    # The code does not depend on N: a small matrix of the same divisibility compiles the same.
    small = replace(layer, n_size=2048)
    try:
        operands = QuantizedOperands(scheme, small, rows, torch.device(device), copies=1)
        calls = operands.calls(tiles, rows)
        with compiling_only(1):
            calls[0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def failures(orders: Mapping[str, Future[str | None]], deadline: float) -> dict[str, str]:
    """Waits for the compilations; the variants that failed. Those of a broken pool are compiled when they are tried."""
    begin = time.monotonic()
    failed: dict[str, str] = {}
    for name, future in orders.items():
        try:
            error = future.result(None if deadline == float("inf") else max(0.0, deadline - time.monotonic()))
        except Exception as broken:
            print(f"NOT COMPILED AHEAD {name}: {type(broken).__name__}", flush=True)
            continue
        if error is not None:
            failed[name] = error
            print(f"FAILED {name}: {error}", flush=True)
    print(f"{len(orders)} variants, waited {time.monotonic() - begin:.0f} s, {len(failed)} failed", flush=True)
    return failed


def write(table: Path | None, tables: Mapping[str, Any], json_path: Path | None, result: dict[str, Any]) -> None:
    """What there is so far. What the table file says about other operations stays."""
    if table is not None:
        kept = json.loads(table.read_text()) if table.exists() else {}
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(json.dumps(kept | dict(tables), indent=1) + "\n")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def report(result: Mapping[str, Any]) -> str:
    """Sums over the four layers by scheme and rows: microseconds, share of the floor, and speed beside the others."""
    lines = ["scheme             rows       us  of floor  x bf16  x torch.mm  x library  product x library's"]
    for name in dict.fromkeys(line["scheme"] for line in result["lines"]):
        for rows in ROWS:
            some = [line for line in result["lines"] if line["scheme"] == name and line["rows"] == rows]
            sums = {key: total(some, key) for key in ("us", "floor_us", "bf16_us", "torch_us", "library_us")}
            products = [total(some, key) for key in ("library_product_us", "product_us")]
            cells = [ratio(sums[key], sums["us"]) for key in ("floor_us", "bf16_us", "torch_us", "library_us")]
            us = f"{sums['us']:9.1f}" if sums["us"] is not None else "        -"
            kernels = " ".join(str(line["kernel"]) for line in some)
            lines.append(
                f"{name:18}{rows:5}{us}{cells[0]:>10}{cells[1]:>8}{cells[2]:>12}{cells[3]:>11}"
                f"{ratio(*products):>21}  {kernels}"
            )
    if result["skipped"]:
        lines.append(f"SKIPPED for want of time: {', '.join(result['skipped'])}")
    return "\n".join(lines)


def total(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The sum, None where a part is missing."""
    values = [line[key] for line in lines]
    return sum(values) if values and None not in values else None


def ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or not under else f"{over / under:.2f}"


def _num_compilers() -> int:
    return max(1, min(NUM_COMPILERS, (os.cpu_count() or 2) - 2))
