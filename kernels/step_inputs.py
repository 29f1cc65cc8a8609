"""Makes a decode step's inputs on the device from one small record a row. Knows slots and block ids, no requests.

The tokens that the step before sampled never pass through the host: they are read where the sampler left them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start
from .runtime import jit


@dataclass(frozen=True)
class DecodeRecords:
    """What the host says about each row, all [rows] int32."""

    slots: torch.Tensor
    """The row of the block table. Padding rows name a slot that no sequence has."""
    positions: torch.Tensor
    """Of the token that is computed; -1 marks padding."""
    known_ids: torch.Tensor
    """The token, or -1 when it is the one that the slot sampled last."""
    new_blocks: torch.Tensor
    """The block that the token's slot of the table gets before the step, or -1."""


@dataclass(frozen=True)
class DecodeInputs:
    """What the model reads, all [rows]. Padding rows have token 0, position 0, no place in the cache and length 0."""

    token_ids: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    slot_mapping: torch.Tensor  # int64, block * block_size + offset, or -1
    seq_lens: torch.Tensor  # int32, the row's own token counted
    slots: torch.Tensor  # int64, those of the records

    @staticmethod
    def allocate(num_rows: int, device: torch.device) -> DecodeInputs:
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        long, short = torch.int64, torch.int32
        return DecodeInputs(zeros(long), zeros(long), zeros(long), zeros(short), zeros(long))


def prepare_decode_reference(
    records: DecodeRecords,
    last_token_ids: torch.Tensor,
    block_table: torch.Tensor,
    inputs: DecodeInputs,
    *,
    block_size: int,
) -> None:
    """See `prepare_decode`."""
    slots, is_real = records.slots.long(), records.positions >= 0
    positions = records.positions.long().clamp_min(0)
    index = positions // block_size
    blocks = block_table[slots, index]
    gets_block = is_real & (records.new_blocks >= 0)
    blocks = torch.where(gets_block, records.new_blocks, blocks)
    block_table[slots[gets_block], index[gets_block]] = blocks[gets_block]
    token_ids = torch.where(records.known_ids >= 0, records.known_ids.long(), last_token_ids[slots])
    inputs.token_ids.copy_(torch.where(is_real, token_ids, 0))
    inputs.positions.copy_(positions)
    inputs.slot_mapping.copy_(torch.where(is_real, blocks.long() * block_size + positions % block_size, -1))
    inputs.seq_lens.copy_(records.positions + 1)
    inputs.slots.copy_(slots)


@jit(do_not_specialize=["num_rows"])
def _prepare_decode_kernel(
    slots_ptr,
    positions_ptr,
    known_ids_ptr,
    new_blocks_ptr,
    last_token_ids_ptr,
    block_table_ptr,
    token_ids_ptr,
    out_positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    out_slots_ptr,
    num_rows,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK rows. A slot stands in one row only, so no two threads touch the same place."""
    if PDL:
        let_successor_start()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_rows
    slot = tl.load(slots_ptr + offs, mask=mask, other=0).to(tl.int64)
    record = tl.load(positions_ptr + offs, mask=mask, other=-1)
    known = tl.load(known_ids_ptr + offs, mask=mask, other=0)
    new_block = tl.load(new_blocks_ptr + offs, mask=mask, other=-1)
    is_real = record >= 0
    position = tl.where(is_real, record, 0)
    place = block_table_ptr + slot * table_stride + position // PAGE
    gets_block = is_real & (new_block >= 0)
    tl.store(place, new_block, mask=mask & gets_block)
    block = tl.load(place, mask=mask & is_real & (new_block < 0), other=0)
    block = tl.where(gets_block, new_block, block).to(tl.int64)
    last = tl.load(last_token_ids_ptr + slot, mask=mask & is_real & (known < 0), other=0)
    token = tl.where(known >= 0, known.to(tl.int64), last)
    tl.store(token_ids_ptr + offs, tl.where(is_real, token, 0), mask=mask)
    tl.store(out_positions_ptr + offs, position.to(tl.int64), mask=mask)
    tl.store(slot_mapping_ptr + offs, tl.where(is_real, block * PAGE + position % PAGE, -1), mask=mask)
    tl.store(seq_lens_ptr + offs, record + 1, mask=mask)
    tl.store(out_slots_ptr + offs, slot, mask=mask)


def prepare_decode(
    records: DecodeRecords,
    last_token_ids: torch.Tensor,
    block_table: torch.Tensor,
    inputs: DecodeInputs,
    *,
    block_size: int,
) -> None:
    """Fill `inputs` from `records`, and enter the new blocks into the table, in place.

    `last_token_ids` [slots] int64; `block_table` [slots, max_blocks] int32. A slot appears in at most one row that is
    not padding. Safe inside CUDA graphs: the grid follows from the number of rows.
    """
    if not runtime.use_triton(block_table):
        prepare_decode_reference(records, last_token_ids, block_table, inputs, block_size=block_size)
        return
    num_rows = records.slots.shape[0]
    assert block_table.stride(1) == 1
    if num_rows == 0:
        return
    block = 128
    _prepare_decode_kernel[(triton.cdiv(num_rows, block),)](
        records.slots,
        records.positions,
        records.known_ids,
        records.new_blocks,
        last_token_ids,
        block_table,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        inputs.slots,
        num_rows,
        block_table.stride(0),
        PAGE=block_size,
        BLOCK=block,
        PDL=has_dependent_launch(block_table),
        num_warps=4,
    )
