"""Puts partial attention results together by their log-sum-exp. Knows how decode kernels lay them out, no keys.

Outputs o_i of softmaxes over disjoint keys, with denominators of base-2 logarithm l_i, combine to the output over all
keys as sum(2^l_i o_i) / sum(2^l_i) (Dao et al., flash decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .decode_schedule import DecodeShape, DecodeWorkspace
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit


@jit
def merge_group(
    partial_ptr, log_sum_ptr, first_row, row_step, num_parts, mask_m,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge a sequence's parts for the heads of a group, [group, dim], in the program whose part was done last.

    In the order of the keys, so that the result does not depend on who came last; past L1, where nothing is older.
    """
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    for part in range(num_parts):
        row = first_row + part * row_step
        log_sum = tl.load(log_sum_ptr + row, mask=mask_m, other=0.0, cache_modifier=".cg")
        offset = row[:, None] * HEAD_DIM + offs_d[None, :]
        partial = tl.load(partial_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(running_max, log_sum)
        weight = tl.exp2(log_sum - new_max)
        rescale = tl.exp2(running_max - new_max)
        acc = acc * rescale[:, None] + partial * weight[:, None]
        running_sum = running_sum * rescale + weight
        running_max = new_max
    return acc / running_sum[:, None]


@jit
def _merge_parts(
    acc, running_max, running_sum, partial_ptr, log_sum_ptr, first_row, row_step, num_parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Add partial results, each weighted by its share of the softmax's denominator, to what was merged before."""
    offs_d = tl.arange(0, BLOCK_D)
    for begin in range(0, num_parts, BLOCK_PARTS):
        part = begin + tl.arange(0, BLOCK_PARTS)
        mask_part = part < num_parts
        row = first_row + part.to(tl.int64) * row_step
        log_sum = tl.load(log_sum_ptr + row, mask=mask_part, other=float("-inf"))  # [parts]
        mask = mask_part[:, None] & (offs_d < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(running_max, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - new_max)
        rescale = tl.exp2(running_max - new_max)
        acc = acc * rescale + tl.sum(partial * weight[:, None], 0)
        running_sum = running_sum * rescale + tl.sum(weight, 0)
        running_max = new_max
    return acc, running_max, running_sum


@jit(do_not_specialize=["prefix_begin"], do_not_specialize_on_alignment=["seq_lens_ptr", "members_ptr"])
def _merge_kernel(
    partial_ptr,
    log_sum_ptr,
    records_ptr,
    seq_lens_ptr,
    members_ptr,
    num_shared_ptr,
    out_ptr,
    out_stride,
    out_head_stride,
    prefix_begin,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one sequence and head. Leaves sequences alone whose only part wrote their output.

    With `members_ptr`, a member's parts are merged with those of the shared prefix, whose partial results start at row
    `prefix_begin`, PREFIX_ROWS a program.
    """
    pid_head = tl.program_id(0)
    pid_seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + pid_seq)
    if PDL:
        wait_for_predecessor()
    record = records_ptr + pid_seq * 4
    first_part = tl.load(record)
    num_parts = tl.load(record + 1)
    num_shared = pid_seq * 0
    if members_ptr is not None:
        num_shared = tl.load(num_shared_ptr) * (tl.load(members_ptr + pid_seq) != 0).to(tl.int32)
    if seq_len == 0 or (num_parts == 1 and num_shared == 0):
        return
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    running_max = tl.full([], float("-inf"), tl.float32)
    running_sum = tl.zeros([], tl.float32)
    if members_ptr is not None:
        num_parts = tl.where(seq_len > num_shared, num_parts, 0)
        if num_shared > 0:
            kv_head = pid_head // GROUP
            prefix_row = prefix_begin + tl.load(record + 2).to(tl.int64) + kv_head * PREFIX_ROWS + pid_head % GROUP
            acc, running_max, running_sum = _merge_parts(
                acc, running_max, running_sum, partial_ptr, log_sum_ptr, prefix_row, KV_HEADS * PREFIX_ROWS,
                tl.load(record + 3), HEAD_DIM, BLOCK_D, BLOCK_PARTS,
            )  # fmt: skip
    first_row = first_part.to(tl.int64) * (KV_HEADS * GROUP) + pid_head
    acc, running_max, running_sum = _merge_parts(
        acc, running_max, running_sum, partial_ptr, log_sum_ptr, first_row, KV_HEADS * GROUP,
        num_parts, HEAD_DIM, BLOCK_D, BLOCK_PARTS,
    )  # fmt: skip
    if PDL:
        let_successor_start()
    out_offset = pid_seq.to(tl.int64) * out_stride + pid_head * out_head_stride
    out = (acc / running_sum).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset + offs_d, out, mask=offs_d < HEAD_DIM)


def launch_merge(
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: DecodeWorkspace,
    shape: DecodeShape,
    members: torch.Tensor | None = None,
    num_shared: torch.Tensor | None = None,
    prefix_begin: int = 0,
    prefix_rows: int = 0,
) -> None:
    """Merge what `launch_parts` with `merges_apart` and, with `members`, the pass over the shared prefix left."""
    num_seqs, num_heads, head_dim = out.shape
    dependent = has_dependent_launch(out)
    _merge_kernel[(num_heads, num_seqs)](
        workspace.partial,
        workspace.log_sum,
        workspace.records,
        seq_lens,
        members,
        num_shared,
        out,
        out.stride(0),
        out.stride(1),
        prefix_begin,
        GROUP=shape.group,
        KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_PARTS=16,
        PREFIX_ROWS=prefix_rows,
        PDL=dependent,
        launch_pdl=dependent,
        num_warps=1,
    )
