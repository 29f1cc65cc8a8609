"""RMSNorm with its weight, the residual addition fused in front. Knows no model."""

from __future__ import annotations

import torch

from manta.kernels.rmsnorm import rms_norm


class RmsNorm:
    """`weight` [dim]."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize `x` [tokens, dim]; with a residual, add x to it in place first and normalize the sum."""
        return rms_norm(x, self.weight, self.eps, residual)
