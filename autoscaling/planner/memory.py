"""What the memory of a replica's GPUs is used for, byte by byte, and how many tokens of KV are left. Pure.

Knows no allocator: what the engine measures at start, this estimates from sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manta.engine.model_shape import ModelShape
from manta.engine.step_time import StepTimeModel

from .problem import Problem

GRAPHS_BYTES = 0.5e9
"""Of captured decode graphs on each GPU; Manta's own on an H200 take 0.51 GB."""
COMMUNICATION_BYTES = 0.4e9
"""Of buffers for exchanges on each GPU of several."""
LIVE_HIDDEN, LIVE_MLP = 4, 2
"""Activations that live at once, of a token: hidden states, and the MLP's inner ones."""


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes of one GPU, by what they are for; they add up to its memory."""

    total: float
    reserve: float
    """For what others need on the device: context, libraries, a margin."""
    weights: float
    activations: float
    graphs: float
    communication: float
    fragmentation: float
    """Of KV blocks: on average half of each sequence's last one is empty."""
    kv_cache: float
    """What is left; negative: so much is missing."""
    kv_room_tokens: int
    """Of the whole replica, fragmentation left out; 0 when nothing is left."""

    def misfit(self, longest: int) -> str | None:
        """Why a request of `longest` tokens cannot be served; None: it can."""
        if self.kv_cache <= 0:
            needed = self.total - self.kv_cache
            return (
                f"weights take {self.weights / 1e9:.1f} GB of each GPU: {needed / 1e9:.1f} GB would be needed before "
                f"any KV, there are {self.total / 1e9:.0f}"
            )
        if self.kv_room_tokens < longest:
            return f"room for {self.kv_room_tokens} tokens of KV, the longest request has {longest}"
        return None

    def tree(self) -> dict[str, float]:
        """For a report: gigabytes of one GPU."""
        names = ("total", "reserve", "weights", "activations", "graphs", "communication", "fragmentation", "kv_cache")
        return {f"{name}_gb": round(getattr(self, name) / 1e9, 3) for name in names}


def ledger(problem: Problem, shape: ModelShape, model: StepTimeModel) -> MemoryLedger:
    """Of each GPU of a replica with this step-time model's split and formats; stages are taken as equal."""
    search, hardware = problem.search, problem.cluster.hardware
    num_gpus = model.tp * model.pp
    total = hardware.memory_bytes
    weights = model.resident_bytes / num_gpus
    live = LIVE_HIDDEN * shape.hidden_size + LIVE_MLP * shape.intermediate_size / model.tp
    logits = 4.0 * search.max_num_seqs * shape.vocab_size / model.tp
    activations = 2.0 * search.max_num_batched_tokens * live + logits
    communication = COMMUNICATION_BYTES if num_gpus > 1 else 0.0
    kv_bytes = model.kv_bytes_per_token / num_gpus
    fragmentation = search.max_num_seqs * search.block_size / 2 * kv_bytes
    reserve = total * (1 - search.memory_fraction)
    used = reserve + weights + activations + GRAPHS_BYTES + communication + fragmentation
    room = max(0, math.floor((total - used) / kv_bytes))
    room -= room % search.block_size
    return MemoryLedger(
        total, reserve, weights, activations, GRAPHS_BYTES, communication, fragmentation, total - used, room
    )
