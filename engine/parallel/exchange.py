"""The collectives that ranks use, over one process group of torch.distributed. Knows no places, no model, no plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import distributed

Backend = Literal["nccl", "gloo"]


class Exchange:
    """One process group and the device of its tensors; on CUDA without NCCL they are staged through the host.

    NCCL's collectives run on the current stream, so that a graph which captures them has no forks.
    """

    def __init__(self, group: Any, device: torch.device, backend: Backend) -> None:
        self._group = group
        self._is_staged = device.type == "cuda" and backend == "gloo"

    def all_reduce_(self, x: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        self._reduce(x, distributed.ReduceOp.SUM)

    def minimum_(self, x: torch.Tensor) -> None:
        """The least over all ranks, in place."""
        self._reduce(x, distributed.ReduceOp.MIN)

    def maximum_(self, x: torch.Tensor) -> None:
        """The largest over all ranks, in place."""
        self._reduce(x, distributed.ReduceOp.MAX)

    def broadcast_(self, x: torch.Tensor, source: int) -> None:
        """That of rank `source`, in place."""
        held = self._staged(x)
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = source, 0, False
        _wait(self._group.broadcast([held], options))
        self._give_back(held, x)

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """All ranks' tensors, of one size, on rank 0; None elsewhere."""
        held = self._staged(x)
        is_root = self._group.rank() == 0
        found = [torch.empty_like(held) for _ in range(self._group.size())] if is_root else []
        options = distributed.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        _wait(self._group.gather([found] if is_root else [], [held], options))
        if not is_root:
            return None
        return [part.to(x.device) for part in found] if self._is_staged else found

    def start_send(self, x: torch.Tensor, rank: int, *, tag: int = 0) -> Callable[[], None]:
        """Returns what waits for the end."""
        held = self._staged(x.contiguous())
        work = self._group.send([held], rank, tag)

        def wait(held: torch.Tensor = held) -> None:  # keeps the memory until then
            work.wait()

        return wait

    def receive_(self, x: torch.Tensor, rank: int, *, tag: int = 0) -> None:
        """Fill `x`."""
        held = self._staged(x, copy=False)
        self._group.recv([held], rank, tag).wait()
        self._give_back(held, x)

    def _reduce(self, x: torch.Tensor, operation: Any) -> None:
        held = self._staged(x)
        options = distributed.AllreduceOptions()
        options.reduceOp, options.asyncOp = operation, False
        _wait(self._group.allreduce([held], options))
        self._give_back(held, x)

    def _staged(self, x: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
        if not self._is_staged:
            return x
        return x.cpu() if copy else torch.empty(x.shape, dtype=x.dtype)

    def _give_back(self, held: torch.Tensor, x: torch.Tensor) -> None:
        if self._is_staged:
            x.copy_(held)


def _wait(work: Any) -> None:
    """For a collective; None is one that runs on the current stream."""
    if work is not None:
        work.wait()
