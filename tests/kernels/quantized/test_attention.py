"""Attention over a cache in 8 bits: decode, shared prefixes and prefill against their references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from manta.kernels import attention_decode as decode
from manta.kernels import attention_prefill as prefill
from manta.kernels import attention_shared_prefix as shared
from manta.kernels import decode_schedule
from manta.kernels.attention_prefill_plan import PrefillPlan
from manta.kernels.quantized.kv_cache import CacheScales, quantize_heads
from tests.kernels import test_attention as prefills
from tests.kernels import test_attention_decode as decodes
from tests.kernels.test_attention_decode import BF16, F16, F32, LLAMA, TOLERANCE

DTYPES = [torch.int8, torch.float8_e4m3fn]
B = TypeVar("B", decodes.Batch, prefills.Batch)


def with_codes(batch: B, dtype: torch.dtype) -> tuple[B, CacheScales]:
    """The batch over codes of its caches. Slots that no token wrote have NaN for a scale and codes that are not 0."""
    codes, scales = [], []
    for cache in (batch.key_cache, batch.value_cache):
        unwritten = cache.isnan().any(-1)
        of_heads, scale = quantize_heads(cache.float().nan_to_num(1.0), dtype)
        codes.append(of_heads)
        scales.append(scale.masked_fill(unwritten, torch.nan).transpose(1, 2).contiguous())
    return replace(batch, key_cache=codes[0], value_cache=codes[1]), CacheScales(*scales)


def workspace_of(batch: decodes.Batch) -> decode.DecodeWorkspace:
    return decode.DecodeWorkspace.allocate(
        max_num_seqs=len(batch.seq_lens),
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.key_cache.shape[2],
        head_dim=batch.q.shape[2],
        device=batch.q.device,
    )


def check_decode(case: decodes.Case, dtype: torch.dtype, device: torch.device, *, shares: bool = False) -> None:
    batch, scales = with_codes(decodes.make_batch(case, device), dtype)
    places = (*batch.paged, batch.seq_lens, batch.scale)
    with sdpa_kernel(SDPBackend.MATH):
        expected = decode.attention_decode_reference(batch.q, *places, None, batch.table_rows, scales)
    out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype, device=device)
    options: dict[str, Any] = {"max_seq_len": batch.longest, "table_rows": batch.table_rows, "scales": scales}
    options["workspace"] = workspace_of(batch)
    if shares:
        shared.attention_shared_prefix(batch.q, *places, out, **options, prefix=batch.prefix)
    else:
        decode.attention_decode(batch.q, *places, out, **options)
    live = batch.seq_lens > 0
    tolerance = TOLERANCE[batch.q.dtype]
    assert expected[live].isfinite().all()
    assert_close(out[live], expected[live], rtol=tolerance, atol=tolerance)
    assert out[~live].isnan().all()


DECODES = [
    decodes.Case((1, 20, 75)),
    decodes.Case((70, 0, 64, 129), heads=8, kv_heads=2, page=64, dtype=F16),
    decodes.Case((0, 70, 33), heads=4, kv_heads=1, dim=128, page=64, dtype=BF16),
    decodes.Case((50,), heads=4, kv_heads=2, dim=80, page=16, dtype=BF16),
]
GPU_DECODES = [
    decodes.Case((1024,), *LLAMA, BF16),
    decodes.Case((33000,), *LLAMA, BF16),
    decodes.Case(tuple(31 * row for row in range(64)), *LLAMA, BF16),
    decodes.Case((*(1 + 31 * row for row in range(63)), 9000), 32, 8, 128, 16, BF16),
    decodes.Case(tuple(max(0, 30 * (row % 100) - 300) for row in range(300)), *LLAMA, BF16),
    decodes.Case(tuple(1 + 97 * row for row in range(8)), 32, 8, 128, 32, F16),
    decodes.Case(tuple(1 + 97 * row for row in range(8)), *LLAMA, F32),
    decodes.Case(tuple(1 + 97 * row for row in range(8)), 9, 3, 64, 64, BF16),
    decodes.Case(tuple(1 + 97 * row for row in range(8)), 16, 2, 256, 64, BF16),
    decodes.Case(tuple(1 + 97 * row for row in range(8)), 32, 32, 96, 64, BF16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", decodes.with_gpu(DECODES, GPU_DECODES))
def test_decode(case: decodes.Case, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        decodes.force(monkeypatch, device)
    check_decode(case, dtype, device)


@pytest.mark.parametrize("config", decodes.CONFIGS)
@pytest.mark.parametrize("case", decodes.with_gpu(DECODES[1:2], [GPU_DECODES[0], GPU_DECODES[2]]))
def test_decode_in_every_way(
    case: decodes.Case, config: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes.force(monkeypatch, device, **decodes.CONFIGS[config])
    check_decode(case, torch.float8_e4m3fn, device)


PREFIXES = [
    decodes.Case((40, 33, 0, 20, 75), prefix=32, members=(4, 0, 1)),
    decodes.Case((0, 80, 0, 70), prefix=64, members=(1, 2, 3), heads=4, kv_heads=2, page=64, dtype=BF16),
    decodes.Case((70, 50), prefix=48, members=(0, 1), heads=4, kv_heads=2, dim=80, dtype=BF16),
]
GPU_PREFIXES = [
    decodes.Case(tuple(4096 + 64 + row % 33 for row in range(64)), *LLAMA, BF16, 4096, tuple(range(64))),
    decodes.Case(tuple(1024 + 37 * row for row in range(64)), *LLAMA, BF16, 1024, tuple(range(0, 64, 3))),
    decodes.Case(tuple(500 + row for row in range(64)), 32, 8, 128, 16, F16, 496, tuple(range(64))),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", decodes.with_gpu(PREFIXES, GPU_PREFIXES))
def test_shared_prefix(
    case: decodes.Case, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        decodes.force(monkeypatch, device)
        monkeypatch.setattr(decode_schedule, "prefix_slots", lambda num_seqs, *_: max(3, num_seqs))
    check_decode(case, dtype, device, shares=True)


def run_prefill(batch: prefills.Batch, scales: CacheScales, **options: Any) -> torch.Tensor:
    return prefill.attention_prefill(
        batch.q, *batch.paged, batch.query_start, batch.seq_lens, batch.scale, scales=scales,
        max_query_len=int(batch.query_start.diff().max()), max_seq_len=int(batch.seq_lens.max()), **options,
    )  # fmt: skip


PREFILLS = [
    prefills.Case(((33, 33), (1, 20), (0, 5), (5, 50), (1, 1))),
    prefills.Case(((21, 21), (2, 70)), heads=8, kv_heads=2, page=64, dtype=F16),
    prefills.Case(((18, 90), (1, 100)), heads=4, kv_heads=2, dim=128, page=64, dtype=BF16),
    prefills.Case(((9, 30),), heads=4, kv_heads=2, dim=80, page=16, dtype=BF16),
]
GPU_PREFILLS = [
    prefills.Case(((2048, 2048),), 32, 8, 128, 64, BF16),
    prefills.Case(((1000, 3000), (1, 777), (0, 64), (17, 17), (333, 333), (1, 1)), 32, 8, 128, 64, BF16),
    prefills.Case(((500, 1500), (1, 1000), (129, 129)), 32, 8, 128, 16, F16),
    prefills.Case(((300, 700), (1, 300), (64, 64)), 32, 8, 128, 64, F32),
    prefills.Case(((130, 700), (1, 300)), 16, 2, 256, 64, BF16),
    prefills.Case(((130, 700), (1, 300)), 32, 32, 96, 64, BF16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", prefills.with_gpu(PREFILLS, GPU_PREFILLS))
def test_prefill(case: prefills.Case, dtype: torch.dtype, device: torch.device) -> None:
    batch, scales = with_codes(prefills.make_batch(case, device), dtype)
    places = (*batch.paged, batch.query_start, batch.seq_lens, batch.scale)
    with sdpa_kernel(SDPBackend.MATH):
        expected = prefill.attention_prefill_reference(batch.q, *places, scales=scales)
    assert expected.isfinite().all()
    tolerance = TOLERANCE[case.dtype]
    assert_close(run_prefill(batch, scales), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", [(4, 2, 64), *(pytest.param(one, marks=pytest.mark.gpu) for one in [(32, 8, 128)])])
def test_a_chunk_gives_what_the_whole_gives(model: tuple[int, int, int], device: torch.device) -> None:
    """Bit by bit in the deterministic mode: codes are read alike by every query."""
    heads, kv_heads, dim = model
    case = prefills.Case(((70, 70),), heads, kv_heads, dim, page=64, dtype=BF16)
    batch, scales = with_codes(prefills.make_batch(case, device), torch.float8_e4m3fn)
    whole = run_prefill(batch, scales, deterministic=True)
    starts = torch.tensor([0, 29], dtype=torch.int32, device=device)
    tail = replace(batch, q=batch.q[41:], query_start=starts)
    assert torch.equal(run_prefill(tail, scales, deterministic=True), whole[41:])


def test_kernels_that_copy_boxes_are_not_chosen(device: torch.device) -> None:
    batch, scales = with_codes(prefills.make_batch(PREFILLS[1], device), torch.int8)
    with pytest.raises(AssertionError, match="read no codes"):
        run_prefill(batch, scales, plan=PrefillPlan("descriptors", 64, 64, 4, 3))


def test_a_fp32_model_reads_codes_exactly(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        decodes.force(monkeypatch, device)
    check_decode(decodes.Case((33, 7), heads=4, kv_heads=2, dim=64, page=32, dtype=F32), torch.int8, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_seqs", [1, 64])
def test_a_graph_serves_other_lengths(num_seqs: int, dtype: torch.dtype, device: torch.device) -> None:
    """Captured once, replayed with other lengths, blocks and queries over the same memory."""
    case = decodes.Case(tuple(700 + 97 * row % 1500 for row in range(num_seqs)), *LLAMA, BF16)
    batch, scales = with_codes(decodes.make_batch(case, device), dtype)
    out, workspace = torch.full(batch.q.shape, torch.nan, device=device, dtype=BF16), workspace_of(batch)
    q = batch.q.clone()
    places = (*batch.paged, batch.seq_lens, batch.scale)

    def launch() -> None:
        decode.attention_decode(
            q, *places, out, workspace=workspace, max_seq_len=batch.longest, table_rows=batch.table_rows, scales=scales
        )

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for cut in (0, 130, 699):
        batch.seq_lens.sub_(cut).clamp_(min=1)
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        expected = decode.attention_decode_reference(q, *places, None, batch.table_rows, scales)
        assert_close(out, expected, rtol=2e-2, atol=2e-2)
