"""What every rank does to come up: meets the others, connects to them, builds its part of the model. Knows no steps."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from manta.engine.config import EngineConfig
from manta.engine.errors import EngineFailed
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource

from .member import GangMember

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from manta.engine.model_runner import BuiltRunner

Report = Callable[[str, float], None]

MEET_S = 300.0
"""How long ranks wait for one another at the store."""


def open_store(member: GangMember, listener: socket.socket | None = None) -> TCPStore:
    """The store of the gang, hosted by rank 0 (on `listener` if given, which is used up), joined by the others.

    Raises RuntimeError (of torch.distributed) when it cannot be reached in time.
    """
    from torch._C._distributed_c10d import TCPStore

    is_host = member.place.is_driver
    return TCPStore(
        member.store_host,
        member.store_port,
        member.place.world_size,
        is_host,
        timeout=timedelta(seconds=MEET_S),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def build_rank(
    config: EngineConfig, source: ModelSource, shape: ModelShape, member: GangMember, store: TCPStore, report: Report
) -> BuiltRunner:
    """This rank's part of the model, ready to follow plans. Called by all ranks with the same configuration.

    Raises ConfigError or CheckpointError with a sentence that says what to change.
    """
    import torch
    from torch.distributed import DistStoreError

    from manta.engine.model_runner import build_model_runner, choose_device

    from .groups import join_groups

    device = choose_device(config.device)
    if device.type == "cpu":
        share_cpu(len(member.ranks_on_node))
    else:
        torch.cuda.set_device(device)  # before anything makes a context on the first GPU
    backend = member.backend
    assert backend in (None, "nccl", "gloo"), f"no backend is called {backend!r}"
    try:
        groups = join_groups(member.place, store, device=device, backend=backend, address=member.host)
    except DistStoreError as error:
        raise EngineFailed(
            f"Rank {member.place.rank} did not meet the others within {MEET_S:.0f} s; their logs say why. ({error})"
        ) from None
    return build_model_runner(config, source, shape, place=member.place, groups=groups, report=report)


def share_cpu(num_ranks: int) -> None:
    """Give this rank its share of the CPUs' threads, so that ranks of one node do not wait for each other's."""
    import torch

    share = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    torch.set_num_threads(min(torch.get_num_threads(), share))
