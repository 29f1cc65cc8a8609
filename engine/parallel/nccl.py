"""NCCL process groups for the ranks of a gang, each with a GPU of its own: made, brought up at once, given up.

Knows no model and no plans. Who is dead or hangs is the watch's to judge (watch.py): torch's own watchdog would end the
process, with the streams that could go on elsewhere, and say less.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_ABORT_S = 10.0
"""How long giving a group up may take: NCCL waits until the graphs that hold its collectives are gone."""

_LEFT_TO_THE_WATCH = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
"""Read when a group is made: errors and time-outs end no process, no record is kept of each collective, which costs the
host time. What was set from outside stays."""


def nccl_group(store: Store, rank: int, size: int, device: torch.device, *, timeout: timedelta) -> Any:
    """A process group of torch.distributed without its global state. Called by all `size` ranks.

    It is connected when this returns, so that what is wrong shows here, and no communicator is made inside a capture.
    """
    for name, value in _LEFT_TO_THE_WATCH.items():
        os.environ.setdefault(name, value)
    nccl: Any = distributed.distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        group = nccl(store, rank, size, options)
        _connect(group, device)
    return group


def give_up(groups: list[Any]) -> None:
    """Abort: whatever waits for other ranks in one of the groups, a kernel on the GPU included, comes to its end with
    results that mean nothing. Returns soon, even when the library does not."""

    def abort() -> None:
        for group in groups:
            try:
                group.abort()
            except RuntimeError as error:
                logger.warning("An NCCL group could not be given up: %s", error)

    thread = threading.Thread(target=abort, name="manta-nccl-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)
    if thread.is_alive():
        logger.warning("NCCL takes longer than %.0f s to give its groups up.", _ABORT_S)


def _connect(group: Any, device: torch.device) -> None:
    options = distributed.AllreduceOptions()
    work = group.allreduce([torch.zeros(1, device=device)], options)
    if work is not None:
        work.wait()
    torch.cuda.current_stream(device).synchronize()
