"""A rank of the one-shot all-reduce as a process of its own, under the interpreter: whole launches, over a shared file.

`python -m tests.kernels.sum_process RANK NUM_RANKS FILE`; ends with an error when a sum is wrong.
"""

from __future__ import annotations

import random
import sys

import torch

from manta.kernels import runtime
from manta.kernels.all_reduce import Arenas, SumTiles, all_reduce, all_reduce_reference, arena_bytes

TILES = SumTiles(programs=2, block=64, num_warps=4)
SLOT_BYTES = 2048
NUM_SUMS = 40


def file_words(num_ranks: int) -> int:
    """int32 words of the shared file: every rank's arena."""
    return num_ranks * arena_bytes(num_ranks, SLOT_BYTES, TILES) // 4


def main(rank: int, num_ranks: int, path: str) -> None:
    """All ranks draw the same parts, so that each knows every sum."""
    assert runtime.INTERPRETED, "this is for the interpreter"
    words = torch.from_file(path, shared=True, size=file_words(num_ranks), dtype=torch.int32)
    arenas = words.view(num_ranks, -1)
    table = torch.tensor([arena.data_ptr() for arena in arenas], dtype=torch.int64)
    own = Arenas(rank, table, torch.zeros(TILES.programs, dtype=torch.int32), SLOT_BYTES, TILES)
    sizes = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for number in range(NUM_SUMS):
        size = sizes.randint(1, SLOT_BYTES // 4)
        parts = [torch.randn(size, generator=generator) for _ in range(num_ranks)]
        found = parts[rank].clone()
        all_reduce(found, own)
        assert torch.equal(found, all_reduce_reference(parts)), f"sum {number} of {size} elements"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
