"""Four-bit codebooks: NF4 and FP4 of QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), e2m1 of MXFP4
(OCP Microscaling 1.0: groups of 32, scales that are powers of two) and NVFP4 (groups of 16, FP8 scales times one of
the tensor). Weights are rounded to the nearest entry; products use what entries stand for."""

from __future__ import annotations

import torch

from .grouped import GroupedWeight, _in_groups, pack_nibbles

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Of a scale that is the group's largest absolute value."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def quantize_nf4(weight: torch.Tensor, *, group_size: int = 64) -> GroupedWeight:
    """Groups of 64 with a scale in fp16."""
    values = _in_groups(weight.float(), group_size)
    scales = values.abs().amax(-1).clamp(min=2e-7).half()
    return _coded(weight, values, scales, scales.float(), NF4, group_size)


def quantize_mxfp4(weight: torch.Tensor) -> GroupedWeight:
    """The scale of a group is 2^(floor(log2(largest)) - 2): its largest value lies between 4 and 8 of them."""
    values = _in_groups(weight.float(), 32)
    exponents = values.abs().amax(-1).clamp(min=2.0**-120).log2().floor() - 2
    return _coded(weight, values, e8m0_of(exponents), torch.exp2(exponents), E2M1, 32)


def quantize_nvfp4(weight: torch.Tensor) -> GroupedWeight:
    """The tensor's scale brings the largest scale of a group to the largest FP8 number, 448."""
    values = _in_groups(weight.float(), 16)
    largest = values.abs().amax(-1)
    tensor_scale = (largest.max() / (6 * 448)).clamp(min=1e-30)
    scales = (largest / 6 / tensor_scale).clamp(min=2.0**-9, max=448).to(torch.float8_e4m3fn)
    return nvfp4_weight(
        _nearest(values / (scales.float() * tensor_scale)[..., None], E2M1).flatten(1)[:, : weight.shape[1]],
        scales,
        tensor_scale,
    )


def nvfp4_weight(codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor) -> GroupedWeight:
    """From `codes` [out, in] uint8, `scales` [out, groups] FP8 and the tensor's scale, which multiplies them."""
    return GroupedWeight(
        pack_nibbles(codes),
        scales,
        4,
        16,
        codes.shape[1],
        scale_units=tensor_scale.float().reshape(1, 1).expand(codes.shape[0], 1).contiguous(),
        groups_a_unit=scales.shape[1],
        codebook=torch.tensor(E2M1, device=codes.device),
    )


def e8m0_of(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two as one byte each."""
    return (exponents + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def _coded(
    weight: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    wide_scales: torch.Tensor,
    codebook: tuple[float, ...],
    group_size: int,
) -> GroupedWeight:
    codes = _nearest(values / wide_scales[..., None], codebook).flatten(1)[:, : weight.shape[1]]
    book = torch.tensor(codebook, device=weight.device)
    return GroupedWeight(pack_nibbles(codes), scales, 4, group_size, weight.shape[1], codebook=book)


def _nearest(values: torch.Tensor, codebook: tuple[float, ...]) -> torch.Tensor:
    """The code of the nearest entry, uint8."""
    book = torch.tensor(codebook, device=values.device)
    entries, order = book.sort()
    borders = (entries[1:] + entries[:-1]) / 2
    return order[torch.bucketize(values, borders)].to(torch.uint8)
