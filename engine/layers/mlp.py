"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one product. Knows no model."""

from __future__ import annotations

import torch

from manta.kernels.activation import silu_and_mul

from .linear import Linear
from .norm import RmsNorm


class GatedMlp:
    """`gate_up` [2 * inter, hidden]: the rows of gate and up in turns when `interleaved`, else gate's first, then up's.
    `down` [hidden, inter]."""

    __slots__ = ("_interleaved", "down", "gate_up", "norm")

    def __init__(self, norm: RmsNorm, gate_up: Linear, down: Linear, *, interleaved: bool) -> None:
        self.norm = norm
        self.gate_up = gate_up
        self.down = down
        self._interleaved = interleaved

    def __call__(self, residual: torch.Tensor) -> None:
        """Add the block of the normalized residual to `residual` [tokens, hidden], in place."""
        if self._interleaved:
            activated = self.gate_up.gated_after_norm(residual, self.norm)
        else:
            activated = silu_and_mul(self.gate_up.after_norm(residual, self.norm))
        self.down.add_to(residual, activated)
