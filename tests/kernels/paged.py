"""Random paged caches whose unwritten slots are NaN, drawn where they are used (a GPU's are gigabytes)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def random_caches(
    filled: Sequence[int], page: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Keys and values [2, blocks, page, kv_heads, dim]; a block's slots from `filled` [blocks] on are NaN."""
    caches = torch.randn(2, len(filled), page, kv_heads, dim, dtype=dtype, device=device)
    unwritten = torch.arange(page, device=device) >= torch.tensor(filled, device=device)[:, None]
    return caches.masked_fill_(unwritten[:, :, None, None], torch.nan)
