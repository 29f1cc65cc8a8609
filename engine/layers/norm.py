"""RMSNorm with its weight. Knows no model."""

from __future__ import annotations

import torch

from manta.kernels.rmsnorm import rms_norm


class RmsNorm:
    """`weight` [dim]."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x` [tokens, dim]."""
        return rms_norm(x, self.weight, self.eps)
