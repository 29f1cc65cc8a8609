"""`manta bench all-reduce`: sums over this machine's GPUs, our one-shot kernel beside NCCL. Knows no model, no Ray.

One process a GPU; all go through the same calls. Times are of calls that follow one another on a stream, in a captured
graph and launched one by one, with CUDA events; the slowest rank's count. Before it is timed, every size's sum is
compared with the reference, and between the ranks bit for bit. What is found can be entered into the device's table.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.hardware import all_reduce_s, hardware_of
from manta.engine.parallel.member import GangMember, listen_for_store, new_gang_id
from manta.engine.parallel.place import RankPlace

from .all_reduce_rank import HOST, ON_CPU, Sizes, run_rank, tile_names
from .report import Report, sayer

Say = Callable[[str], None]

WAIT_S = 90.0
"""For a rank's answer: kernels compile, and NCCL connects."""


Times = dict[str, dict[int, float]]
"""Seconds of a call by what was called, such as "nccl graph", and bytes."""


def run(
    *,
    num_gpus: int | None = None,
    json_path: Path | None = None,
    table: Path | None = None,
    sizes: Sizes | None = None,
    on_cpu: bool = False,
    console: Console | None = None,
) -> Report:
    """Measure on `num_gpus` GPUs (None: all), or on processes of the CPU (for tests). `table`: where to enter what was
    found for so many GPUs. Raises ConfigError, or EngineFailed when a rank fails or a sum is wrong."""
    num_ranks = _num_ranks(num_gpus, on_cpu)
    sizes = sizes or (ON_CPU if on_cpu else Sizes())
    say = sayer(console)
    times: Times = {}
    about, failure = "", None
    try:
        about = _measure(num_ranks, sizes, on_cpu, say, times)
    except EngineFailed as error:  # what was measured before is in the file
        failure = error
    figures = {
        f"{what.replace(' ', '_')}_{_size_name(size)}_us": seconds * 1e6
        for what, by_size in times.items()
        for size, seconds in by_size.items()
    }
    entry = None
    if not on_cpu and failure is None:
        entry = table_entry(times, asdict_of_tiles=tile_names())
        figures["one_shot_max_bytes"] = float(entry["one_shot_max_bytes"])
        figures |= _link_figures(times, entry, num_ranks, about)
    report = Report(
        "all-reduce",
        model={"num_ranks": num_ranks, "device": about, "dtype": sizes.dtype},
        workload=asdict(sizes),
        figures=figures,
        details={
            "table_entry": entry,
            "checked": "before it is timed, each sum equals the reference's, with the same bits on every rank",
            "failure": None if failure is None else str(failure),
        },
    )
    if table is not None and entry is not None:
        write_entry(table, num_ranks, entry)
    report.finish(console, json_path)
    if failure is not None:
        raise failure
    return report


def table_entry(times: Mapping[str, Mapping[int, float]], *, asdict_of_tiles: Mapping[str, Any]) -> dict[str, Any]:
    """What kernels/all_reduce reads: the tiles that are fastest on the whole in graphs, and up to which size they are
    ahead of NCCL, from the smallest size on."""
    nccl = times["nccl graph"]
    usual = next(iter(asdict_of_tiles))
    if f"{usual} graph" not in times:  # the GPUs cannot read each other's memory
        return {"tiles": asdict_of_tiles[usual], "one_shot_max_bytes": 0}
    shared = set(nccl)
    for name in asdict_of_tiles:
        shared &= set(times[f"{name} graph"])
    best = min(asdict_of_tiles, key=lambda name: sum(times[f"{name} graph"][size] / nccl[size] for size in shared))
    most = 0
    for size in sorted(set(times[f"{best} graph"]) & set(nccl)):
        if times[f"{best} graph"][size] >= nccl[size]:
            break
        most = size
    return {"tiles": asdict_of_tiles[best], "one_shot_max_bytes": most}


def write_entry(path: Path, num_ranks: int, entry: Mapping[str, Any]) -> None:
    """Into a file of the device's tables, beside what is there."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    tables["all_reduce"] = tables.get("all_reduce", {}) | {str(num_ranks): entry}
    path.write_text(json.dumps(tables, indent=1) + "\n")


def _num_ranks(num_gpus: int | None, on_cpu: bool) -> int:
    if on_cpu:
        return num_gpus or 2
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = num_gpus or found
    if wanted < 2 or wanted > found:
        raise ConfigError(f"{max(wanted, 2)} GPUs of one machine are needed to sum over them, and torch sees {found}")
    return wanted


def _measure(num_ranks: int, sizes: Sizes, on_cpu: bool, say: Say, times: Times) -> str:
    """Enters the slowest rank's times. Returns the device's name."""
    context = multiprocessing.get_context("spawn")
    gang_id = new_gang_id()
    pipes, processes = [], []
    with closing(listen_for_store(HOST)) as listener:
        port = listener.getsockname()[1]  # freed for rank 0, which listens at it
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        member = GangMember(RankPlace(rank, num_ranks), HOST, port, (HOST,) * num_ranks, gang_id)
        process = context.Process(target=run_rank, args=(theirs, member, sizes, on_cpu), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, say, times)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: Sequence[Any], say: Say, times: Times) -> str:
    while True:
        messages = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(WAIT_S):
                raise EngineFailed(f"Rank {rank} of the benchmark said nothing for {WAIT_S:.0f} s.")
            try:
                messages.append(pipe.recv())
            except EOFError:
                raise EngineFailed(f"Rank {rank} of the benchmark ended; its messages above say why.") from None
            if isinstance(messages[-1], Exception):
                raise EngineFailed(f"Rank {rank} of the benchmark failed: {messages[-1]}")
        if isinstance(messages[0], str):
            return messages[0]
        what, size, _ = messages[0]
        slowest = max(seconds for _, _, seconds in messages)
        times.setdefault(what, {})[size] = slowest
        say(f"{what}: {_size_name(size)} in {slowest * 1e6:.1f} us")


def _link_figures(times: Times, entry: Mapping[str, Any], num_ranks: int, device: str) -> dict[str, float]:
    """Latency and rate of the way that sums take in graphs, as engine/hardware.Link has them, and how far the model's
    own are off."""
    name = next(name for name, tiles in tile_names().items() if tiles == entry["tiles"])
    ours = {size: s for size, s in times.get(f"{name} graph", {}).items() if size <= entry["one_shot_max_bytes"]}
    taken = times["nccl graph"] | ours
    passes = 2 * (num_ranks - 1) / num_ranks
    smallest, largest = min(taken), max(taken)
    rate = (largest - smallest) * passes / (taken[largest] - taken[smallest])
    figures = {"link_latency_us": (taken[smallest] - smallest * passes / rate) * 1e6, "link_gb_per_s": rate / 1e9}
    hardware = hardware_of(device)
    if hardware is not None:
        for size, seconds in taken.items():
            predicted = all_reduce_s(size, num_ranks, hardware.link)
            figures[f"predicted_{_size_name(size)}_ratio_to_measured"] = predicted / seconds
    return figures


def _size_name(num_bytes: int) -> str:
    return f"{num_bytes >> 20}mib" if num_bytes >= 1 << 20 else f"{num_bytes >> 10}kib"
