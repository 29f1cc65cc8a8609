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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from manta.engine.errors import ConfigError, EngineFailed
from manta.engine.hardware import all_reduce_s, hardware_of
from manta.engine.parallel.member import GangMember, listen_for_store, new_gang_id
from manta.engine.parallel.place import RankPlace

from .report import Report, sayer

if TYPE_CHECKING:
    import torch

    from manta.kernels.all_reduce import SumTiles

Say = Callable[[str], None]

HOST = "127.0.0.1"
WAIT_S = 90.0
"""For a rank's answer: kernels compile, and NCCL connects."""


@dataclass(frozen=True)
class Sizes:
    """Bytes, and calls a measurement."""

    num_bytes: tuple[int, ...] = tuple(1 << power for power in range(13, 27))
    one_shot_max_bytes: int = 64 << 20
    candidates_max_bytes: int = 1 << 20
    """Other tiles than the usual ones are tried up to here."""
    dtype: str = "bfloat16"
    num_calls: int = 20
    """In a graph, and between two events."""
    repeats: int = 7


ON_CPU = Sizes(num_bytes=(1 << 13, 1 << 15), dtype="float32", num_calls=3, repeats=2)
"""Shared memory beside gloo: it shows that the benchmark works, and nothing about GPUs."""

CANDIDATES = ((32, 2048, 4), (128, 2048, 4), (128, 4096, 8), (64, 8192, 16))
"""Programs, block and warps beside the usual ones."""

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


def tile_names() -> dict[str, Any]:
    """The one-shot kernel's variants by name: the usual one first."""
    from manta.kernels.all_reduce import SumTiles

    usual = {"one_shot": asdict(SumTiles())}
    return usual | {f"one_shot_p{p}_b{b}_w{w}": asdict(SumTiles(p, b, w)) for p, b, w in CANDIDATES}


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
        process = context.Process(target=_rank, args=(theirs, member, sizes, on_cpu), daemon=True)
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


def _rank(pipe: Any, member: GangMember, sizes: Sizes, on_cpu: bool) -> None:
    """A rank's process: (what, bytes, seconds) for each measurement, the device's name at the end."""
    try:
        import torch

        from manta.engine.parallel.rank import open_store

        device = torch.device("cpu") if on_cpu else torch.device("cuda", member.place.rank)
        if not on_cpu:
            torch.cuda.set_device(device)
        bench = _RankBench(member, open_store(member), device, sizes, pipe.send)
        with torch.inference_mode():
            bench.run()
        pipe.send(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    except Exception as error:
        pipe.send(EngineFailed(f"{type(error).__name__}: {error}"))
        raise


class _RankBench:
    """What every rank does, in the same order."""

    def __init__(
        self, member: GangMember, store: Any, device: torch.device, sizes: Sizes, tell: Callable[[Any], None]
    ) -> None:
        from manta.engine.parallel.groups import join_groups

        self._place, self._store, self._device, self._sizes, self._tell = member.place, store, device, sizes, tell
        self._groups = join_groups(member.place, store, device=device, address=HOST)
        assert self._groups.tensor is not None
        self._library: Callable[[torch.Tensor], None] = self._groups.tensor._exchange.all_reduce_
        self._stream = None

    def run(self) -> None:
        import torch

        from manta.kernels.all_reduce import SumTiles

        sizes = self._sizes
        if self._device.type == "cpu":
            assert self._groups.tensor is not None
            self._sweep("shared memory", self._groups.tensor._all_reduce, sizes.num_bytes)
            self._sweep("gloo", self._library, sizes.num_bytes)
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # captures need one of their own
            self._sweep("nccl", self._library, sizes.num_bytes)
            for number, (name, tiles) in enumerate(tile_names().items()):
                if not self._one_shot(name, number, SumTiles(**tiles)):
                    break
        self._groups.abort()

    def _one_shot(self, name: str, number: int, tiles: SumTiles) -> bool:
        """Whether the ranks could open each other's memory."""
        import torch
        from torch._C._distributed_c10d import PrefixStore

        from manta.engine.parallel.one_shot import open_one_shot

        sizes = self._sizes
        most = sizes.candidates_max_bytes if number else sizes.one_shot_max_bytes
        store = PrefixStore(f"bench/{number}", self._store)
        place = self._place
        one_shot = open_one_shot(place.rank, place.world_size, store, self._device, max_bytes=most, tiles=tiles)
        if one_shot is None:  # a warning says why
            return False
        fitting = [size for size in sizes.num_bytes if size <= most]
        self._sweep(name, one_shot, fitting)
        if not number:  # with the residual that the decoder adds behind each sum, beside what it does without us
            residual = torch.zeros(max(fitting), dtype=torch.uint8, device=self._device)

            def ours(x: torch.Tensor) -> None:
                one_shot(x, residual[: x.numel() * x.element_size()].view(x.dtype))

            def theirs(x: torch.Tensor) -> None:
                self._library(x)
                residual[: x.numel() * x.element_size()].view(x.dtype).add_(x)

            few = [size for size in fitting if size <= sizes.candidates_max_bytes]
            self._sweep("one_shot_add", ours, few, checks=False)
            self._sweep("nccl_add", theirs, few, checks=False)
        self._meet()
        one_shot.close()
        self._meet()
        return True

    def _sweep(
        self, what: str, call: Callable[[torch.Tensor], None], sizes: Sequence[int], *, checks: bool = True
    ) -> None:
        import torch

        dtype: torch.dtype = getattr(torch, self._sizes.dtype)
        for size in sizes:
            x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=self._device)
            if checks:
                self._check(what, call, x)
            x.zero_()
            for name, seconds in self._times(call, x):
                self._tell((f"{what}{name}", size, seconds))

    def _check(self, what: str, call: Callable[[torch.Tensor], None], x: torch.Tensor) -> None:
        """Sums in a row, which use both slots: as the reference has them, with the same bits on every rank."""
        import torch

        from manta.kernels.all_reduce import all_reduce_reference

        generator = torch.Generator().manual_seed(x.numel())
        for _ in range(3 if x.numel() <= 1 << 19 else 1):  # the host's part takes long
            parts = [torch.randn(x.numel(), generator=generator).to(x.dtype) for _ in range(self._place.world_size)]
            x.copy_(parts[self._place.rank])
            call(x)
            found = x.cpu()
            tolerance = 0.0 if what.startswith("one_shot") else 0.05
            torch.testing.assert_close(found, all_reduce_reference(parts), rtol=tolerance, atol=tolerance)
            words = found.view(torch.int16).to(torch.int64)
            digest = int((words * (torch.arange(len(words)) % 8191 + 1)).sum())
            group = self._groups
            if group.smallest([digest, -digest]) != [digest, -digest]:
                raise EngineFailed(f"{what} of {x.numel()} elements gives ranks different bits")

    def _times(self, call: Callable[[torch.Tensor], None], x: torch.Tensor) -> list[tuple[str, float]]:
        """Median seconds of a call, launched one by one and in a graph."""
        import time

        import torch

        count = self._sizes.num_calls

        def calls() -> None:
            for _ in range(count):
                call(x)

        if self._device.type == "cpu":
            begin_s = time.monotonic()
            calls()
            return [(" eager", (time.monotonic() - begin_s) / count)]
        from manta.engine.cuda_graphs import GraphCapture

        graph = GraphCapture().capture(calls)
        found = []
        for name, work in ((" eager", calls), (" graph", graph.replay)):
            seconds = []
            for _ in range(self._sizes.repeats):
                begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.current_stream().synchronize()
                self._meet()
                call(x)  # all ranks begin together behind it
                begun.record()
                work()
                done.record()
                done.synchronize()
                seconds.append(begun.elapsed_time(done) / 1e3 / count)
            found.append((name, sorted(seconds)[len(seconds) // 2]))
        return found

    def _meet(self) -> None:
        assert self._groups.everyone is not None
        self._groups.everyone.barrier()


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
