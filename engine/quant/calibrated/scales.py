"""Scales that move difficulty between a product and what feeds it, and leave their composition as it was.

AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978): columns with large inputs are enlarged before they are rounded,
s = mean|x|^a with the exponent that leaves the least error of the output. SmoothQuant (Xiao et al. 2022,
https://arxiv.org/abs/2211.10438): activations become easier to round, s = max|x|^a / max|w|^(1 - a).

The product's columns are multiplied by s; its input is divided by it in the norm, or in the rows that make it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from manta.engine.model_shape import ModelShape

from .layer_pass import GROUPS, InputStats, LayerTensors

Round = Callable[[torch.Tensor], torch.Tensor]
"""A weight [out, in] -> what it stands for once it is rounded."""

SMOOTHING = 0.5
_NUM_EXPONENTS = 20
_CLIP_STEPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def awq_scales(weights: list[torch.Tensor], stats: InputStats, round_to: Round) -> torch.Tensor:
    """[in]: of the exponents 0, 0.05, ... 0.95 the best one's. `weights` share the input."""
    means = (stats.sum_abs / max(stats.num_tokens, 1)).clamp(min=1e-6)
    stacked = torch.cat(weights)
    best, least = torch.ones_like(means), float("inf")
    for step in range(_NUM_EXPONENTS):
        scales = normalized(means ** (step / _NUM_EXPONENTS))
        found = output_error(round_to(stacked * scales) / scales - stacked, stats)
        if found < least:
            best, least = scales, found
    return best


def smooth_scales(weights: list[torch.Tensor], stats: InputStats) -> torch.Tensor:
    """[in]."""
    largest = torch.cat(weights).abs().amax(0).clamp(min=1e-5)
    inputs = stats.max_abs.clamp(min=1e-5)
    return (inputs**SMOOTHING / largest ** (1 - SMOOTHING)).clamp(min=1e-5)


def normalized(scales: torch.Tensor) -> torch.Tensor:
    """With the geometric middle of least and largest at 1."""
    return scales / (scales.max() * scales.min()).sqrt()


def output_error(change: torch.Tensor, stats: InputStats) -> float:
    """Sum over tokens of the squared change of the output, tr(D X^T X D^T)."""
    return float(((change @ stats.second_moments) * change).sum())


def fold(tensors: LayerTensors, group: str, scales: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Divide what makes a group's input by `scales` [in] and multiply the group's columns, in place.

    Returns the scales that were used: query heads that share a KV head share its scales."""
    if group == "qkv":
        _divide_rows(tensors, "input_norm", scales)
    elif group == "gate_up":
        _divide_rows(tensors, "post_norm", scales)
    elif group == "down":
        _divide_rows(tensors, "up", scales)
    else:
        queries = shape.num_heads // shape.num_kv_heads
        shared = scales.view(shape.num_kv_heads, queries, shape.head_dim).log().mean(1).exp()
        _divide_rows(tensors, "v", shared.reshape(-1))
        scales = shared[:, None].expand(-1, queries, -1).reshape(-1)
    for part in GROUPS[group]:
        tensors[part, "weight"] *= scales
    return scales


def scaled(stats: InputStats, scales: torch.Tensor) -> InputStats:
    """Of the same inputs divided by `scales`."""
    return InputStats(
        stats.second_moments / torch.outer(scales, scales),
        stats.sum_abs / scales,
        stats.max_abs / scales,
        stats.num_tokens,
    )


def clipped(weight: torch.Tensor, stats: InputStats, round_to: Round, group_size: int) -> torch.Tensor:
    """`weight` [out, in], each group's values bounded so that rounding costs least if inputs were uncorrelated."""
    importance = stats.second_moments.diagonal()
    best, least = weight, None
    rest = -weight.shape[1] % group_size

    def by_group(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, rest)).unflatten(1, (-1, group_size))

    largest = by_group(weight.abs()).amax(-1, keepdim=True)
    for step in _CLIP_STEPS:
        bound = (largest * step).expand(-1, -1, group_size).flatten(1)[:, : weight.shape[1]]
        candidate = weight.clamp(-bound, bound)
        errors = by_group((round_to(candidate) - weight).square() * importance).sum(-1, keepdim=True)
        if least is None:
            best, least = candidate, errors
            continue
        is_better = errors < least
        least = torch.where(is_better, errors, least)
        chosen = is_better.expand(-1, -1, group_size).flatten(1)[:, : weight.shape[1]]
        best = torch.where(chosen, candidate, best)
    return best


def _divide_rows(tensors: LayerTensors, part: str, scales: torch.Tensor) -> None:
    weight = tensors[part, "weight"]
    weight /= scales if weight.dim() == 1 else scales[:, None]
    if (part, "bias") in tensors:
        tensors[part, "bias"] /= scales
