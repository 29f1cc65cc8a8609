"""Times decode attention. Knows the kernel's interface and the frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from manta.kernels import attention_decode

from .kernel_timing import Line, ModelShape, Peaks, block_tables, line_of, num_rotations, random

SHAPES = ((1, 1024), (1, 32768), (8, 1024), (32, 1024), (64, 576), (128, 1024), (256, 1024))


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    for num_seqs, length in SHAPES:
        count = num_seqs * length * model.token_bytes
        blocks = -(-length // model.page)
        num_blocks = num_rotations(count) * num_seqs * blocks
        caches = random(device, 2, num_blocks, model.page, model.kv_heads, model.dim)
        q = random(device, num_seqs, model.heads, model.dim)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
        workspace = attention_decode.DecodeWorkspace.allocate(
            max_num_seqs=num_seqs, num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.dim, device=device
        )
        call = partial(
            attention_decode.attention_decode, q, caches[0], caches[1],
            seq_lens=lengths, scale=model.dim**-0.5, workspace=workspace, max_seq_len=length,
        )  # fmt: skip
        calls = [partial(call, block_table=table) for table in block_tables(device, num_seqs, blocks, num_blocks)]
        yield line_of("attention_decode", f"{num_seqs} x {length}", calls, count / peaks.read_bytes_per_s)
