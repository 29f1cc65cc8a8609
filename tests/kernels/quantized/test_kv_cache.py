"""Keys and values of 8 bits: what is stored where behind the rotation, and how far it is from what was given."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels import rope
from manta.kernels.quantized.kv_cache import CacheScales, gather_quantized_reference

DTYPES = [torch.int8, torch.float8_e4m3fn]
gpu = pytest.mark.gpu
SIZES = [
    # tokens, heads, kv_heads, dim, rot_dim, block_size
    (3, 4, 2, 64, 64, 16),
    (5, 9, 3, 80, 80, 16),
    (3, 4, 1, 64, 32, 16),
    (515, 2, 1, 32, 32, 16),
    pytest.param(300, 32, 8, 128, 128, 64, marks=gpu),
    pytest.param(4000, 32, 8, 128, 128, 64, marks=gpu),
    pytest.param(65, 32, 8, 80, 32, 64, marks=gpu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "heads", "kv_heads", "dim", "rot_dim", "block_size"), SIZES)
def test_rotated_heads_are_stored_at_their_slots(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rot_dim: int,
    block_size: int,
    wide: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, device=device).to(wide)
    angles = torch.rand(1000, rot_dim // 2, device=device) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 1000, (num_tokens,), device=device)
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[num_tokens // 2] = -1
    results = []
    for run in (rope.rope_and_store_reference, rope.rope_and_store):
        fused = qkv.clone()
        q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
        codes = torch.zeros(2, num_blocks, block_size, kv_heads, dim, dtype=dtype, device=device)
        scales = torch.full((2, num_blocks, kv_heads, block_size), torch.nan, device=device)
        run(q, k, v, positions, cos_sin, codes[0], codes[1], slots, CacheScales(*scales))
        results.append((fused, codes, scales))
    (fused, codes, scales), (actual, found, own) = results
    tolerance = 1e-5 if wide == torch.float32 else 2e-2
    assert_close(actual, fused, rtol=tolerance, atol=tolerance)
    assert int((~own.isnan()).sum()) == 2 * (num_tokens - 1) * kv_heads, "slots of -1 are left alone"
    assert_close(own, scales, rtol=1e-2, atol=0, equal_nan=True)
    blocks = torch.arange(num_blocks, device=device)
    kept = slots >= 0
    for side, new in enumerate(actual.split([heads, kv_heads, kv_heads], dim=1)[1:]):
        stored = gather_quantized_reference(found[side], own[side], blocks).view(-1, kv_heads, dim)[slots[kept]]
        other = gather_quantized_reference(codes[side], scales[side], blocks).view(-1, kv_heads, dim)[slots[kept]]
        assert float(torch.isclose(stored, other, rtol=tolerance).float().mean()) > 0.95
        given = new[kept].float()
        bound = given.abs().amax(-1, keepdim=True) * (0.5 / 127 if dtype == torch.int8 else 0.5 / 8)
        assert bool(((stored - given).abs() <= 1.01 * bound).all())


def test_heads_of_zeros_are_stored_as_zeros(device: torch.device) -> None:
    q, k, v = (torch.zeros(2, 2, 32, device=device) for _ in range(3))
    codes = torch.ones(2, 1, 16, 2, 32, device=device).to(torch.float8_e4m3fn)
    scales = torch.full((2, 1, 2, 16), torch.nan, device=device)
    cos_sin = torch.ones(4, 32, device=device)
    slots = torch.tensor([3, 5], device=device)
    rope.rope_and_store(q, k, v, slots * 0, cos_sin, codes[0], codes[1], slots, CacheScales(*scales))
    for side in range(2):
        stored = gather_quantized_reference(codes[side], scales[side], torch.zeros(1, dtype=torch.int64, device=device))
        assert bool((stored[0, slots] == 0).all())
