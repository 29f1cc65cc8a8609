"""Chooses how kernels run in this process: on the GPU where there is one, else in Triton's interpreter.

`pytest tests/kernels -m "not gpu and not aot"`  interpreter on a machine without a GPU
`pytest tests/kernels -m gpu`                    the same cases and larger ones on the GPU
`pytest tests/kernels -m aot`                    compiles only; needs no GPU and must not see the interpreter

Triton decides between compiler and interpreter when a kernel is defined, so each of these is a process of its own, and
they are no part of a run over all of `tests/`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def _wants_aot(config: pytest.Config) -> bool:
    expression = str(config.getoption("markexpr", "") or "")
    return "aot" in expression and "not aot" not in expression


def pytest_configure(config: pytest.Config) -> None:
    if HAS_GPU or _wants_aot(config) or "manta.kernels.runtime" in sys.modules:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    spec = importlib.util.spec_from_file_location("kernels_interpreter", Path(__file__).with_name("interpreter.py"))
    assert spec is not None
    assert spec.loader is not None
    interpreter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreter)
    interpreter.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a GPU, every case of this folder is a GPU test, except what only compiles or has no kernel in it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and HAS_GPU and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the test's tensors live; kernels run for them, and memory that they allocate starts as NaN."""
    from manta.kernels import runtime

    if not HAS_GPU:
        if request.node.get_closest_marker("gpu"):
            pytest.skip("needs a CUDA GPU")
        if not runtime.INTERPRETED:
            pytest.skip("kernels were compiled, not interpreted: run tests/kernels in a process of its own")
        monkeypatch.setattr(runtime, "use_triton", lambda tensor: True)
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    torch.manual_seed(0)
    return torch.device("cuda" if HAS_GPU else "cpu")


def _poisoned(allocate: Any) -> Any:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)

    return allocate_poisoned
