"""Times decode attention, plain and over a shared prefix, lengths equal and mixed. Knows the kernels' interfaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from manta.kernels.attention_decode import attention_decode
from manta.kernels.attention_shared_prefix import SharedPrefix, attention_shared_prefix
from manta.kernels.decode_schedule import DecodeWorkspace
from manta.kernels.quantized.kv_cache import CacheScales

from .kernel_timing import Calls, Line, ModelShape, Peaks, line_of, num_rotations, random

SHAPES = (
    (1, 1024), (1, 32768), (8, 1024), (8, 8192), (16, 1024), (32, 1024), (64, 576), (128, 576), (128, 1024),
    (256, 576), (256, 1024), (1024, 600),
)  # fmt: skip
MIXED = (64, 256)
"""Rows of lengths as in chat traffic."""
OWN_TOKENS = 80
"""Of each row behind a shared prefix."""
SHARED = (
    (32, 32, 8192), (64, 64, 4096), (256, 256, 1024),
    # around the thresholds of `pays`
    (2, 2, 32768), (4, 4, 4096), (4, 4, 8192), (8, 8, 1024), (8, 8, 2048), (8, 8, 4096), (16, 16, 512), (16, 16, 1024),
    (16, 16, 2048), (64, 64, 128), (64, 64, 256), (64, 64, 512), (256, 16, 1024), (256, 16, 2048), (256, 256, 64),
    (256, 256, 128), (256, 256, 256),
)  # fmt: skip
"""Rows, how many of them share, tokens that they share."""


def mixed_lengths(num_seqs: int) -> list[int]:
    """30 to 3,000 tokens, evenly spread on a logarithmic scale, in a fixed random order."""
    order = torch.randperm(num_seqs, generator=torch.Generator().manual_seed(7)).tolist()
    return [round(30 * 100 ** (place / max(1, num_seqs - 1))) for place in order]


@dataclass(frozen=True)
class DecodeBatch:
    """Rows of the given lengths over a cache that rotating block tables pass over."""

    q: torch.Tensor
    caches: torch.Tensor
    block_tables: list[torch.Tensor]
    table_rows: torch.Tensor
    seq_lens: torch.Tensor
    prefix: SharedPrefix
    workspace: DecodeWorkspace
    read_bytes: int
    """Keys and values that must be read, a shared prefix once."""
    scales: CacheScales | None = None
    """Of caches in 8 bits."""

    def calls(self, kernel: Any = attention_decode, **options: Any) -> Calls:
        call = partial(
            kernel, self.q, self.caches[0], self.caches[1], seq_lens=self.seq_lens, scale=self.q.shape[2] ** -0.5,
            workspace=self.workspace, table_rows=self.table_rows,
            max_seq_len=self.block_tables[0].shape[1] * self.caches.shape[2], scales=self.scales, **options,
        )  # fmt: skip
        return [partial(call, block_table=table) for table in self.block_tables]

    def shared_calls(self) -> Calls:
        return self.calls(attention_shared_prefix, prefix=self.prefix)


def make_batch(
    model: ModelShape,
    lengths: Sequence[int],
    device: torch.device,
    *,
    num_members: int = 0,
    num_shared: int = 0,
    rotations: int | None = None,
    codes: torch.dtype | None = None,
) -> DecodeBatch:
    """The last `num_members` rows share their first `num_shared` tokens. `codes`: the type of a cache in 8 bits."""
    num_seqs, page = len(lengths), model.page
    is_member = torch.arange(num_seqs) >= num_seqs - num_members
    own_pages = [-(-length // page) - num_shared // page * int(is_member[row]) for row, length in enumerate(lengths)]
    num_pages = sum(own_pages) + num_shared // page
    num_tokens = sum(lengths) - max(0, num_members - 1) * num_shared
    # A code is half of what it stands for, and a head has a scale in fp32.
    token_bytes = model.token_bytes if codes is None else model.token_bytes // 2 + 2 * model.kv_heads * 4
    count = rotations or num_rotations(num_tokens * token_bytes)
    blocks = torch.randperm(count * num_pages, device=device).int().cpu()
    width = 16 * -(-max(lengths) // (16 * page))
    block_tables: list[torch.Tensor] = []
    for rotation in range(count):
        free = blocks[rotation * num_pages : (rotation + 1) * num_pages]
        table = torch.zeros(num_seqs, width, dtype=torch.int32)
        shared, taken = free[: num_shared // page], num_shared // page
        for row, own in enumerate(own_pages):
            first = len(shared) * int(is_member[row])
            table[row, :first] = shared[:first]
            table[row, first : first + own] = free[taken : taken + own]
            taken += own
        block_tables.append(table.to(device))
    caches = random(device, 2, count * num_pages, page, model.kv_heads, model.dim)
    scales = None
    if codes is not None:
        caches = (caches.mul_(30).round_() if codes == torch.int8 else caches).to(codes)
        sides = torch.rand(2, count * num_pages, model.kv_heads, page, device=device)
        scales = CacheScales(*(sides / 30 if codes == torch.int8 else sides))
    return DecodeBatch(
        q=random(device, num_seqs, model.heads, model.dim),
        caches=caches,
        block_tables=block_tables,
        table_rows=torch.arange(num_seqs, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        prefix=SharedPrefix(
            torch.tensor([num_shared], dtype=torch.int32, device=device),
            torch.tensor([num_seqs - 1], dtype=torch.int32, device=device),
            is_member.int().to(device),
        ),
        workspace=DecodeWorkspace.allocate(
            max_num_seqs=num_seqs, num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.dim, device=device
        ),
        read_bytes=num_tokens * token_bytes,
        scales=scales,
    )


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    cases = [(f"{num_seqs} x {length}", [length] * num_seqs) for num_seqs, length in SHAPES]
    cases += [(f"{num_seqs} mixed", mixed_lengths(num_seqs)) for num_seqs in MIXED]
    for name, lengths in cases:
        batch = make_batch(model, lengths, device)
        yield line_of("attention_decode", name, batch.calls(), batch.read_bytes / peaks.read_bytes_per_s)
    for name, lengths in cases:
        batch, wide = (make_batch(model, lengths, device, codes=codes) for codes in (torch.float8_e4m3fn, None))
        floor_s = batch.read_bytes / peaks.read_bytes_per_s
        yield line_of("attention_decode_fp8", name, batch.calls(), floor_s, "attention_decode", wide.calls())
    for num_seqs, num_members, num_shared in SHARED:
        yield bench_shared(peaks, device, model, num_seqs, num_members, num_shared)


def bench_shared(
    peaks: Peaks, device: torch.device, model: ModelShape, num_seqs: int, num_members: int, num_shared: int
) -> Line:
    lengths = [OWN_TOKENS] * (num_seqs - num_members) + [num_shared + OWN_TOKENS] * num_members
    batch = make_batch(model, lengths, device, num_members=num_members, num_shared=num_shared)
    flop = 4 * num_members * num_shared * model.heads * model.dim
    floor_s = max(batch.read_bytes / peaks.read_bytes_per_s, flop / peaks.matmul_flop_per_s)
    who = "" if num_members == num_seqs else f"of {num_seqs} "
    name = f"{num_members} {who}x {num_shared}"
    return line_of("attention_shared_prefix", name, batch.shared_calls(), floor_s, "attention_decode", batch.calls())
