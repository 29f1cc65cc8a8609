"""Captures work as CUDA graphs that share one memory pool. Knows nothing of the work.

A replay costs the host some microseconds whatever it launches. Graphs of one pool may overwrite each other's outputs:
they are replayed one after the other on one stream, and outputs are read on it before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class CapturedWork(Generic[T]):
    """A graph and what the captured call returned: tensors at a fixed place."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> T:
        self._graph.replay()
        return self._outputs


class GraphCapture:
    """Captures on the current stream, which must not be the default one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], T]) -> CapturedWork[T]:
        """Run `work` once, so that its kernels are compiled and libraries have their buffers, and capture a second run.

        `work` must only launch kernels: no wait, no copy to pageable memory.
        """
        work()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; this one may not wait for it.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = work()
        finally:
            graph.capture_end()
        return CapturedWork(graph, outputs)
