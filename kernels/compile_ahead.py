"""Compiles the kernels that a piece of work would launch, many at once, and launches none. Knows no kernel.

Most of a compilation runs outside Python's lock (the compiler's passes, the assembler), so threads help. What launches
a kernel is built there, too: up to 3.6, Triton has the C compiler make a module for each when it is first launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only(num_threads: int) -> Iterator[None]:
    """Inside, a launch of a kernel only orders its compilation; all orders are done when the block ends.

    What the kernels would have written stays as it was: the work may use it as numbers, not as places. For one thread
    at a time, while no other launches kernels. Raises what a compilation raises.
    """
    launch: Any = JITFunction.run

    def order(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with _Compilers(num_threads, thread_name_prefix="manta-compile") as pool:
        JITFunction.run = order
        try:
            with AsyncCompileMode(pool):
                yield
        finally:
            JITFunction.run = launch


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel and then build its launcher, which Triton keeps in its cache as well."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_build() -> Any:
            kernel = fn(*args, **kwargs)
            launcher = getattr(driver.active, "launcher_cls", None)  # a mere target has none
            if launcher is not None:
                launcher(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compile_and_build)
