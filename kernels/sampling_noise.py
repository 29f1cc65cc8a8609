"""The noise of draws: a pure function of a row's seed, position and the token id, the same in torch and in kernels.

Gumbel noise makes the largest of logit over temperature plus noise a draw from the softmax (Maddison et al. 2014,
https://arxiv.org/abs/1411.0030). Knows no filter.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .runtime import jit

# splitmix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195) on wrapping signed 64-bit integers.
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_GAMMA_TL, _MIX_1_TL, _MIX_2_TL = tl.constexpr(_GAMMA), tl.constexpr(_MIX_1), tl.constexpr(_MIX_2)


def random_base(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """64 random bits per row, a pure function of (seed, position); all [rows] int64."""

    def mix(z: torch.Tensor) -> torch.Tensor:
        z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
        z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
        return z ^ ((z >> 31) & ((1 << 33) - 1))

    return mix(mix(seeds + _GAMMA) + positions * _GAMMA)


def random_bits_reference(base: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """32 random bits (as int64) for each token id, two rounds of a 32-bit mixer; `base` broadcasts against `ids`."""
    mask = 0xFFFFFFFF
    h = (ids * 0x9E3779B1 + (base & mask)) & mask
    for key in ((base >> 32) & mask, None):
        h = ((h ^ (h >> 16)) * 0x21F0AAAD) & mask
        h = ((h ^ (h >> 15)) * 0xD35A2D97) & mask
        h = h ^ (h >> 15)
        if key is not None:
            h = h ^ key
    return h


def exponential_reference(base: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """An exponential variate (fp32) for each token id; minus its logarithm is Gumbel noise."""
    v = (random_bits_reference(base, ids).float() + 0.5) * 2.0**-32
    return torch.where(v < 1e-3, v * (1.0 + 0.5 * v), -(1.0 - v).clamp_min(2.0**-25).log())


@jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1_TL
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2_TL
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@jit
def base_of(seed, position):
    """The bits of `random_base`."""
    return _mix(_mix(seed + _GAMMA_TL) + position * _GAMMA_TL)


@jit
def scores(x, ids, base, temperature):
    """Logit over temperature plus Gumbel noise, a pure function of the row's random base and the token id.

    The largest one is a draw from the softmax (Gumbel-max trick, Maddison et al. 2014, arXiv:1411.0030).
    """
    h = ids.to(tl.uint32) * 0x9E3779B1 + (base & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0xD35A2D97
    h = h ^ (h >> 15) ^ ((base >> 32) & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0xD35A2D97
    h = h ^ (h >> 15)
    # An exponential variate, -log(1 - v); small ones, which win, keep all 32 bits.
    v = (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(v < 1e-3, v * (1.0 + 0.5 * v), -tl.log(tl.maximum(1.0 - v, 2.9802322387695312e-08)))
    return x / temperature - tl.log(exponential)
