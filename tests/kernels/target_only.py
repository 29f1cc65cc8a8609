"""A driver without a device, which knows what it compiles for: launchers then bind and compile, and cannot launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from manta.kernels import runtime as runtime  # settles what Triton asks for at a first compilation


class TargetOnly:
    """What binding and compiling ask of Triton's driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def target_only() -> Iterator[None]:
    before = driver._active
    driver.set_active(TargetOnly())  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled (or taken from the cache on disk) meanwhile, in order of their ends."""
    names: list[str] = []

    def note(*, fn: Any, **others: Any) -> None:
        names.append(fn.name.split(".")[-1])

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
