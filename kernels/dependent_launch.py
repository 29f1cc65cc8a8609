"""Programmatic dependent launch: a kernel starts while its predecessor ends, and waits inside. Knows no kernel.

A kernel that is launched this way (`launch_pdl=`) calls `wait_for_predecessor` before it touches what its predecessor
reads or writes. `let_successor_start` comes after that wait, at the latest when only results are left to store; a
successor that is launched the plain way still waits for the end. What kernels before the predecessor wrote (lengths,
positions, block tables: a step's inputs) may be read ahead of the wait, and so may weights. Both need sm_90, so kernels
call them behind a constexpr.
"""

from __future__ import annotations

import torch
import triton.language as tl

from . import runtime
from .runtime import jit


def has_dependent_launch(tensor: torch.Tensor) -> bool:
    """Whether kernels for this tensor's device may be launched this way."""
    return runtime.has_inline_ptx(tensor) and runtime.capability(tensor.device) >= 90


@jit
def wait_for_predecessor():
    """Until all that the preceding kernel wrote can be read (and what it reads may be overwritten)."""
    tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]


@jit
def let_successor_start():
    """The next kernel may take the place of programs that have ended; it sees our results only after its own wait."""
    tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
