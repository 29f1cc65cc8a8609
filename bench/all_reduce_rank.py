"""What each rank of `manta bench all-reduce` does, in a process of its own: checks and times sums. Knows no report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from manta.engine.errors import EngineFailed
from manta.engine.parallel.member import GangMember

if TYPE_CHECKING:
    import torch

    from manta.kernels.all_reduce import SumTiles

HOST = "127.0.0.1"


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


def tile_names() -> dict[str, Any]:
    """The one-shot kernel's variants by name: the usual one first."""
    from manta.kernels.all_reduce import SumTiles

    usual = {"one_shot": asdict(SumTiles())}
    return usual | {f"one_shot_p{p}_b{b}_w{w}": asdict(SumTiles(p, b, w)) for p, b, w in CANDIDATES}


def run_rank(pipe: Any, member: GangMember, sizes: Sizes, on_cpu: bool) -> None:
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
