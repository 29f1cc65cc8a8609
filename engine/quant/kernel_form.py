"""From a quantized weight's logical form to the layout that kernels read, where there is one. Knows no kernel.

What has no such layout runs as dequantize and multiply, and `why_not` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.kernels.quantized.layout import Format, pack_int4
from manta.kernels.quantized.layout import QuantizedWeight as KernelWeight

from .fp8 import Activations, Fp8Weight
from .grouped import GroupedWeight
from .int8 import Int8Weight
from .weight import QuantizedWeight, StackedWeight


@dataclass(frozen=True)
class KernelForm:
    """What the functions of kernels/quantized/linear take."""

    weight: KernelWeight
    activations: Format | None


def kernel_form(weight: QuantizedWeight) -> KernelForm | None:
    """None: no kernel takes it."""
    if isinstance(weight, GroupedWeight):
        return _grouped(weight)
    if isinstance(weight, Int8Weight) and weight.outlier_threshold is None and weight.input_scale is None:
        scales = weight.scales[None].contiguous()
        return KernelForm(
            KernelWeight(Format.INT8, weight.codes, scales, weight.shape[1], weight.shape[1]), Format.INT8
        )
    if isinstance(weight, Fp8Weight):
        return _fp8(weight)
    return None


def why_not(weight: QuantizedWeight) -> str:
    """Of a weight without a kernel form: its kind, in words."""
    if isinstance(weight, StackedWeight):
        return "products that are fused but quantized differently"
    if isinstance(weight, GroupedWeight):
        return (
            "codebooks" if weight.codebook is not None else f"groups of {weight.group_size} that are cut or too small"
        )
    if isinstance(weight, Int8Weight):
        return "int8 with outliers or static activations"
    if isinstance(weight, Fp8Weight):
        return "fp8 with static activations or blocks of an unusual size"
    return "weights that are not quantized beside others that are"


def _grouped(weight: GroupedWeight) -> KernelForm | None:
    size = weight.group_size
    is_one_group = weight.scales.shape[1] == 1
    if weight.codebook is not None or not (is_one_group or size % 32 == 0):
        return None
    codes, scales = weight.unpacked(), weight.full_scales()
    zeros = None if weight.zeros is None else weight.zeros.float()
    if weight.minimums is not None:
        # s (q - z) = s q + m; where s is 0, all codes are m
        is_flat = scales == 0
        codes = codes.masked_fill(weight.by_column(is_flat), 0)
        scales = scales.masked_fill(is_flat, 1.0)
        zeros = -weight.full_minimums() / scales
    order = None
    if weight.group_ids is not None and not is_one_group:
        arranged = _arranged(weight.group_ids, size, scales.shape[1])
        if arranged is None:
            return None
        order, used = arranged
        codes = codes if order is None else codes[:, order]
        scales = scales[:, used]
        zeros = None if zeros is None else zeros[:, used]
    num_columns = codes.shape[1]
    size = num_columns if scales.shape[1] == 1 else size
    kept = _kept_dtype(weight)
    if weight.bits == 4:
        packed, format = pack_int4(codes, size), Format.INT4
    else:
        packed, format = (codes ^ 128).view(torch.int8), Format.INT8
        zeros = None if zeros is None else zeros - 128
    numbers = KernelWeight(
        format,
        packed,
        scales.t().to(kept).contiguous(),
        num_columns,
        size,
        None if zeros is None else zeros.t().to(kept).contiguous(),
        order,
    )
    return KernelForm(numbers, None)


def _kept_dtype(weight: GroupedWeight) -> torch.dtype:
    """Of scales: those of K-quants are products, and minimums become zero points that are no whole numbers."""
    return torch.float32 if weight.scale_units is not None or weight.minimums is not None else weight.scales.dtype


def _arranged(group_ids: torch.Tensor, size: int, num_groups: int) -> tuple[torch.Tensor | None, torch.Tensor] | None:
    """(order of columns, groups that are left) that bring each group's columns together; None where groups are no
    longer of one size."""
    order = torch.argsort(group_ids, stable=True)
    used, counts = torch.unique_consecutive(group_ids[order], return_counts=True)
    if not (bool((counts[:-1] == size).all()) and int(counts[-1]) <= size):
        return None
    is_sorted = torch.equal(order, torch.arange(len(order), device=order.device))
    return (None if is_sorted else order), used.long()


def _fp8(weight: Fp8Weight) -> KernelForm | None:
    if weight.activations is Activations.STATIC:
        return None
    num_columns = weight.shape[1]
    scales = weight.scales if weight.row_blocks is None else weight.scales.index_select(0, weight.row_blocks)
    group = num_columns
    if weight.column_blocks is not None:
        used, counts = torch.unique_consecutive(weight.column_blocks, return_counts=True)
        group = 128
        if len(used) > 1 and not (bool((counts[:-1] == group).all()) and int(counts[-1]) <= group):
            return None
        if len(used) == 1:
            group = num_columns
        elif num_columns % group and weight.activations is not Activations.PLAIN:
            return None  # activations in groups of 128 fill them
        scales = scales.index_select(1, used)
    activations = None if weight.activations is Activations.PLAIN else Format.FP8
    return KernelForm(KernelWeight(Format.FP8, weight.codes, scales.t().contiguous(), num_columns, group), activations)
