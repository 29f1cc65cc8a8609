"""Paged attention: the prefill kernel against its reference, references against attention written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from manta.kernels import attention_decode as decode
from manta.kernels import attention_prefill as prefill
from manta.kernels import kv_cache
from tests.kernels.paged import random_caches

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Sequences as (queries, tokens in all)."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    page: int = 16
    dtype: torch.dtype = F32

    def __str__(self) -> str:
        sequences = ".".join(f"{queries}of{length}" for queries, length in self.sequences[:4])
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{sequences}-h{self.heads}/{self.kv_heads}-d{self.dim}-p{self.page}-{dtype}"


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    scale: float

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.key_cache, self.value_cache, self.block_table


def make_batch(case: Case, device: torch.device, *, padding_tokens: int = 0) -> Batch:
    """Random batch. Every slot that no token wrote is NaN; unused entries of the table name a block full of NaN."""
    lengths = [length for _, length in case.sequences]
    pages = [-(-length // case.page) for length in lengths]
    num_blocks = sum(pages) + 1
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    filled = [0] * num_blocks
    table = torch.zeros(len(lengths), max(pages) + 3, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        for index in range(count):
            block = free.pop()
            table[row, index] = block
            filled[block] = min(case.page, length - index * case.page)
    queries = [count for count, _ in case.sequences]
    query_start = torch.tensor([0, *queries]).cumsum(0).int()
    # q is a view of a fused projection, as in the engine.
    fused = torch.randn(sum(queries) + padding_tokens, case.heads + 2 * case.kv_heads, case.dim)
    caches = random_caches(filled, case.page, case.kv_heads, case.dim, case.dtype, device)
    return Batch(
        fused.to(device, case.dtype)[:, : case.heads],
        caches[0],
        caches[1],
        table.to(device),
        query_start.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        case.dim**-0.5,
    )


def written_out(batch: Batch) -> torch.Tensor:
    """Attention of each query head in turn, straight from the definition, in fp64."""
    out = torch.full(batch.q.shape, torch.nan, dtype=torch.float64)
    starts = batch.query_start.tolist()
    group = batch.q.shape[1] // batch.key_cache.shape[2]
    for row, length in enumerate(batch.seq_lens.tolist()):
        num_queries = starts[row + 1] - starts[row]
        keys = batch.key_cache[batch.block_table[row].long()].flatten(0, 1)[:length].double().cpu()
        values = batch.value_cache[batch.block_table[row].long()].flatten(0, 1)[:length].double().cpu()
        for query in range(num_queries):
            seen = length - num_queries + query + 1
            for head in range(batch.q.shape[1]):
                vector = batch.q[starts[row] + query, head].double().cpu()
                weights = (keys[:seen, head // group] @ vector * batch.scale).softmax(0)
                out[starts[row] + query, head] = weights @ values[:seen, head // group]
    return out


def prefill_reference(batch: Batch) -> torch.Tensor:
    """The reference in exact fp32, also on a GPU (where other implementations of SDPA may round inputs)."""
    with sdpa_kernel(SDPBackend.MATH):
        return prefill.attention_prefill_reference(
            batch.q, *batch.paged, batch.query_start, batch.seq_lens, batch.scale
        )


def run_prefill(batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
    queries = int(batch.query_start.diff().max())
    longest = int(batch.seq_lens.max())
    return prefill.attention_prefill(
        batch.q, *batch.paged, batch.query_start, batch.seq_lens, batch.scale, out,
        max_query_len=queries, max_seq_len=longest,
    )  # fmt: skip


PREFILL_CASES = [
    Case(((7, 7),)),
    Case(((33, 33), (1, 20), (0, 5), (5, 50), (1, 1), (40, 47))),
    Case(((20, 37),), heads=4, kv_heads=4, page=32),
    Case(((21, 21), (2, 70)), heads=8, kv_heads=2, page=64, dtype=F16),
    Case(((70, 70),), heads=4, kv_heads=1, page=64, dtype=BF16),
    Case(((18, 90), (1, 100)), heads=4, kv_heads=2, dim=128, page=64, dtype=BF16),
    Case(((9, 30),), heads=4, kv_heads=2, dim=80, page=16, dtype=BF16),
]
GPU_PREFILL_CASES = [
    Case(((2048, 2048),), 32, 8, 128, 64, BF16),
    Case(((1000, 3000), (1, 777), (0, 64), (17, 17), (333, 333), (1, 1)), 32, 8, 128, 64, BF16),
    Case(((500, 1500), (1, 1000), (129, 129)), 32, 8, 128, 16, BF16),
    Case(((500, 1500), (1, 1000), (129, 129)), 32, 8, 128, 32, F16),
    Case(((300, 700), (1, 300), (64, 64)), 32, 8, 128, 64, F32),
    Case(((300, 700), (1, 300), (65, 65)), 9, 3, 64, 16, F32),
    Case(((300, 700), (1, 300), (65, 65)), 9, 3, 64, 64, BF16),
    Case(((130, 700), (1, 300)), 16, 2, 256, 64, BF16),
    Case(((130, 700), (1, 300)), 32, 32, 96, 64, BF16),
    Case(tuple((1, 40 + 7 * i) for i in range(64)), 32, 8, 128, 64, BF16),
]


def with_gpu(cases: list[Case], larger: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in cases] + [
        pytest.param(case, id=str(case), marks=pytest.mark.gpu) for case in larger
    ]


@pytest.mark.parametrize("case", with_gpu(PREFILL_CASES, GPU_PREFILL_CASES))
def test_prefill(case: Case, device: torch.device) -> None:
    batch = make_batch(case, device)
    expected = prefill_reference(batch)
    assert expected.isfinite().all()
    assert_close(run_prefill(batch), expected, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


def test_prefill_leaves_padding_alone(device: torch.device) -> None:
    batch = make_batch(Case(((3, 3), (1, 9))), device, padding_tokens=2)
    out = torch.full(batch.q.shape, torch.nan, device=device)
    assert run_prefill(batch, out) is out
    assert out[:4].isfinite().all()
    assert out[4:].isnan().all()


def run_decode(batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
    workspace = decode.DecodeWorkspace.allocate(
        max_num_seqs=len(batch.seq_lens),
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.key_cache.shape[2],
        head_dim=batch.q.shape[2],
        device=batch.q.device,
    )
    longest = int(batch.seq_lens.max())
    return decode.attention_decode(
        batch.q, *batch.paged, batch.seq_lens, batch.scale, out, workspace=workspace, max_seq_len=longest
    )


@pytest.mark.gpu
def test_caches_of_more_than_two_billion_elements(device: torch.device) -> None:
    num_blocks, page, kv_heads, dim, length = 33_000, 64, 8, 128, 200
    caches = torch.zeros(2, num_blocks, page, kv_heads, dim, dtype=BF16, device=device)
    blocks = torch.tensor([num_blocks - 1, num_blocks - 3, num_blocks - 2, num_blocks - 7], device=device)
    token = torch.arange(length, device=device)
    slots = blocks[token // page] * page + token % page
    k, v = torch.randn(2, length, kv_heads, dim, device=device).to(BF16)
    kv_cache.store_kv(k, v, caches[0], caches[1], slots)
    assert_close(kv_cache.gather_kv(caches[1], blocks)[:length], v, rtol=0, atol=0)
    assert float(caches[0, : num_blocks - 7].abs().amax()) == 0
    q = torch.randn(length, 32, dim, device=device).to(BF16)
    start = torch.tensor([0, length], dtype=torch.int32, device=device)
    batch = Batch(q, caches[0], caches[1], blocks[None].int(), start, start[1:], dim**-0.5)
    expected = prefill_reference(batch)
    assert_close(run_prefill(batch), expected, rtol=2e-2, atol=2e-2)
    one = Batch(q[-1:], *batch.paged, start, start[1:], batch.scale)
    assert_close(run_decode(one), expected[-1:], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page", [16, 32, 64])
def test_references_are_attention(page: int) -> None:
    torch.manual_seed(1)
    case = Case(((33, 33), (1, 20), (0, 5), (5, 50), (1, 1), (40, 47), (1, 300)), page=page)
    batch = make_batch(case, torch.device("cpu"))
    expected = written_out(batch).float()
    actual = prefill.attention_prefill_reference(batch.q, *batch.paged, batch.query_start, batch.seq_lens, batch.scale)
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(40,), (40, 40), (3, 40, 0, 300, 17)])
def test_decode_reference_is_attention(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    batch = make_batch(Case(tuple((1, max(1, length)) for length in lengths)), torch.device("cpu"))
    batch.seq_lens[:] = torch.tensor(lengths)
    out = torch.full(batch.q.shape, torch.nan)
    decode.attention_decode_reference(batch.q, *batch.paged, batch.seq_lens, batch.scale, out)
    batch.seq_lens.clamp_(min=1)
    expected = written_out(batch).float()
    live = torch.tensor(lengths) > 0
    assert_close(out[live], expected[live], rtol=1e-5, atol=1e-5)
    assert out[~live].isnan().all()


def test_consecutive_blocks_are_not_copied() -> None:
    cache = torch.randn(8, 16, 3, 64)
    keys, values = decode.gather_equal(cache, cache, torch.tensor([[2, 3, 4]], dtype=torch.int32), 40)
    assert keys.data_ptr() == values.data_ptr() == cache[2].data_ptr()
    assert_close(keys[0], cache[2:5].flatten(0, 1)[:40], rtol=0, atol=0)
