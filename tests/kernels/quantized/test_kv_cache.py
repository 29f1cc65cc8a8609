"""Keys and values of 8 bits: what is stored where, and how far it is from what was given."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized.kv_cache import (
    gather_quantized_reference,
    store_quantized,
    store_quantized_reference,
)

DTYPES = [torch.int8, torch.float8_e4m3fn]


def empty_side(
    num_blocks: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(num_blocks, 16, heads, dim, dtype=dtype, device=device)
    return codes, torch.zeros(num_blocks, 16, heads, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 80)])
def test_tokens_are_stored_at_their_slots(heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    new = torch.randn(5, 3 * heads, dim, device=device).bfloat16()[:, heads : 2 * heads]
    slots = torch.tensor([17, -1, 0, 31, 16], device=device)
    actual, expected = (empty_side(2, heads, dim, dtype, device) for _ in range(2))
    store_quantized(new, *actual, slots)
    store_quantized_reference(new, *expected, slots)
    blocks = torch.arange(2, device=device)
    assert_close(actual[1], expected[1], rtol=1e-6, atol=0)
    stored = gather_quantized_reference(*actual, blocks).view(32, heads, dim)
    other = gather_quantized_reference(*expected, blocks).view(32, heads, dim)
    assert float(torch.isclose(stored, other).float().mean()) > 0.98
    kept = slots >= 0
    bound = new[kept].float().abs().amax(-1, keepdim=True) * (0.5 / 127 if dtype == torch.int8 else 0.5 / 8)
    assert bool(((stored[slots[kept]] - new[kept].float()).abs() <= 1.01 * bound).all())
    others = torch.ones(32, dtype=torch.bool, device=device)
    others[slots[kept]] = False
    assert bool((stored[others] == 0).all())


def test_no_tokens_store_nothing(device: torch.device) -> None:
    codes, scales = empty_side(1, 2, 32, torch.float8_e4m3fn, device)
    none = torch.zeros(0, 2, 32, device=device)
    store_quantized(none, codes, scales, torch.zeros(0, dtype=torch.int64, device=device))
    assert bool((scales == 0).all())
