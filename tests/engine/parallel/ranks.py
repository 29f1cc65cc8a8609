"""Ranks as threads of one process, over gloo: what each of them returns, and the first error of any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed import HashStore

from manta.engine.parallel.groups import Groups, join_groups
from manta.engine.parallel.place import RankPlace

T = TypeVar("T")
TIMEOUT_S = 120.0


def on_ranks(
    work: Callable[[RankPlace, Groups], T],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    device: torch.device | None = None,
    is_one_node: bool = True,
) -> list[T]:
    """Call `work` on every rank at once. Returns the results by rank; raises the error of the lowest that failed."""
    store = HashStore()
    found: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    ended = threading.Condition()

    def run(rank: int) -> None:
        place = RankPlace(rank, tp_size, pp_size)
        try:
            address = "127.0.0.1" if is_one_node else f"127.0.0.{rank + 1}"
            groups = join_groups(place, store, device=device or torch.device("cpu"), address=address)
            result, error = {rank: work(place, groups)}, {}
        except BaseException as raised:
            result, error = {}, {rank: raised}
        with ended:
            found.update(result)
            errors.update(error)
            ended.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(tp_size * pp_size)]
    for thread in threads:
        thread.start()
    with ended:  # ranks that wait for one that failed would wait for long
        ended.wait_for(lambda: errors or len(found) == len(threads), TIMEOUT_S)
    if errors:
        raise errors[min(errors)]
    assert len(found) == len(threads), f"ranks {sorted(set(range(len(threads))) - set(found))} did not end"
    return [found[rank] for rank in range(len(threads))]
