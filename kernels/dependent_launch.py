"""Programmatic dependent launch: a kernel starts while its predecessor ends, and waits inside. Knows no kernel.

A kernel that is launched this way (`launch_pdl=`) calls `wait_for_predecessor` before it touches memory that others
write (weights may be asked for before, `prefetch_rows`) and `let_successor_start` once it has no more than its results
to store; a successor that is launched the plain way still waits for the end. Both need sm_90, so kernels call them
behind a constexpr.
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


PREFETCH_BYTES = 0
"""What a product asks L2 for of each of its weight's rows while it waits; 0: nothing. NOT MEASURED YET: a kernel of one
program, as a norm of one row, leaves the memory bus idle for some two microseconds."""


@jit
def prefetch_rows(rows, end, num_bytes):
    """Ask L2 for `num_bytes` (in steps of 512) from each pointer of `rows` [rows] on, up to the pointer `end`."""
    addresses = rows.to(tl.int64)[:, None] + 128 * tl.arange(0, 4)[None, :]
    last = end.to(tl.int64) - 1
    for start in range(0, num_bytes, 512):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [tl.minimum(addresses + start, last)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def let_successor_start():
    """The next kernel may take the place of programs that have ended; it sees our results only after its own wait."""
    tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
