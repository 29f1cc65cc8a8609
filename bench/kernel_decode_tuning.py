"""Finds the configurations of decode attention on this GPU. Knows which are worth a try and which batches matter."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from manta.kernels import decode_schedule
from manta.kernels.decode_schedule import DecodeConfig, DecodeShape, PrefixTiles

from .kernel_decode import OWN_TOKENS, DecodeBatch, make_batch, mixed_lengths
from .kernel_timing import LLAMA_8B, MODELS, RANKS_OF_TWO, ModelShape, Peaks, time_us

COMPILERS = 12
"""Processes that compile candidates before any is timed."""
MAX_ERROR = 2e-2
"""Between results of two configurations in bfloat16; outputs are of order one or smaller."""

TILES = (
    # tile, warps, stages, swapped, inline_ptx
    (64, 4, 3, False, False), (64, 4, 5, False, False), (64, 4, 2, False, True), (64, 4, 3, False, True),
    (64, 4, 4, False, True), (64, 4, 2, True, True), (64, 4, 3, True, True), (64, 4, 3, True, False),
    (64, 2, 3, False, False), (32, 2, 5, False, False), (32, 4, 5, False, False),
)  # fmt: skip
TILES_OVER_CODES = (
    *TILES, (64, 8, 3, False, False), (64, 8, 5, False, False), (32, 4, 3, False, False),
)  # fmt: skip
"""Unpacked codes take registers: tiles that leave more programs on a multiprocessor."""
CUTS = (
    # least spare parts over all KV heads, spare parts a hundred rows
    (1, 34), (1, 67), (1, 100), (66, 67), (132, 67), (132, 200), (264, 67), (264, 200), (264, 400),
)  # fmt: skip
PREFIX_TILES = (
    PrefixTiles(64, 64, 4, 3), PrefixTiles(64, 64, 4, 2), PrefixTiles(64, 128, 4, 3), PrefixTiles(128, 64, 8, 3),
    PrefixTiles(128, 128, 8, 2), PrefixTiles(128, 64, 4, 3),
)  # fmt: skip
SHARED = ((64, 4096), (32, 8192))
"""Rows that all share a prefix, and its tokens."""
NUM_FINALISTS = 2
"""Tiles that are timed with every cut."""
SMALL_BATCH = 264
"""Programs, one a row and KV head, up to which a batch is cut to fill the device."""


def cases() -> dict[int, list[list[int]]]:
    """Padded rows -> the batches that their configuration is judged by; the last one's serves larger batches too."""
    return {
        1: [[1024], [32768]],
        4: [[1024] * 4, [8192] * 4],
        8: [[1024] * 8, [8192] * 8],
        16: [[1024] * 16],
        32: [[1024] * 32, mixed_lengths(32)],
        64: [[576] * 64, [1024] * 64, mixed_lengths(64)],
        128: [[576] * 128, [1024] * 128, mixed_lengths(128)],
        256: [[576] * 256, [1024] * 256, mixed_lengths(256)],
        1024: [[600] * 1024, mixed_lengths(1024)],
    }


def tune(peaks: Peaks, device: torch.device) -> dict[str, Any]:
    """`tune_models` for all `MODELS`."""
    return tune_models(MODELS, peaks, device)


def tune_ranks(peaks: Peaks, device: torch.device) -> dict[str, Any]:
    """The same for ranks that share layers."""
    return tune_models(RANKS_OF_TWO, peaks, device)


def tune_codes(peaks: Peaks, device: torch.device) -> dict[str, Any]:
    """The same over a cache in 8 bits, for one model."""
    return tune_models((LLAMA_8B,), peaks, device, codes=torch.float8_e4m3fn)


def tune_models(
    models: Sequence[ModelShape], peaks: Peaks, device: torch.device, *, codes: torch.dtype | None = None
) -> dict[str, Any]:
    """Per shape a list of entries with `rows`, the most that it is for, and the shares of the floor that it reached.

    `codes`: the type of a cache in 8 bits.
    """
    compile_ahead(models, codes)
    found: dict[str, Any] = {}
    for model in models:
        entries: list[dict[str, Any]] = []
        for num_seqs, all_lengths in cases().items():
            batches = [make_batch(model, lengths, device, codes=codes) for lengths in all_lengths]
            config, shares = _best(peaks, model, num_seqs, batches)
            entries.append({"rows": num_seqs, **_compact(config), "shares": [round(share, 3) for share in shares]})
            print(f"{model.name} {entries[-1]}", flush=True)
        del entries[-1]["rows"]
        found[shape_of(model, codes).key] = entries
    return found


def _compact(config: DecodeConfig) -> dict[str, Any]:
    """What differs from a field's default."""
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {name: value for name, (value, default) in values.items() if value is not default}


def _best(
    peaks: Peaks, model: ModelShape, num_seqs: int, batches: list[DecodeBatch]
) -> tuple[DecodeConfig, list[float]]:
    """The configuration with the highest geometric mean of the batches' shares of the floor, and these shares."""
    shares: dict[DecodeConfig, list[float]] = {}
    expected = [batch.calls()[0]().clone() for batch in batches]

    def measure(config: DecodeConfig) -> None:
        if config in shares:
            return
        with forced(config):
            roomy = [replace(batch, workspace=workspace_for(batch)) for batch in batches]
            for batch, right in zip(roomy, expected, strict=True):
                result = batch.calls()[0]()
                if not float((result - right).abs().max()) < MAX_ERROR:
                    print(f"WRONG {model.name} {num_seqs} rows: {config}", flush=True)
                    return
            times = [time_us(batch.calls()) for batch in roomy]
        floors = [batch.read_bytes / peaks.read_bytes_per_s * 1e6 for batch in batches]
        shares[config] = [floor / time for floor, time in zip(floors, times, strict=True)]

    def ranked() -> list[DecodeConfig]:
        return sorted(shares, key=lambda config: -sum(map(math.log, shares[config])))

    has_codes = batches[0].scales is not None
    start = decode_schedule.default_config(num_seqs, shape_of(model), 132)
    for config in candidates(start, has_codes):
        measure(config)
    is_small = num_seqs * model.kv_heads <= SMALL_BATCH
    for tiles in ranked()[:NUM_FINALISTS]:
        for least, percent in CUTS:
            if is_small == (least > 1) or percent == 67:
                measure(replace(tiles, fill=max(1, least // model.kv_heads), percent=percent))
    for config in ranked()[:NUM_FINALISTS]:
        measure(replace(config, merges_apart=not config.merges_apart))
    best = ranked()[0]
    return best, shares[best]


def candidates(start: DecodeConfig, has_codes: bool) -> list[DecodeConfig]:
    """`start` with all tiles."""
    names = ("tile", "num_warps", "num_stages", "swapped", "inline_ptx")
    tried = TILES_OVER_CODES if has_codes else TILES
    return [replace(start, **dict(zip(names, tiles, strict=True))) for tiles in tried]


def tune_shared_prefix(peaks: Peaks, device: torch.device) -> dict[str, Any]:
    """Per shape the tiles with the least time over two batches, relative to the best of each."""
    del peaks
    found: dict[str, Any] = {}
    for model in MODELS:
        batches = [
            make_batch(model, [num_shared + OWN_TOKENS] * rows, device, num_members=rows, num_shared=num_shared)
            for rows, num_shared in SHARED
        ]
        expected = [batch.calls()[0]().clone() for batch in batches]
        times: dict[PrefixTiles, list[float]] = {}
        for tiles in PREFIX_TILES:
            with forced_prefix(tiles):
                roomy = [replace(batch, workspace=workspace_for(batch)) for batch in batches]
                results = [batch.shared_calls()[0]() for batch in roomy]
                errors = [float((result - right).abs().max()) for result, right in zip(results, expected, strict=True)]
                if not max(errors) < MAX_ERROR:
                    print(f"WRONG {model.name} {tiles}: {errors}", flush=True)
                    continue
                times[tiles] = [time_us(batch.shared_calls()) for batch in roomy]
                print(f"{model.name} {tiles} {times[tiles]}", flush=True)
        best = min(times, key=lambda tiles: sum(map(math.log, times[tiles])))
        found[shape_of(model).key] = asdict(best)
    return found


def workspace_for(batch: DecodeBatch) -> decode_schedule.DecodeWorkspace:
    return decode_schedule.DecodeWorkspace.allocate(
        max_num_seqs=len(batch.q),
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.caches.shape[3],
        head_dim=batch.q.shape[2],
        device=batch.q.device,
    )


def shape_of(model: ModelShape, codes: torch.dtype | None = None) -> DecodeShape:
    group = model.heads // model.kv_heads
    return DecodeShape(model.kv_heads, group, model.dim, 2, model.page, has_codes=codes is not None)


@contextmanager
def forced(config: DecodeConfig) -> Iterator[None]:
    """All launches take this configuration."""
    usual = decode_schedule.decode_config
    decode_schedule.decode_config = lambda *_: config
    try:
        yield
    finally:
        decode_schedule.decode_config = usual


@contextmanager
def forced_prefix(tiles: PrefixTiles) -> Iterator[None]:
    """All passes over a shared prefix take these tiles."""
    usual = decode_schedule.prefix_tiles
    decode_schedule.prefix_tiles = lambda *_: tiles
    try:
        yield
    finally:
        decode_schedule.prefix_tiles = usual


def compile_ahead(models: Sequence[ModelShape], codes: torch.dtype | None) -> None:
    """Fill Triton's cache from many processes with all that tuning may time."""
    jobs: dict[tuple[Any, ...], tuple[ModelShape, int, DecodeConfig, torch.dtype | None]] = {}
    for model in models:
        for num_seqs in cases():
            start = decode_schedule.default_config(num_seqs, shape_of(model), 132)
            for merges_apart in (False, True):
                for config in candidates(replace(start, merges_apart=merges_apart), codes is not None):
                    code = (model.name, decode_schedule.block_seqs(num_seqs), replace(config, fill=0, percent=0))
                    jobs.setdefault(code, (model, num_seqs, config, codes))
    begin = time.monotonic()
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = [error for error in pool.map(_compile_one, jobs.values(), chunksize=4) if error is not None]
    print(f"{len(jobs)} variants compiled in {time.monotonic() - begin:.0f} s", *errors, sep="\n", flush=True)


def _compile_one(job: tuple[ModelShape, int, DecodeConfig, torch.dtype | None]) -> str | None:
    """Run one candidate once; what went wrong, or None. An error must not end the tuning of all others."""
    model, num_seqs, config, codes = job
    device = torch.device("cuda")
    try:
        with forced(config):
            batch = make_batch(model, [1] * num_seqs, device, rotations=1, codes=codes)
            batch.calls()[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAILED {model.name} {num_seqs} {config}: {type(error).__name__}: {error}"[:300]
    return None
