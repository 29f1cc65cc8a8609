"""Rotary position embedding of q and k in place, fused with the write of k and v into the paged cache.

Rotates halves (the "neox" layout). The angles come in as a table: scaling schemes are not known here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .kv_cache import store_kv_reference
from .runtime import jit


def rope_and_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `rope_and_store`."""
    angles = cos_sin.index_select(0, positions).unsqueeze(1)  # [tokens, 1, rot_dim]
    cos, sin = angles.chunk(2, dim=-1)
    for x in (q, k):
        rotated = x[..., : cos_sin.shape[1]]
        first, second = rotated.float().chunk(2, dim=-1)
        new_second = second * cos + first * sin
        new_first = first * cos - second * sin
        rotated[..., : first.shape[-1]] = new_first
        rotated[..., first.shape[-1] :] = new_second
    store_kv_reference(k, v, key_cache, value_cache, slot_mapping)


@jit
def _rope_and_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    q_stride,
    k_stride,
    v_stride,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program: one token and one KV head with the query heads that share it."""
    pid_head = tl.program_id(0) % num_kv_heads
    pid_token = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    HALF: tl.constexpr = ROT_DIM // 2
    position = tl.load(positions_ptr + pid_token).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + pid_token).to(tl.int64)

    offs_half = tl.arange(0, BLOCK_HALF)
    mask_half = offs_half < HALF
    cos = tl.load(cos_sin_ptr + position * ROT_DIM + offs_half, mask=mask_half, other=0.0)
    sin = tl.load(cos_sin_ptr + position * ROT_DIM + HALF + offs_half, mask=mask_half, other=0.0)

    offs_group = tl.arange(0, BLOCK_GROUP)
    mask_q = (offs_group < GROUP)[:, None] & mask_half[None, :]
    q_row = q_ptr + pid_token * q_stride + (pid_head * GROUP + offs_group)[:, None] * q_head_stride + offs_half[None, :]
    q_first = tl.load(q_row, mask=mask_q, other=0.0).to(tl.float32)  # [group, rot_dim / 2]
    q_second = tl.load(q_row + HALF, mask=mask_q, other=0.0).to(tl.float32)
    q_type = q_ptr.dtype.element_ty
    tl.store(q_row, (q_first * cos[None, :] - q_second * sin[None, :]).to(q_type), mask=mask_q)
    tl.store(q_row + HALF, (q_second * cos[None, :] + q_first * sin[None, :]).to(q_type), mask=mask_q)

    k_row = k_ptr + pid_token * k_stride + pid_head * k_head_stride
    k_first = tl.load(k_row + offs_half, mask=mask_half, other=0.0).to(tl.float32)
    k_second = tl.load(k_row + HALF + offs_half, mask=mask_half, other=0.0).to(tl.float32)
    k_type = k_ptr.dtype.element_ty
    new_first = (k_first * cos - k_second * sin).to(k_type)
    new_second = (k_second * cos + k_first * sin).to(k_type)
    tl.store(k_row + offs_half, new_first, mask=mask_half)
    tl.store(k_row + HALF + offs_half, new_second, mask=mask_half)

    if slot >= 0:
        cache_offset = (slot * num_kv_heads + pid_head) * HEAD_DIM
        cache_type = key_cache_ptr.dtype.element_ty
        tl.store(key_cache_ptr + cache_offset + offs_half, new_first.to(cache_type), mask=mask_half)
        tl.store(key_cache_ptr + cache_offset + HALF + offs_half, new_second.to(cache_type), mask=mask_half)
        offs_dim = tl.arange(0, BLOCK_DIM)
        mask_dim = offs_dim < HEAD_DIM
        if ROT_DIM < HEAD_DIM:  # the part of k that does not turn
            mask_rest = mask_dim & (offs_dim >= ROT_DIM)
            k_rest = tl.load(k_row + offs_dim, mask=mask_rest, other=0.0)
            tl.store(key_cache_ptr + cache_offset + offs_dim, k_rest.to(cache_type), mask=mask_rest)
        v = tl.load(v_ptr + pid_token * v_stride + pid_head * v_head_stride + offs_dim, mask=mask_dim, other=0.0)
        tl.store(value_cache_ptr + cache_offset + offs_dim, v.to(cache_type), mask=mask_dim)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate `q` [tokens, heads, dim] and `k` [tokens, kv_heads, dim] in place, then write k and `v` to the cache.

    `positions` [tokens] int64 index `cos_sin` [max_position, rot_dim] fp32 (cosines, then sines; rot_dim <= dim, the
    rest of a head stays as it is). The caches are [num_blocks, block_size, kv_heads, dim]; `slot_mapping` [tokens]
    int64 holds block * block_size + offset, or -1 to write nothing. q, k and v may be views of one fused projection.
    """
    if not runtime.use_triton(q):
        rope_and_store_reference(q, k, v, positions, cos_sin, key_cache, value_cache, slot_mapping)
        return
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rot_dim = k.shape[1], cos_sin.shape[1]
    assert num_heads % num_kv_heads == 0
    assert rot_dim % 2 == 0
    assert rot_dim <= head_dim
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert cos_sin.is_contiguous()
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    _rope_and_store_kernel[(num_kv_heads * num_tokens,)](
        q,
        k,
        v,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q.stride(1),
        k.stride(1),
        v.stride(1),
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROT_DIM=rot_dim,
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_HALF=triton.next_power_of_2(rot_dim // 2),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=2,
    )
