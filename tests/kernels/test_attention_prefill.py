"""Prefill attention: every kernel and plan against the reference, results that do not depend on the batch, plans."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from manta.kernels import attention_prefill as prefill
from manta.kernels import attention_prefill_plan as plans
from manta.kernels import runtime
from manta.kernels.attention_prefill_plan import PrefillPlan
from tests.kernels.test_attention import (
    BF16,
    F16,
    F32,
    TOLERANCE,
    Batch,
    Case,
    make_batch,
    prefill_reference,
)

SMALL = PrefillPlan("descriptors", 64, 64, 4, 3)
LARGE = PrefillPlan("descriptors", 128, 64, 8, 3, heads_first=False)
HOPPER = PrefillPlan("specialized", 128, 128, 4, 2)
PERSISTENT = replace(HOPPER, heads_first=False, persistent=True)
TURNS = replace(PERSISTENT, turns=True, pinned=True)
HOPPER_PLANS = [pytest.param(HOPPER, id="hopper"), pytest.param(PERSISTENT, id="persistent")]
HOPPER_PLANS += [pytest.param(TURNS, id="turns")]
GPU_PLANS = [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large"), *HOPPER_PLANS]
POINTERS = PrefillPlan("pointers", 64, 32, 4, 2)

RAGGED = ((1000, 3000), (1, 777), (0, 64), (17, 17), (333, 333), (1, 1), (64, 128), (200, 2001))


def run(batch: Batch, plan: PrefillPlan | None = None, **options: Any) -> torch.Tensor:
    return prefill.attention_prefill(
        batch.q, *batch.paged, batch.query_start, batch.seq_lens, batch.scale,
        max_query_len=int(batch.query_start.diff().max()), max_seq_len=int(batch.seq_lens.max()), plan=plan, **options,
    )  # fmt: skip


def needs_hopper(plan: PrefillPlan, device: torch.device) -> None:
    if plan.kernel == "specialized" and (device.type != "cuda" or runtime.capability(device) != 90):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("plan", [POINTERS, SMALL, LARGE], ids=lambda plan: f"{plan.kernel}-{plan.block_m}")
@pytest.mark.parametrize("page", [64, 128])
def test_plans(plan: PrefillPlan, page: int, device: torch.device) -> None:
    case = Case(((70, 130), (1, 65), (0, 9), (3, 3)), heads=4, kv_heads=2, page=page, dtype=BF16)
    batch = make_batch(case, device)
    assert_close(run(batch, plan), prefill_reference(batch), rtol=TOLERANCE[BF16], atol=TOLERANCE[BF16])


@pytest.mark.gpu
@pytest.mark.parametrize("plan", GPU_PLANS)
@pytest.mark.parametrize(
    "case",
    [
        Case(((2048, 2048),), 32, 8, 128, 64, BF16),
        Case(RAGGED, 32, 8, 128, 64, BF16),
        Case(RAGGED, 32, 8, 128, 128, F16),
        Case(RAGGED, 8, 1, 128, 64, BF16),
        Case(RAGGED, 9, 3, 64, 64, BF16),
        Case(RAGGED, 4, 4, 64, 64, F16),
        Case(((1, 1),), 32, 8, 128, 64, BF16),
        Case(tuple((1, 40 + 7 * i) for i in range(64)), 32, 8, 128, 64, BF16),
        Case(tuple((512, 512) for _ in range(16)), 32, 8, 128, 64, BF16),
    ],
    ids=str,
)
def test_plans_on_a_gpu(plan: PrefillPlan, case: Case, device: torch.device) -> None:
    needs_hopper(plan, device)
    batch = make_batch(case, device)
    assert_close(run(batch, plan), prefill_reference(batch), rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("deterministic", [False, True])
def test_table_rows_choose_the_blocks(deterministic: bool, device: torch.device) -> None:
    batch = make_batch(Case(((9, 20), (1, 33), (5, 5)), heads=4, kv_heads=2, page=16), device)
    expected = run(batch, deterministic=deterministic)
    order = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    table = torch.zeros(5, batch.block_table.shape[1], dtype=torch.int32, device=device)
    table[order] = batch.block_table
    for use_kernel in (True, False):
        shuffled = replace(batch, block_table=table)
        if use_kernel:
            actual = run(shuffled, deterministic=deterministic, table_rows=order)
        else:
            places = shuffled.query_start, shuffled.seq_lens, shuffled.scale
            actual = prefill.attention_prefill_reference(shuffled.q, *shuffled.paged, *places, table_rows=order)
        assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", HOPPER_PLANS)
def test_table_rows_on_a_gpu(plan: PrefillPlan, device: torch.device) -> None:
    needs_hopper(plan, device)
    batch = make_batch(Case(RAGGED, 32, 8, 128, 64, BF16), device)
    order = torch.randperm(len(RAGGED) + 2, device=device)[: len(RAGGED)].int()
    table = torch.zeros(len(RAGGED) + 2, batch.block_table.shape[1], dtype=torch.int32, device=device)
    table[order] = batch.block_table
    assert_close(run(replace(batch, block_table=table), plan, table_rows=order), run(batch, plan), rtol=0, atol=0)


def part_of(batch: Batch, row: int, begin: int, end: int) -> Batch:
    """The queries at positions begin to end of one sequence of `batch`, whose queries are the whole sequence."""
    start = int(batch.query_start[row])
    bounds = torch.tensor([0, end - begin], dtype=torch.int32, device=batch.q.device)
    return replace(
        batch,
        q=batch.q[start + begin : start + end],
        block_table=batch.block_table[row : row + 1],
        query_start=bounds,
        seq_lens=torch.tensor([end], dtype=torch.int32, device=batch.q.device),
    )


def check_invariance(batch: Batch, plan: PrefillPlan | None, cuts: tuple[int, ...]) -> None:
    """Whole sequences side by side, each alone, in chunks and by single queries: the same bits."""
    whole = run(batch, plan, deterministic=True)
    starts = batch.query_start.tolist()
    for row in range(len(starts) - 1):
        length = starts[row + 1] - starts[row]
        bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
        for begin, end in [(0, length), *pairwise(bounds)]:
            alone = run(part_of(batch, row, begin, end), plan, deterministic=True)
            assert torch.equal(alone, whole[starts[row] + begin : starts[row] + end]), (row, begin, end)


@pytest.mark.parametrize("plan", [None, SMALL, POINTERS], ids=["default", "descriptors", "pointers"])
def test_results_do_not_depend_on_the_batch(plan: PrefillPlan | None, device: torch.device) -> None:
    case = Case(((70, 70), (33, 33)), heads=4, kv_heads=2, dim=64, page=64, dtype=BF16)
    check_invariance(make_batch(case, device), plan, (1, 31, 32, 64, 69))


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [pytest.param(None, id="default"), *GPU_PLANS])
@pytest.mark.parametrize("model", [(32, 8, 128), (8, 1, 128), (9, 3, 64)], ids=str)
def test_results_do_not_depend_on_the_batch_on_a_gpu(
    plan: PrefillPlan | None, model: tuple[int, int, int], device: torch.device
) -> None:
    if plan is not None:
        needs_hopper(plan, device)
    lengths = (1, 5, 63, 64, 65, 127, 128, 129, 700, 2500)
    batch = make_batch(Case(tuple((length, length) for length in lengths), *model, 64, BF16), device)
    cuts = (1, 2, 3, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 129, 130, 255, 256, 511, 600, 1000, 2048, 2049, 2499)
    check_invariance(batch, plan, cuts)


@pytest.mark.gpu
def test_results_do_not_depend_on_the_batch_in_fp32(device: torch.device) -> None:
    batch = make_batch(Case(((300, 300), (65, 65)), 9, 3, 64, 16, F32), device)
    check_invariance(batch, None, (1, 2, 33, 64, 100, 256))


@pytest.mark.gpu
@pytest.mark.parametrize("plan", GPU_PLANS)
def test_graph_serves_other_batches(plan: PrefillPlan, device: torch.device) -> None:
    """A captured launch with room for 8 sequences and 700 tokens serves fewer; rows behind stay as they were."""
    needs_hopper(plan, device)
    batches = [
        make_batch(Case(sequences, 32, 8, 128, 64, BF16), device, padding_tokens=700 - sum(q for q, _ in sequences))
        for sequences in (((100, 900), (600, 600)), ((1, 40), (0, 1), (333, 1000), (17, 17), (1, 64)), ((1, 1),))
    ]
    blocks = max(len(batch.key_cache) for batch in batches)
    caches = torch.full((2, blocks, 64, 8, 128), torch.nan, dtype=BF16, device=device)
    q = torch.zeros(700, 32, 128, dtype=BF16, device=device)
    table = torch.zeros(8, 24, dtype=torch.int32, device=device)
    query_start = torch.zeros(9, dtype=torch.int32, device=device)
    seq_lens = torch.zeros(8, dtype=torch.int32, device=device)
    out = torch.full((700, 32, 128), torch.nan, dtype=BF16, device=device)

    def launch() -> None:
        prefill.attention_prefill(
            q, caches[0], caches[1], table, query_start, seq_lens, 128**-0.5, out,
            max_query_len=700, max_seq_len=1024, plan=plan,
        )  # fmt: skip

    launch()
    assert out.isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for batch in batches:
        rows, tokens = len(batch.seq_lens), int(batch.query_start[-1])
        q.copy_(batch.q)
        caches.fill_(torch.nan)
        caches[0, : len(batch.key_cache)] = batch.key_cache
        caches[1, : len(batch.key_cache)] = batch.value_cache
        table.zero_()[:rows, : batch.block_table.shape[1]] = batch.block_table
        query_start.fill_(tokens)[: rows + 1] = batch.query_start
        seq_lens.zero_()[:rows] = batch.seq_lens
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out[:tokens], prefill_reference(batch)[:tokens], rtol=TOLERANCE[BF16], atol=TOLERANCE[BF16])
        assert out[tokens:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("plan", GPU_PLANS)
def test_caches_of_more_than_two_billion_elements(plan: PrefillPlan, device: torch.device) -> None:
    """Slots and byte offsets far into a large pool."""
    needs_hopper(plan, device)
    small = make_batch(Case(((130, 300),), 32, 8, 128, 64, BF16), device)
    num_blocks = 2**31 // (64 * 8 * 128) + 20
    caches = torch.zeros(2, num_blocks, 64, 8, 128, dtype=BF16, device=device)
    caches[0, -len(small.key_cache) :] = small.key_cache
    caches[1, -len(small.key_cache) :] = small.value_cache
    far = replace(
        small,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=small.block_table + (num_blocks - len(small.key_cache)),
    )
    assert torch.equal(run(far, plan), run(small, plan))


def asked(**changes: Any) -> PrefillPlan:
    shape = {"head_dim": 128, "itemsize": 2, "group_size": 4, "page_size": 64, "max_seq_len": 600}
    return plans.plan_for.__wrapped__(**shape | {"deterministic": False, "device": torch.device("cpu")} | changes)


def test_plans_come_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"kernel": "descriptors", "block_m": 64, "tile": 64, "num_warps": 4, "num_stages": 3}
    long = {"kernel": "specialized", "block_m": 128, "tile": 128, "num_warps": 4, "num_stages": 2}
    table = {"128x4": [{"max_seq_len": 1024} | short, long], "128x4 deterministic": [long]}
    monkeypatch.setattr(runtime, "tuned_table", lambda op, device: {"attention_prefill": table}[op])
    assert asked() == PrefillPlan("descriptors", 64, 64, 4, 3)
    assert asked(max_seq_len=1025).kernel == "specialized"
    assert asked(deterministic=True) == asked(deterministic=True, max_seq_len=100_000)
    assert asked(deterministic=True).kernel == "specialized"
    assert asked(page_size=16).kernel == "pointers", "tiles of keys lie inside pages"
    assert asked(itemsize=4).kernel == "pointers"
    assert asked(group_size=8) == asked(group_size=8, max_seq_len=100_000) == SMALL_DEFAULT


SMALL_DEFAULT = PrefillPlan("descriptors", 64, 64, 4, 3, 3)


def test_hopper_kernel_is_for_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"kernel": "specialized", "block_m": 128, "tile": 128, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(runtime, "tuned_table", lambda op, device: {"128x4": [long]})
    for capability, kernel in ((80, "pointers"), (90, "specialized"), (100, "descriptors")):
        monkeypatch.setattr(runtime, "capability", lambda device, value=capability: value)
        assert asked().kernel == kernel


def test_shipped_tables_name_plans() -> None:
    for file in Path(runtime.TUNED_FOLDER).glob("*.json"):
        for entries in json.loads(file.read_text()).get("attention_prefill", {}).values():
            for entry in entries:
                PrefillPlan(**{name: value for name, value in entry.items() if name != "max_seq_len"})
            assert "max_seq_len" not in entries[-1], "the last entry is for all lengths"


@pytest.mark.gpu
@pytest.mark.parametrize("plan", HOPPER_PLANS)
def test_many_short_sequences_in_one_launch_give_the_same_each_time(plan: PrefillPlan, device: torch.device) -> None:
    """A program's items follow each other closely: the next one's queries must be there before they are used."""
    needs_hopper(plan, device)
    lengths = [20 + 131 * i % 900 for i in range(40)]
    batch = make_batch(Case(tuple((n, n) for n in lengths), 32, 8, 128, 64, BF16), device)
    expected = run(batch, SMALL)
    for _ in range(50):
        assert_close(run(batch, plan), expected, rtol=TOLERANCE[BF16], atol=TOLERANCE[BF16])


KEYLESS = [pytest.param(POINTERS, id="pointers"), pytest.param(SMALL, id="small")]
KEYLESS += [pytest.param(*plan.values, id=plan.id, marks=pytest.mark.gpu) for plan in HOPPER_PLANS]


@pytest.mark.parametrize("plan", KEYLESS)
def test_queries_of_a_sequence_without_keys_are_left_alone(plan: PrefillPlan, device: torch.device) -> None:
    """Also the first ones of a batch, where a graph's decodes stand, and more of them than a tile has."""
    needs_hopper(plan, device)
    batch = make_batch(
        Case(((70, 70), (40, 100), (1, 20), (5, 30)), 4, 2, 64 if device.type == "cpu" else 128, 64, BF16), device
    )
    expected = run(batch, SMALL)
    batch.seq_lens[0] = batch.seq_lens[2] = 0
    out = torch.full_like(batch.q, 7.0)
    run(batch, plan, out=out)
    real = [*range(70, 110), *range(111, 116)]
    assert_close(out[real], expected[real], rtol=TOLERANCE[BF16], atol=TOLERANCE[BF16])
    assert bool((out[:70] == 7.0).all())
    assert bool((out[110] == 7.0).all())
