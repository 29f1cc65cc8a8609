"""Norm, activation, rotary embedding and cache writes against their references."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from manta.kernels import activation, embedding, kv_cache, rmsnorm, rope

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
gpu = pytest.mark.gpu


def strided_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device, *, extra: int = 16) -> torch.Tensor:
    """[rows, width] random numbers whose row stride is not the width."""
    return torch.randn(rows, width + extra, device=device).to(dtype)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "dim"),
    [(1, 64), (5, 576), (3, 1000), pytest.param(257, 4096, marks=gpu), pytest.param(33, 8192, marks=gpu)],
)
def test_rms_norm(num_tokens: int, dim: int, has_residual: bool, dtype: torch.dtype, device: torch.device) -> None:
    x = strided_rows(num_tokens, dim, dtype, device) * 3
    weight = torch.randn(dim, device=device).to(dtype)
    residual = strided_rows(num_tokens, dim, dtype, device, extra=48) if has_residual else None
    expected_residual = residual.clone() if residual is not None else None
    expected = rmsnorm.rms_norm_reference(x, weight, 1e-5, expected_residual)
    actual = rmsnorm.rms_norm(x, weight, 1e-5, residual)
    assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if residual is not None:
        assert_close(residual, expected_residual, rtol=0, atol=0)


def test_rms_norm_of_no_tokens(device: torch.device) -> None:
    assert rmsnorm.rms_norm(torch.empty(0, 64, device=device), torch.ones(64, device=device), 1e-5).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "inter"), [(1, 64), (3, 1536), (2, 2500), pytest.param(129, 14336, marks=gpu)])
def test_silu_and_mul(num_tokens: int, inter: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = strided_rows(num_tokens, 2 * inter, dtype, device) * 4
    expected = activation.silu_and_mul_reference(gate_up)
    assert_close(activation.silu_and_mul(gate_up), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    in_turns = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1)
    actual = activation.silu_and_mul(in_turns, interleaved=True)
    assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    actual = activation.silu_and_mul_reference(in_turns, interleaved=True)
    assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 576), (5, 1100), pytest.param(300, 4096, marks=gpu)])
def test_embedding(num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.randn(50, hidden, device=device).to(dtype)
    token_ids = torch.randint(0, 50, (num_tokens,), device=device)
    expected = embedding.embedding_reference(token_ids, weight)
    assert_close(embedding.embedding(token_ids, weight), expected, rtol=0, atol=0)


def test_embedding_of_no_tokens(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert embedding.embedding(none, torch.ones(50, 64, device=device)).shape == (0, 64)


ROPE_CASES = [
    # tokens, heads, kv_heads, dim, rot_dim, block_size
    (3, 4, 2, 64, 64, 16),
    (5, 9, 3, 64, 64, 16),
    (2, 4, 4, 96, 96, 32),
    (3, 4, 1, 64, 32, 16),
    (515, 3, 1, 16, 16, 16),
    pytest.param(300, 32, 8, 128, 128, 64, marks=gpu),
    pytest.param(65, 32, 8, 80, 32, 64, marks=gpu),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "heads", "kv_heads", "dim", "rot_dim", "block_size"), ROPE_CASES)
def test_rope_and_store(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rot_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
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
        caches = torch.full((2, num_blocks, block_size, kv_heads, dim), torch.nan, device=device, dtype=dtype)
        run(q, k, v, positions, cos_sin, caches[0], caches[1], slots)
        results.append((fused, caches))
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
    written = int((~results[1][1][0].isnan()).sum())
    assert written == (num_tokens - 1) * kv_heads * dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "kv_heads", "dim"), [(5, 3, 64), (2, 1, 80), pytest.param(1000, 8, 128, marks=gpu)]
)
def test_store_kv(num_tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    fused = torch.randn(num_tokens, 2 * kv_heads + 1, dim, device=device).to(dtype)
    k, v, _ = fused.split([kv_heads, kv_heads, 1], dim=1)
    slots = torch.randperm(2048, device=device)[:num_tokens]
    slots[0] = -1
    caches = torch.full((2, 2, 128, 16, kv_heads, dim), torch.nan, device=device, dtype=dtype)
    kv_cache.store_kv_reference(k, v, caches[0, 0], caches[0, 1], slots)
    kv_cache.store_kv(k, v, caches[1, 0], caches[1, 1], slots)
    assert_close(caches[1], caches[0], rtol=0, atol=0, equal_nan=True)
    assert int((~caches[1, 0].isnan()).sum()) == (num_tokens - 1) * kv_heads * dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "dim"), [(16, 3, 64), (16, 1, 80), pytest.param(64, 8, 128, marks=gpu)]
)
def test_copy_and_gather_blocks(
    block_size: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    cache = torch.randn(9, block_size, kv_heads, dim, device=device).to(dtype)
    expected = cache.clone()
    source = torch.tensor([3, 0, 3], device=device)
    target = torch.tensor([8, 2, 5], device=device)
    kv_cache.copy_blocks_reference(expected, source, target)
    kv_cache.copy_blocks(cache, source, target)
    assert_close(cache, expected, rtol=0, atol=0)
    gathered = kv_cache.gather_kv(cache, target)
    assert gathered.shape == (3 * block_size, kv_heads, dim)
    assert_close(gathered, kv_cache.gather_kv(cache, source), rtol=0, atol=0)
