"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one product. Knows no model."""

from __future__ import annotations

import torch

from manta.kernels.activation import silu_and_mul

from .linear import Linear


class GatedMlp:
    """`gate_up` [2 * inter, hidden] holds the gate's rows first; `down` [hidden, inter]."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down(silu_and_mul(self.gate_up(x)))
