"""Integers of 4 or 8 bits in words of 32, the lowest bits first, as GPTQ, AWQ and compressed-tensors keep them."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """[.., n, ..] int32 -> [.., n * 32 / bits, ..] uint8, along `dim` of a matrix."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if dim == 0:
        parts = (words[:, None, :] >> shifts[None, :, None]) & ((1 << bits) - 1)
        return parts.to(torch.uint8).flatten(0, 1)
    parts = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return parts.to(torch.uint8).flatten(1)


def pack_words(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The reverse; a last word may be padded with zeros."""
    if dim == 0:
        return pack_words(values.t(), bits, 1).t().contiguous()
    per_word = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word)).to(torch.int64)
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    words = (values.unflatten(1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
