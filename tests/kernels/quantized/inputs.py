"""Random layers with quantized weights, as all tests of their kernels take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from manta.kernels.quantized.layout import FP8_DTYPE, Format, QuantizedWeight, num_groups, pack_int4


def random_weight(
    format: Format,
    n_size: int,
    k_size: int,
    group: int,
    device: torch.device,
    *,
    zeros: bool = False,
    scales: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Numbers over the whole range, scaled so that results for normal inputs are of order one."""
    shape = (num_groups(k_size, group), n_size)
    deviation = {Format.INT4: 4.6, Format.INT8: 74.0, Format.FP8: 100.0}[format]
    scale = (torch.rand(shape, device=device) + 0.5) * k_size**-0.5 / deviation
    zero = None
    if format is Format.INT4:
        numbers = pack_int4(torch.randint(16, (n_size, k_size), device=device), group)
        zero = torch.randint(4, 12, shape, device=device).to(scales) if zeros else None
    elif format is Format.INT8:
        numbers = torch.randint(-128, 128, (n_size, k_size), dtype=torch.int8, device=device)
        zero = torch.randint(-30, 30, shape, device=device).to(scales) if zeros else None
    else:
        numbers = (100 * torch.randn(n_size, k_size, device=device)).clamp(-448, 448).to(FP8_DTYPE)
        numbers.view(torch.uint8)[0, :16] = torch.arange(16, device=device)  # subnormal ones among them
    return QuantizedWeight(format, numbers, scale.to(scales), k_size, group, zero)


@dataclass(frozen=True)
class Inputs:
    """x [M, K] whose row stride is not K, and what stands around a layer."""

    x: torch.Tensor
    weight: QuantizedWeight
    bias: torch.Tensor
    norm_weight: torch.Tensor
    residual: torch.Tensor

    @classmethod
    def random(cls, rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> Inputs:
        device, k_size, n_size = weight.weight.device, weight.in_features, weight.out_features

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        return cls(draw(rows, k_size + 32)[:, :k_size], weight, draw(n_size), draw(k_size), draw(rows, n_size))


def ordered(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers with columns that belong to shuffled elements of the input."""
    return replace(weight, order=torch.randperm(weight.in_features, device=weight.weight.device))
