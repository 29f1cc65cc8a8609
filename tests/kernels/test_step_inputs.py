"""The inputs of a decode step, made on the device, against their reference."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch.testing import assert_close

from manta.kernels.step_inputs import DecodeInputs, DecodeRecords, prepare_decode, prepare_decode_reference


@pytest.mark.parametrize(("num_rows", "num_real", "block_size"), [(1, 1, 64), (16, 11, 16), (200, 200, 32), (8, 0, 16)])
def test_rows_get_their_tokens_places_and_lengths(
    num_rows: int, num_real: int, block_size: int, device: torch.device
) -> None:
    num_slots, width = 211, 48
    table = torch.randint(0, 5000, (num_slots, width), dtype=torch.int32, device=device)
    last = torch.randint(0, 50_000, (num_slots,), device=device)
    real = torch.arange(num_rows, device=device) < num_real
    slots = torch.randperm(num_slots - 1, device=device)[:num_rows].int()
    positions = torch.randint(0, width * block_size, (num_rows,), dtype=torch.int32, device=device)
    known = torch.where(torch.arange(num_rows, device=device) % 3 == 1, 77, -1).int()
    starts_block = torch.arange(num_rows, device=device) % 2 == 0
    positions = torch.where(starts_block, positions // block_size * block_size, positions)
    new_blocks = torch.where(starts_block, torch.arange(9000, 9000 + num_rows, device=device), -1).int()
    records = DecodeRecords(
        torch.where(real, slots, num_slots - 1), torch.where(real, positions, -1), known, new_blocks
    )
    results = []
    for prepare in (prepare_decode_reference, prepare_decode):
        own_table = table.clone()
        inputs = DecodeInputs.allocate(num_rows, device)
        for field in fields(inputs):
            getattr(inputs, field.name).fill_(-99)
        prepare(records, last, own_table, inputs, block_size=block_size)
        results.append((own_table, inputs))
    (expected_table, expected), (found_table, found) = results
    assert_close(found_table, expected_table, rtol=0, atol=0)
    for field in fields(expected):
        assert_close(getattr(found, field.name), getattr(expected, field.name), rtol=0, atol=0)
    assert found.seq_lens[real].tolist() == (positions[real] + 1).tolist()
    assert found.token_ids[real].tolist() == torch.where(known < 0, last[slots.long()], known.long())[real].tolist()
    assert found.slot_mapping[~real].tolist() == [-1] * (num_rows - num_real)
    starting = real & starts_block
    assert (found.slot_mapping[starting] // block_size).tolist() == new_blocks[starting].tolist()
    assert int((found_table != table).sum()) == int(starting.sum())
