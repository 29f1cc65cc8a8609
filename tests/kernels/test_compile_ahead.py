"""Kernels ordered ahead of their launches: compiled once, launched by nobody. On a driver that has a target only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from manta.kernels.compile_ahead import compiling_only
from tests.kernels.target_only import count_compilations, target_only

pytestmark = pytest.mark.aot


@triton.jit
def _scale_kernel(x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask) * factor, mask=mask)


@triton.jit
def _wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))


@pytest.fixture(autouse=True)
def driver(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with target_only():
        yield


def launch(count: int, *, block: int = 64) -> torch.Tensor:
    x, out = torch.ones(count), torch.full((count,), -1.0)
    _scale_kernel[(1,)](x, out, count, 2.0, BLOCK=block)
    return out


def test_launches_become_orders_and_nothing_runs() -> None:
    run = JITFunction.run
    with count_compilations() as compiled, compiling_only(2):
        for block in (64, 128, 64, 256):
            assert torch.equal(launch(100, block=block), torch.full((100,), -1.0))
    assert JITFunction.run is run
    assert compiled == ["_scale_kernel"] * 3
    with count_compilations() as again, compiling_only(1):
        launch(100, block=128)
    assert again == []
    kernels = [kernel for cache in _scale_kernel.device_caches.values() for kernel in cache[0].values()]
    assert len(kernels) == 3
    assert all("cubin" in kernel.asm for kernel in kernels)


def test_what_a_compilation_raises_is_raised_and_launches_are_launches_again() -> None:
    run = JITFunction.run
    with pytest.raises(triton.CompilationError), compiling_only(2):
        _wrong_kernel[(1,)](torch.zeros(64), BLOCK=64)
    assert JITFunction.run is run
    with compiling_only(1):  # the mode can be entered again
        launch(100)


def test_what_launches_a_kernel_is_built_by_the_threads_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str]] = []

    def launcher(source: Any, metadata: Any) -> None:
        built.append((metadata.name, threading.current_thread().name))

    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", launcher, raising=False)
    with compiling_only(2):
        launch(100, block=512)
        launch(100, block=1024)
    assert [name for name, _ in built] == ["_scale_kernel"] * 2
    assert all(thread.startswith("manta-compile") for _, thread in built)
