"""Times the linear layers of a decoder beside the library's composition of them, and finds their configurations.

Knows the kernels' tiles and what limits them; the frame is kernel_timing's, the tables kernels/linear reads.

`python -m manta.bench.kernel_linears --tune table.json` finds and writes this GPU's table and, beside it,
all timings; then it compares tiles for the deterministic mode.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manta.kernels import linear, runtime
from manta.kernels.gemm import DETERMINISTIC_TILES, GemmTiles
from manta.kernels.gemm_skinny import SkinnyTiles, padded_rows
from manta.kernels.gemv import GemvTiles, gemv_reference

from .kernel_candidates import candidates, fits
from .kernel_timing import MODELS, Line, ModelShape, Peaks, line_of, measure_peaks, num_rotations, random, time_us

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TUNED_ROWS = (1, 2, 4, 8, 16, 32, 48, *range(64, 256, 16), *range(256, 1024, 32), 1024, 2048, 4096, 8192)
"""As decode steps are padded: what the library takes changes from one number of rows to the next."""
PIECED_ROWS, PIECES = 8192, (2048, 4096)
SUSTAINED_S = 0.4
HEAD_ROWS = 512
"""More rows than these never want logits at once."""
DETERMINISTIC_ROWS = (1, 16, 64, 256, 2048)
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
EPS = 1e-5
MAX_RELATIVE_ERROR = 6e-3
"""Of 16-bit results with fp32 sums: rounding alone gives 1.7e-3, twice that where the normalized row is rounded too."""
COMPILERS = 12
"""Processes that compile candidates before any is timed."""


@dataclass(frozen=True)
class Layer:
    """A linear layer [n_size, k_size] and its kind in the tables: plain, gated or add."""

    name: str
    kind: str
    n_size: int
    k_size: int

    @property
    def out_size(self) -> int:
        return self.n_size // 2 if self.kind == "gated" else self.n_size

    def floor_s(self, peaks: Peaks, rows: int) -> float:
        """Weights, input and output once over the bus, or the operations, whichever takes longer."""
        moved = self.n_size * self.k_size + rows * (self.k_size + self.out_size * (2 if self.kind == "add" else 1))
        operations = 2 * rows * self.n_size * self.k_size
        return max(2 * moved / peaks.read_bytes_per_s, operations / peaks.matmul_flop_per_s)


def layers_of(model: ModelShape) -> list[Layer]:
    """One decoder layer's four products and the head."""
    attention = model.heads * model.dim
    return [
        Layer("qkv", "plain", attention + 2 * model.kv_heads * model.dim, model.hidden),
        Layer("o", "add", model.hidden, attention),
        Layer("gate_up", "gated", 2 * model.inter, model.hidden),
        Layer("down", "add", model.hidden, model.inter),
        Layer("head", "plain", model.vocab, model.hidden),
    ]


class Operands:
    """Inputs of one layer for up to `max_rows` rows, weights in as many copies as pass over the L2 cache."""

    def __init__(self, layer: Layer, max_rows: int, device: torch.device) -> None:
        self.layer = layer
        self._x = random(device, max_rows, layer.k_size)
        self._residual = random(device, max_rows, layer.n_size) if layer.kind == "add" else None
        self._norm_weight = random(device, layer.k_size) if layer.kind != "add" else None
        copies = num_rotations(2 * layer.n_size * layer.k_size)
        self._weights = [random(device, layer.n_size, layer.k_size) * layer.k_size**-0.5 for _ in range(copies)]

    def calls(self, tiles: linear.Tiles | None, rows: int) -> list[Callable[[], torch.Tensor]]:
        """The whole layer, norm and all, once for each copy of the weight. Results add up in one residual."""
        residual = None if self._residual is None else self._residual[:rows].clone()
        return [partial(self._call, tiles, self._x[:rows], weight, residual) for weight in self._weights]

    def _call(
        self, tiles: linear.Tiles | None, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        gated = self.layer.kind == "gated"
        return linear.apply(tiles, x, weight, norm_weight=self._norm_weight, eps=EPS, gated=gated, residual=residual)

    def pieced_call(self, plan: linear.Plan, rows: int, size: int) -> Callable[[], None]:
        """The layer of `rows` rows, `size` of them at a time; the next copy of the weight with each call."""
        out_size = self.layer.out_size
        out = torch.empty((rows, out_size), dtype=self._x.dtype, device=self._x.device)
        residual = None if self._residual is None else self._residual[:rows].clone()
        weights = itertools.cycle(self._weights)

        def call() -> None:
            weight = next(weights)
            for begin in range(0, rows, size):
                part = slice(begin, begin + size)
                linear.apply(
                    plan.tiles_for(size),
                    self._x[part],
                    weight,
                    norm_weight=self._norm_weight,
                    eps=EPS,
                    gated=self.layer.kind == "gated",
                    residual=None if residual is None else residual[part],
                    out=out[part],
                )

        return call

    def expected(self, rows: int) -> torch.Tensor:
        """What `first` of the results should be, from fp32."""
        at = first_and_last(rows)
        residual = None if self._residual is None else self._residual[:rows][at].clone()
        return gemv_reference(
            self._x[:rows][at],
            self._weights[0],
            norm_weight=self._norm_weight,
            eps=EPS,
            gated=self.layer.kind == "gated",
            residual=residual,
        ).float()

    def relative_error(self, tiles: linear.Tiles | None, rows: int, expected: torch.Tensor) -> float:
        """Of one call whose outputs and workspaces were NaN before; infinite if any element still is."""
        with poisoned_memory():
            result = self.calls(tiles, rows)[0]()
        if not bool(result.isfinite().all()):
            return float("inf")
        difference = result[first_and_last(rows)].float() - expected
        return float(difference.norm() / expected.norm())


def first_and_last(rows: int) -> torch.Tensor:
    """Indices of the rows that are checked: all of few, both ends of many."""
    return torch.arange(rows) if rows <= 128 else torch.cat((torch.arange(64), torch.arange(rows - 64, rows)))


class poisoned_memory:  # noqa: N801
    """While entered, `torch.empty` hands out NaN."""

    def __enter__(self) -> None:
        self._empty = torch.empty

        def empty(*args: Any, **options: Any) -> torch.Tensor:
            return self._empty(*args, **options).fill_(torch.nan)

        torch.empty = empty

    def __exit__(self, *_: object) -> None:
        torch.empty = self._empty


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    """Each layer as shipped, by rows, beside norm kernel, cuBLAS and activation kernel; then the deterministic mode."""
    for layer in layers_of(model):
        rows_of_layer = [rows for rows in ROWS if layer.name != "head" or rows <= HEAD_ROWS]
        operands = Operands(layer, max(rows_of_layer), device)
        for rows in rows_of_layer:
            yield line_of(
                f"linear_{layer.name}",
                f"{rows} rows",
                operands.calls(shipped_tiles(layer, rows, device), rows),
                layer.floor_s(peaks, rows),
                "cuBLAS, own norm and silu",
                operands.calls(None, rows),
            )
        for rows in DETERMINISTIC_ROWS:
            if rows in rows_of_layer:
                calls = operands.calls(DETERMINISTIC_TILES, rows)
                yield line_of(f"deterministic_{layer.name}", f"{rows} rows", calls, layer.floor_s(peaks, rows))


def shipped_tiles(layer: Layer, rows: int, device: torch.device) -> linear.Tiles | None:
    return linear.plan(layer.kind, layer.n_size, layer.k_size, device).tiles_for(rows)


def tune(peaks: Peaks, device: torch.device, timings: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The table "linear" of this device for all `MODELS`: the fastest right candidate for each layer and row bucket.

    The library stays where nothing beats it by more than 2 %, and a bucket keeps its smaller neighbour's configuration
    where that is within 1 %. `timings` receives every measurement.
    """
    layers = {f"{layer.kind} {layer.n_size}x{layer.k_size}": layer for model in MODELS for layer in layers_of(model)}
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
    return f"{layer.kind} {layer.kind != 'add'} {width} {layer.k_size % tiles.block_k == 0} {tiles}"


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
    norm_weight = x[0] if layer.kind != "add" else None
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
    table = {"linear": tune(peaks, device, timings)}
    path.write_text(json.dumps(table, indent=1) + "\n")
    path.with_suffix(".timings.jsonl").write_text("\n".join(map(json.dumps, timings)) + "\n")
    compare_deterministic(device)
    print(f"tuned in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
