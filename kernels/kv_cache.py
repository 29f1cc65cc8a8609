"""Moves keys and values in and out of the paged cache: store by slot, copy blocks, gather blocks.

A cache is [num_blocks, block_size, kv_heads, head_dim], contiguous. Knows neither sequences nor who owns a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import runtime
from .runtime import jit


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `store_kv`."""
    written = slot_mapping >= 0
    if not bool(written.all()):
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, k.to(key_cache.dtype))
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, v.to(value_cache.dtype))


@jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    k_stride,
    v_stride,
    k_head_stride,
    v_head_stride,
    row_size,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + pid).to(tl.int64)
    if slot < 0:
        return
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # element of [kv_heads, head_dim]
    mask = offs < row_size
    head, lane = offs // HEAD_DIM, offs % HEAD_DIM
    k = tl.load(k_ptr + pid * k_stride + head * k_head_stride + lane, mask=mask, other=0.0)
    v = tl.load(v_ptr + pid * v_stride + head * v_head_stride + lane, mask=mask, other=0.0)
    tl.store(key_cache_ptr + slot * row_size + offs, k.to(key_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(value_cache_ptr + slot * row_size + offs, v.to(value_cache_ptr.dtype.element_ty), mask=mask)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `k` and `v` [tokens, kv_heads, dim] to slots (block * block_size + offset) of the caches.

    `slot_mapping` [tokens] int64; -1 writes nothing, other slots must be distinct. k and v may be strided views whose
    last dimension is contiguous.
    """
    if not runtime.use_triton(k):
        store_kv_reference(k, v, key_cache, value_cache, slot_mapping)
        return
    num_tokens, num_kv_heads, head_dim = k.shape
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert k.stride(2) == 1
    assert v.stride(2) == 1
    if num_tokens == 0:
        return
    row_size = num_kv_heads * head_dim
    block = min(1024, triton.next_power_of_2(row_size))
    _store_kv_kernel[(num_tokens, triton.cdiv(row_size, block))](
        k,
        v,
        key_cache,
        value_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k.stride(1),
        v.stride(1),
        row_size,
        HEAD_DIM=head_dim,
        BLOCK=block,
        num_warps=4,
    )


def copy_blocks_reference(cache: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """See `copy_blocks`."""
    cache.index_copy_(0, dst_ids, cache.index_select(0, src_ids))


@jit
def _copy_blocks_kernel(cache_ptr, src_ids_ptr, dst_ids_ptr, block_elements, BLOCK: tl.constexpr):
    pid_pair = tl.program_id(0)
    src = tl.load(src_ids_ptr + pid_pair).to(tl.int64)
    dst = tl.load(dst_ids_ptr + pid_pair).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < block_elements
    values = tl.load(cache_ptr + src * block_elements + offs, mask=mask, other=0.0)
    tl.store(cache_ptr + dst * block_elements + offs, values, mask=mask)


def copy_blocks(cache: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy block `src_ids[i]` over block `dst_ids[i]`, ids [pairs] int64. No block may be both source and target."""
    if not runtime.use_triton(cache):
        copy_blocks_reference(cache, src_ids, dst_ids)
        return
    assert cache.is_contiguous()
    if src_ids.numel() == 0:
        return
    block_elements = cache[0].numel()
    grid = (src_ids.numel(), triton.cdiv(block_elements, 2048))
    _copy_blocks_kernel[grid](cache, src_ids, dst_ids, block_elements, BLOCK=2048, num_warps=4)


def gather_kv(cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the entries of `block_ids` [n] in order, as a copy [n * block_size, kv_heads, dim].

    Not on the path of a step, and torch's own gather is at the speed of memory: no kernel of ours.
    """
    return cache.index_select(0, block_ids).flatten(0, 1)
