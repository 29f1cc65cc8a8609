"""Finds, without sorting, where top-k and top-p cut a row of logits, and draws from what is left; parts of kernels.

A border is a range of keys [low, high) and a quota: kept is what lies at or above `high`, and of what lies between,
equal values all, the first `quota` in order of id. Sees one row's logits, or its candidates, as a list of numbers.
"""

from __future__ import annotations

import triton.language as tl

from .runtime import jit
from .sampling_noise import scores


@jit
def key_of(x):
    """A signed integer that orders as the fp32 number does."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def tail(x_ptr, n, pivot, row_max, temperature, BLOCK: tl.constexpr):
    """How many of n logits have at least the key `pivot`, and their weight."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < n, other=float("-inf")).to(tl.float32)
        above = (key_of(x) >= pivot) & (offs < n)
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp((x - row_max) / temperature), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@jit
def search_border(
    x_ptr,
    n,
    low,
    high,
    count_low,
    count_high,
    mass_low,
    mass_high,
    wanted_count,
    wanted_mass,
    row_max,
    temperature,
    BLOCK: tl.constexpr,
):
    """Narrow the keys [low, high) around the border of the smallest prefix that has both wanted count and mass.

    Everything from `low` on is enough, everything from `high` on is not; ends when one value or one logit is between.
    """
    while (low + 1 < high) & (count_low - count_high > 1):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count, mass = tail(x_ptr, n, middle, row_max, temperature, BLOCK)
        is_enough = (count >= wanted_count) & (mass >= wanted_mass)
        low = tl.where(is_enough, middle, low)
        count_low = tl.where(is_enough, count, count_low)
        mass_low = tl.where(is_enough, mass, mass_low)
        high = tl.where(is_enough, high, middle)
        count_high = tl.where(is_enough, count_high, count)
        mass_high = tl.where(is_enough, mass_high, mass)
    return low, high, count_low, count_high, mass_low, mass_high


@jit
def kept_weights(x_ptr, offs, n, low, high, quota, ties_before, min_p, row_max, temperature):
    """Weights of the logits at `offs` after all filters, and the number of ties up to there."""
    x = tl.load(x_ptr + offs, mask=offs < n, other=float("-inf")).to(tl.float32)
    key = key_of(x)
    tie = (key >= low) & (key < high) & (offs < n)
    rank = ties_before + tl.cumsum(tie.to(tl.int32), 0)
    weights = tl.exp((x - row_max) / temperature)
    kept = ((key >= high) | (tie & (rank <= quota))) & (weights >= min_p) & (offs < n)
    return tl.where(kept, weights, 0.0), ties_before + tl.sum(tie.to(tl.int32), 0)


@jit
def pick(x_ptr, ids_ptr, n, HAS_IDS, base, low, high, quota, min_p, row_max, temperature, BLOCK: tl.constexpr):
    """Place of the kept logit with the highest score (see `scores`); `ids_ptr` holds token ids where HAS_IDS."""
    best = row_max * 0.0 + float("-inf")
    picked = quota * 0
    ties = quota * 0
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        weights, ties = kept_weights(x_ptr, offs, n, low, high, quota, ties, min_p, row_max, temperature)
        x = tl.load(x_ptr + offs, mask=offs < n, other=float("-inf")).to(tl.float32)
        ids = offs
        if HAS_IDS:
            ids = tl.load(ids_ptr + offs, mask=offs < n, other=0)
        candidates = tl.where(weights > 0.0, scores(x, ids, base, temperature), float("-inf"))
        score, place = tl.max(candidates, 0, return_indices=True)
        picked = tl.where(score > best, start + place, picked)
        best = tl.maximum(best, score)
    return picked
