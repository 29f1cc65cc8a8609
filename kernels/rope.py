"""Rotary position embedding of q and k in place, fused with the write of k and v into the paged cache.

Rotates halves (the "neox" layout). The angles come in as a table: scaling schemes are not known here. A cache in 8 bits
gets codes and scales (kernels/quantized/kv_cache), from what is written back to k and v's own numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .kv_cache import store_kv_reference
from .quantized.kv_cache import (
    LEAST_MAGNITUDE,
    CacheScales,
    check_scales,
    largest_code,
    store_codes,
    store_quantized_reference,
)
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
    scales: CacheScales | None = None,
) -> None:
    """See `rope_and_store`."""
    rope_reference(q, k, positions, cos_sin)
    if scales is None:
        store_kv_reference(k, v, key_cache, value_cache, slot_mapping)
    else:
        store_quantized_reference(k, key_cache, scales.keys, slot_mapping)
        store_quantized_reference(v, value_cache, scales.values, slot_mapping)


def rope_reference(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """The rotation alone: `q` and `k` in place, see `rope_and_store`."""
    angles = cos_sin.index_select(0, positions).unsqueeze(1)  # [tokens, 1, rot_dim]
    cos, sin = angles.chunk(2, dim=-1)
    for x in (q, k):
        rotated = x[..., : cos_sin.shape[1]]
        first, second = rotated.float().chunk(2, dim=-1)
        new_second = second * cos + first * sin
        new_first = first * cos - second * sin
        rotated[..., : first.shape[-1]] = new_first
        rotated[..., first.shape[-1] :] = new_second


@jit
def turn(x, other, cos, sin, DTYPE: tl.constexpr):
    """`x` turned, in DTYPE; `other` is what stands half the rotated elements further (times -`sin`) or before (`sin`).

    Said to the last operation, so that all kernels that turn give the same bits.
    """
    return tl.fma(x.to(tl.float32), cos, other.to(tl.float32) * sin).to(DTYPE)  # pyright: ignore[reportArgumentType]


@jit(do_not_specialize=["num_tokens"])
def _rope_and_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slot_mapping_ptr,
    num_tokens,
    token_stride,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROT_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: TOKENS tokens and one KV head with the query heads that share it.

    With `key_scales_ptr` the cache has codes up to LARGEST.
    """
    pid_head = tl.program_id(0) % num_kv_heads
    first_token = tl.program_id(0) // num_kv_heads * TOKENS
    HALF: tl.constexpr = ROT_DIM // 2
    offs_half = tl.arange(0, BLOCK_HALF)
    mask_half = (offs_half < HALF)[None, :]

    # Rows of q: the group's heads of the first token, then of the next.
    offs_row = tl.arange(0, TOKENS * BLOCK_GROUP)
    head = offs_row % BLOCK_GROUP
    token = first_token + offs_row // BLOCK_GROUP
    mask_row = (head < GROUP) & (token < num_tokens)
    position = tl.load(positions_ptr + token, mask=mask_row, other=0).to(tl.int64)
    mask_q = mask_row[:, None] & mask_half
    angles = cos_sin_ptr + position[:, None] * ROT_DIM + offs_half[None, :]
    cos = tl.load(angles, mask=mask_q, other=0.0)
    sin = tl.load(angles + HALF, mask=mask_q, other=0.0)
    token_k = first_token + tl.arange(0, TOKENS)
    mask_token = token_k < num_tokens
    position = tl.load(positions_ptr + token_k, mask=mask_token, other=0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token_k, mask=mask_token, other=-1).to(tl.int64)
    mask_k = mask_token[:, None] & mask_half
    angles = cos_sin_ptr + position[:, None] * ROT_DIM + offs_half[None, :]
    cos_k = tl.load(angles, mask=mask_k, other=0.0)
    sin_k = tl.load(angles + HALF, mask=mask_k, other=0.0)
    if PDL:
        wait_for_predecessor()
        let_successor_start()

    q_row = q_ptr + token.to(tl.int64)[:, None] * token_stride + (pid_head * GROUP + head)[:, None] * q_head_stride
    q_row += offs_half[None, :]
    q_first = tl.load(q_row, mask=mask_q, other=0.0)  # [tokens * group, rot_dim / 2]
    q_second = tl.load(q_row + HALF, mask=mask_q, other=0.0)
    row = token_k.to(tl.int64)[:, None] * token_stride
    k_row = k_ptr + row + pid_head * k_head_stride
    k_half = k_row + offs_half[None, :]
    k_first = tl.load(k_half, mask=mask_k, other=0.0)  # [tokens, rot_dim / 2]
    k_second = tl.load(k_half + HALF, mask=mask_k, other=0.0)
    is_stored = (slot >= 0)[:, None]
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask_dim = is_stored & (offs_dim < HEAD_DIM)[None, :]
    v = tl.load(v_ptr + row + pid_head * v_head_stride + offs_dim[None, :], mask=mask_dim, other=0.0)
    # A head of few elements is held by several warps: all have loaded before one of them writes in place.
    tl.debug_barrier()
    q_type = q_ptr.dtype.element_ty
    tl.store(q_row, turn(q_first, q_second, cos, -sin, q_type), mask=mask_q)
    tl.store(q_row + HALF, turn(q_second, q_first, cos, sin, q_type), mask=mask_q)
    k_type = k_ptr.dtype.element_ty
    new_first = turn(k_first, k_second, cos_k, -sin_k, k_type)
    new_second = turn(k_second, k_first, cos_k, sin_k, k_type)
    tl.store(k_half, new_first, mask=mask_k)
    tl.store(k_half + HALF, new_second, mask=mask_k)

    cache_row = (slot[:, None] * num_kv_heads + pid_head) * HEAD_DIM
    cache_type = key_cache_ptr.dtype.element_ty
    key_half = key_cache_ptr + cache_row + offs_half[None, :]
    mask_rest = mask_dim & (offs_dim >= ROT_DIM)[None, :]
    key_whole = key_cache_ptr + cache_row + offs_dim[None, :]
    if key_scales_ptr is None:
        tl.store(key_half, new_first.to(cache_type), mask=is_stored & mask_half)
        tl.store(key_half + HALF, new_second.to(cache_type), mask=is_stored & mask_half)
        if ROT_DIM < HEAD_DIM:  # the part of k that does not turn
            k_rest = tl.load(k_row + offs_dim[None, :], mask=mask_rest, other=0.0)
            tl.store(key_whole, k_rest.to(cache_type), mask=mask_rest)
        tl.store(value_cache_ptr + cache_row + offs_dim[None, :], v.to(cache_type), mask=mask_dim)
    else:
        # Rounded to k's type before: a cached prefix holds the same codes whichever way k went.
        # Tokens without a slot may be no numbers.
        first = tl.where(is_stored, new_first.to(tl.float32), 0.0)
        second = tl.where(is_stored, new_second.to(tl.float32), 0.0)
        magnitude = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        magnitude = tl.maximum(magnitude, LEAST_MAGNITUDE)  # [tokens]
        if ROT_DIM < HEAD_DIM:
            k_rest = tl.load(k_row + offs_dim[None, :], mask=mask_rest, other=0.0).to(tl.float32)
            magnitude = tl.maximum(magnitude, tl.max(tl.abs(k_rest), 1))
            store_codes(k_rest, magnitude, key_whole, mask_rest, LARGEST)
        store_codes(first, magnitude, key_half, is_stored & mask_half, LARGEST)
        store_codes(second, magnitude, key_half + HALF, is_stored & mask_half, LARGEST)
        scale_place = (slot // PAGE * num_kv_heads + pid_head) * PAGE + slot % PAGE
        tl.store(key_scales_ptr + scale_place, magnitude / LARGEST, mask=slot >= 0)
        wide = v.to(tl.float32)
        magnitude = tl.maximum(tl.max(tl.abs(wide), 1), LEAST_MAGNITUDE)
        store_codes(wide, magnitude, value_cache_ptr + cache_row + offs_dim[None, :], mask_dim, LARGEST)
        tl.store(value_scales_ptr + scale_place, magnitude / LARGEST, mask=slot >= 0)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: CacheScales | None = None,
) -> None:
    """Rotate `q` [tokens, heads, dim] and `k` [tokens, kv_heads, dim] in place, then write k and `v` to the cache.

    `positions` [tokens] int64 index `cos_sin` [max_position, rot_dim] fp32 (cosines, then sines; rot_dim <= dim, the
    rest of a head stays as it is). The caches are [num_blocks, block_size, kv_heads, dim]; `slot_mapping` [tokens]
    int64 holds block * block_size + offset, or -1 to write nothing. q, k and v are views of one fused projection, or at
    least have one row stride. `scales`: of caches in 8 bits, written too.
    """
    if not runtime.use_triton(q):
        rope_and_store_reference(q, k, v, positions, cos_sin, key_cache, value_cache, slot_mapping, scales)
        return
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rot_dim = k.shape[1], cos_sin.shape[1]
    assert num_heads % num_kv_heads == 0
    assert rot_dim % 2 == 0
    assert rot_dim <= head_dim
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert q.stride(0) == k.stride(0) == v.stride(0)
    assert cos_sin.is_contiguous()
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    if scales is not None:
        check_scales(scales, key_cache)
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    tokens, num_warps = _tiles(num_tokens)
    dependent = has_dependent_launch(q)
    _rope_and_store_kernel[(num_kv_heads * triton.cdiv(num_tokens, tokens),)](
        q,
        k,
        v,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        None if scales is None else scales.keys,
        None if scales is None else scales.values,
        slot_mapping,
        num_tokens,
        q.stride(0),
        q.stride(1),
        k.stride(1),
        v.stride(1),
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROT_DIM=rot_dim,
        TOKENS=tokens,
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_HALF=triton.next_power_of_2(rot_dim // 2),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        PAGE=key_cache.shape[1],
        LARGEST=0.0 if scales is None else largest_code(key_cache.dtype),
        PDL=dependent,
        num_warps=num_warps,
        launch_pdl=dependent,
    )


def _tiles(num_tokens: int) -> tuple[int, int]:
    """Tokens and warps of a program: many programs for few tokens, more bytes in flight in each for many."""
    return (1, 2) if num_tokens < 512 else (4, 4)
