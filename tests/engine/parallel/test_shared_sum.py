"""Sums through shared memory: right, the same bits everywhere, however large, and over when a rank's process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from manta.engine.parallel.shared_sum import SharedSum


def on_threads(size: int, work: Callable[[int, SharedSum], torch.Tensor], **sizes: int) -> list[torch.Tensor]:
    store = HashStore()
    found: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        shared = SharedSum(rank, size, store, **sizes)
        found[rank] = work(rank, shared)
        shared.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_have_the_same_bits_on_all_ranks(size: int, dtype: torch.dtype):
    parts = torch.randn(20, size, 7, 33).to(dtype)

    def work(rank: int, shared: SharedSum) -> torch.Tensor:
        sums = parts[:, rank].clone()
        for x in sums:
            shared(x)
        return sums

    first, *others = on_threads(size, work)
    for other in others:
        assert torch.equal(other, first)
    wide = parts.double().sum(1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-5}[dtype]
    torch.testing.assert_close(first.double(), wide, rtol=1e-2, atol=tolerance)


def test_large_tensors_are_summed_in_pieces():
    parts = torch.randn(3, 50, 41)

    def work(rank: int, shared: SharedSum) -> torch.Tensor:
        x = parts[rank].clone()
        shared(x)
        return x

    for found in on_threads(3, work, slot_bytes=256):
        torch.testing.assert_close(found, parts.sum(0))


def test_counts_may_wrap_around():
    are_set = threading.Barrier(2)

    def work(rank: int, shared: SharedSum) -> torch.Tensor:
        shared._count = shared._counts[rank].value = 2**32 - 3  # as after so many sums
        are_set.wait()
        sums = torch.full((6, 4), float(rank + 1))
        for x in sums:
            shared(x)
        return sums

    for found in on_threads(2, work):
        assert torch.equal(found, torch.full((6, 4), 3.0))


OTHER_PROCESS = """
import sys
import torch
from torch.distributed import TCPStore
from manta.engine.parallel.shared_sum import SharedSum
shared = SharedSum(1, 2, TCPStore("127.0.0.1", int(sys.argv[1]), 2, False))
x = torch.tensor([10.0, 20.0])
shared(x)
assert x.tolist() == [11.0, 22.0], x
"""


def test_ranks_of_other_processes_take_part_and_are_missed_when_they_end():
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    other = subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, str(store.port)])
    try:
        shared = SharedSum(0, 2, store)
        x = torch.tensor([1.0, 2.0])
        shared(x)
        assert x.tolist() == [11.0, 22.0]
        with pytest.raises(RuntimeError, match="process of rank 1 of this stage has ended"):
            shared(x)
        assert other.wait(30) == 0
        shared.close()
    finally:
        other.kill()
        other.wait()
