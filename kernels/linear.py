"""A linear layer with what stands around it. (References; dispatch to kernels follows.)"""

from __future__ import annotations

import torch

from .activation import silu_and_mul_reference
from .rmsnorm import rms_norm


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, deterministic: bool = False
) -> torch.Tensor:
    """x W^T + b."""
    return torch.nn.functional.linear(x, weight, bias)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """rms_norm(x) W^T + b."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gated_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """silu(gate) * up of rms_norm(x), the weight's rows being gate and up in turns."""
    gate_up = norm_linear(x, norm_weight, eps, weight, bias)
    return silu_and_mul_reference(torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1))


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """residual += x W^T + b, in place."""
    residual.add_(linear(x, weight, bias))
