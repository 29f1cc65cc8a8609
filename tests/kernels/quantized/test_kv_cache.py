"""Keys and values of 8 bits: what is stored where, and how far it is from what was given."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.quantized.kv_cache import empty_cache, store_quantized_kv, store_quantized_kv_reference
from manta.kernels.quantized.layout import Format

FORMATS = [Format.INT8, Format.FP8]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 80)])
def test_tokens_are_stored_at_their_slots(heads: int, dim: int, format: Format, device: torch.device) -> None:
    qkv = torch.randn(5, 3 * heads, dim, device=device).bfloat16()
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    slots = torch.tensor([17, -1, 0, 31, 16], device=device)
    actual = [empty_cache(2, 16, heads, dim, format, device) for _ in range(2)]
    expected = [empty_cache(2, 16, heads, dim, format, device) for _ in range(2)]
    store_quantized_kv(k, v, actual[0], actual[1], slots)
    store_quantized_kv_reference(k, v, expected[0], expected[1], slots)
    blocks = torch.arange(2, device=device)
    for mine, other, new in zip(actual, expected, (k, v), strict=True):
        assert_close(mine.scales, other.scales, rtol=1e-6, atol=0)
        stored = mine.gather(blocks).view(32, heads, dim)
        assert float(torch.isclose(stored, other.gather(blocks).view(32, heads, dim)).float().mean()) > 0.98
        kept = slots >= 0
        bound = new[kept].float().abs().amax(-1, keepdim=True) * (0.5 / 127 if format is Format.INT8 else 0.5 / 8)
        assert bool(((stored[slots[kept]] - new[kept].float()).abs() <= 1.01 * bound).all())
        others = torch.ones(32, dtype=torch.bool, device=device)
        others[slots[kept]] = False
        assert bool((stored[others] == 0).all())


def test_no_tokens_store_nothing(device: torch.device) -> None:
    caches = [empty_cache(1, 16, 2, 32, Format.FP8, device) for _ in range(2)]
    none = torch.zeros(0, 2, 32, device=device)
    store_quantized_kv(none, none, caches[0], caches[1], torch.zeros(0, dtype=torch.int64, device=device))
    assert bool((caches[0].scales == 0).all())
