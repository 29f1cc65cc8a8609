"""The table of rotary angles: fp32 cosines and sines of every position, with the scaling that a RopeScaling names.

Built on the host, in fp32 as models are trained. Knows no model and rotates nothing (kernels/rope.py does).
"""

from __future__ import annotations

import math

import torch

from manta.engine.model_shape import RopeScaling


def build_cos_sin(rope: RopeScaling, head_dim: int, max_position: int, device: torch.device) -> torch.Tensor:
    """[max_position, rot_dim] fp32: the cosines of all frequencies, then the sines, times the attention factor."""
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table.mul_(attention_factor(rope)).to(device)


def inverse_frequencies(rope: RopeScaling, head_dim: int) -> torch.Tensor:
    """Radians a position, [rot_dim / 2] fp32, highest frequency first."""
    rot_dim = int(head_dim * rope.partial_rotary_factor)
    plain = 1.0 / (rope.theta ** (torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def attention_factor(rope: RopeScaling) -> float:
    """What cosines and sines are multiplied by (YaRN's temperature, equation 22); 1 for the other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(rope: RopeScaling, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: waves that turn often within the original context stay, those that hardly turn are stretched by
    `factor`, the ones between are blended."""
    assert rope.original_max_position is not None, "llama3 scaling has an original context"
    turns = rope.original_max_position * plain / (2 * math.pi)  # within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


def _yarn(rope: RopeScaling, plain: torch.Tensor) -> torch.Tensor:
    """NTK-by-parts (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2): as llama3, but the blend is
    linear in the index of the frequency."""
    assert rope.original_max_position is not None, "yarn scaling has an original context"
    rot_dim = 2 * plain.shape[0]

    def index_with(turns: float) -> float:
        """The (fractional) index of the frequency that makes so many turns within the original context."""
        wavelength = (rope.original_max_position or 0) / turns
        return rot_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(index_with(rope.beta_fast)), 0)
    last = min(math.ceil(index_with(rope.beta_slow)), rot_dim - 1)
    width = last - first if last > first else 0.001
    stretched = ((torch.arange(rot_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return plain / rope.factor * stretched + plain * (1.0 - stretched)
