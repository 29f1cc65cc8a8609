"""Decode attention, with and without a shared prefix: kernels against the reference, cuts against arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from triton import language as tl

from manta.kernels import attention_decode as decode
from manta.kernels import attention_shared_prefix as shared
from manta.kernels import decode_schedule, runtime
from manta.kernels.decode_schedule import DecodeConfig, DecodeShape, DecodeWorkspace
from manta.kernels.rope import rope_and_store
from tests.kernels.paged import random_caches

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LLAMA = (32, 8, 128, 64)


@dataclass(frozen=True)
class Case:
    """Rows of these lengths; the first `members` (all: None) start with the same `prefix` tokens."""

    lengths: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    page: int = 16
    dtype: torch.dtype = F32
    prefix: int = 0
    members: tuple[int, ...] | None = None

    def __str__(self) -> str:
        lengths = ".".join(str(length) for length in self.lengths[:4])
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{len(self.lengths)}x{lengths}-h{self.heads}/{self.kv_heads}-d{self.dim}-p{self.page}-{dtype}"
        return name if self.members is None else f"{name}-shared{self.prefix}by{len(self.members)}"


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    table_rows: torch.Tensor
    seq_lens: torch.Tensor
    prefix: shared.SharedPrefix
    scale: float

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.key_cache, self.value_cache, self.block_table

    @property
    def longest(self) -> int:
        return self.block_table.shape[1] * self.key_cache.shape[1]


def make_batch(case: Case, device: torch.device) -> Batch:
    """Random batch in a table of more rows. Slots that no token wrote are NaN; unused entries name a block of NaN."""
    num_rows, page = len(case.lengths), case.page
    members: tuple[int, ...] = case.members or ()
    pages = [-(-length // page) for length in case.lengths]
    num_blocks = sum(pages) + 1
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    filled = [0] * num_blocks
    table = torch.zeros(num_rows + 2, max(pages) + 3, dtype=torch.int32)
    table_rows = torch.randperm(num_rows + 2)[:num_rows].int()
    for row in (*members[:1], *(row for row in range(num_rows) if row not in members[:1])):
        length = case.lengths[row]
        for index in range(pages[row]):
            if row in members[1:] and index < case.prefix // page:
                table[table_rows[row], index] = table[table_rows[members[0]], index]
                continue
            block = free.pop()
            table[table_rows[row], index] = block
            filled[block] = min(page, length - index * page)
    # q is a view of a fused projection, as in the engine.
    fused = torch.randn(num_rows, case.heads + 2 * case.kv_heads, case.dim)
    caches = random_caches(filled, page, case.kv_heads, case.dim, case.dtype, device)
    is_member = torch.tensor([row in members for row in range(num_rows)])
    return Batch(
        fused.to(device, case.dtype)[:, : case.heads],
        caches[0],
        caches[1],
        table.to(device),
        table_rows.to(device),
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        shared.SharedPrefix(
            torch.tensor([case.prefix], dtype=torch.int32, device=device),
            table_rows[members[0] : members[0] + 1].to(device) if members else table_rows[:1].to(device),
            is_member.int().to(device),
        ),
        case.dim**-0.5,
    )


def reference(batch: Batch) -> torch.Tensor:
    """In exact fp32, also on a GPU (where other implementations of SDPA may round inputs); NaN in rows of padding."""
    out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype, device=batch.q.device)
    with sdpa_kernel(SDPBackend.MATH):
        return decode.attention_decode_reference(
            batch.q, *batch.paged, batch.seq_lens, batch.scale, out, batch.table_rows
        )


def workspace_for(batch: Batch) -> DecodeWorkspace:
    return DecodeWorkspace.allocate(
        max_num_seqs=len(batch.seq_lens),
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.key_cache.shape[2],
        head_dim=batch.q.shape[2],
        device=batch.q.device,
    )


def run(
    batch: Batch,
    *,
    shares: bool,
    workspace: DecodeWorkspace | None = None,
    new: decode.NewTokens | None = None,
) -> torch.Tensor:
    out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype, device=batch.q.device)
    workspace = workspace or workspace_for(batch)
    places = (batch.q, *batch.paged, batch.seq_lens, batch.scale, out)
    options: dict[str, Any] = {"max_seq_len": batch.longest, "table_rows": batch.table_rows, "workspace": workspace}
    if shares:
        assert shared.attention_shared_prefix(*places, **options, prefix=batch.prefix) is out
    else:
        assert decode.attention_decode(*places, **options, new=new) is out
    assert int(workspace.arrivals.abs().max()) == 0
    return out


def check(batch: Batch, *, shares: bool, workspace: DecodeWorkspace | None = None) -> None:
    expected, actual = reference(batch), run(batch, shares=shares, workspace=workspace)
    live = batch.seq_lens > 0
    assert expected[live].isfinite().all()
    assert actual[~live].isnan().all()
    tolerance = TOLERANCE[batch.q.dtype]
    assert_close(actual[live], expected[live], rtol=tolerance, atol=tolerance)


def force(monkeypatch: pytest.MonkeyPatch, device: torch.device, **changes: Any) -> None:
    """Change the default configurations; on the interpreter, which runs programs one by one, with few of them."""

    def config(num_seqs: int, shape: DecodeShape, device: torch.device) -> DecodeConfig:
        default = decode_schedule.default_config(num_seqs, shape, 132)
        few: dict[str, Any] = {"fill": min(4, default.fill)} if device.type == "cpu" else {}
        return replace(default, **(few | changes))

    monkeypatch.setattr(decode_schedule, "decode_config", config)


def with_gpu(cases: list[Case], larger: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in cases] + [
        pytest.param(case, id=str(case), marks=pytest.mark.gpu) for case in larger
    ]


CASES = [
    Case((1, 20, 75)),
    Case((100,), heads=4, kv_heads=4, page=32),
    Case((70, 0, 64, 129), heads=8, kv_heads=2, page=64, dtype=F16),
    Case((0, 70, 33), heads=4, kv_heads=1, dim=128, page=64, dtype=BF16),
    Case((50,), heads=4, kv_heads=2, dim=80, page=16, dtype=BF16),
]
GPU_CASES = [
    Case((1024,), *LLAMA, BF16),
    Case((33000,), *LLAMA, BF16),
    Case((33000,), 8, 1, 128, 64, BF16),
    Case(tuple(1 + 97 * i for i in range(8)), *LLAMA, BF16),
    Case(tuple(31 * i for i in range(64)), *LLAMA, BF16),
    Case((*(1 + 31 * i for i in range(63)), 9000), 32, 8, 128, 16, BF16),
    Case(tuple(max(0, 30 * (i % 100) - 300) for i in range(300)), *LLAMA, BF16),
    Case(tuple(1 + i % 199 for i in range(1024)), 8, 1, 128, 64, BF16),
    Case(tuple(1 + 97 * i for i in range(8)), 32, 8, 128, 32, F16),
    Case(tuple(1 + 97 * i for i in range(8)), *LLAMA, F32),
    Case(tuple(1 + 97 * i for i in range(8)), 9, 3, 64, 16, F32),
    Case(tuple(1 + 97 * i for i in range(8)), 9, 3, 64, 64, BF16),
    Case(tuple(1 + 97 * i for i in range(8)), 16, 2, 256, 64, BF16),
    Case(tuple(1 + 97 * i for i in range(8)), 32, 32, 96, 64, BF16),
]
CONFIGS: dict[str, dict[str, Any]] = {
    "whole": {"fill": 1, "percent": 1},
    "cut": {"fill": 6, "percent": 300, "merges_apart": True},
    "cut-merged-by-the-last": {"fill": 6, "percent": 300, "merges_apart": False},
    "swapped": {"fill": 2, "swapped": True},
    "inline": {"inline_ptx": True},
}


@pytest.mark.parametrize("case", with_gpu(CASES, GPU_CASES))
def test_decode(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        force(monkeypatch, device)
    check(make_batch(case, device), shares=False)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", with_gpu([CASES[0], *CASES[2:4]], [*GPU_CASES[3:6], GPU_CASES[6]]))
def test_decode_in_every_way(case: Case, config: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, device, **CONFIGS[config])
    check(make_batch(case, device), shares=False)


@pytest.mark.parametrize("turned", ["whole", "half"])
@pytest.mark.parametrize("case", with_gpu(CASES, GPU_CASES))
def test_new_tokens_are_turned_and_stored_as_by_a_kernel_of_their_own(
    case: Case, turned: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        force(monkeypatch, device)
    batch = make_batch(case, device)
    rows, page = len(case.lengths), case.page
    fused = torch.randn(rows, case.heads + 2 * case.kv_heads, case.dim, device=device).to(case.dtype)
    cos_sin = torch.randn(max(case.lengths), case.dim // (1 if turned == "whole" else 2), device=device)
    live = batch.seq_lens > 0
    positions = batch.seq_lens.long().clamp_min(1) - 1
    blocks = batch.block_table[batch.table_rows].long().gather(1, positions[:, None] // page)[:, 0]
    slots = torch.where(live, blocks * page + positions % page, -1)
    for cache in (batch.key_cache, batch.value_cache):
        cache.view(-1, case.kv_heads, case.dim)[slots[live]] = torch.nan

    before = replace(batch, key_cache=batch.key_cache.clone(), value_cache=batch.value_cache.clone())
    q, k, v = fused.clone().split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    rope_and_store(q, k, v, positions, cos_sin, before.key_cache, before.value_cache, slots)
    expected = run(replace(before, q=q), shares=False)

    q, k, v = fused.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    kept = fused.clone()
    actual = run(replace(batch, q=q), shares=False, new=decode.NewTokens(k, v, cos_sin))
    assert actual[live].isfinite().all()
    exact: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    assert_close(actual, expected, **exact)
    assert_close(batch.key_cache, before.key_cache, **exact)
    assert_close(batch.value_cache, before.value_cache, **exact)
    assert torch.equal(fused, kept)


@pytest.mark.parametrize("merges_apart", [True, False])
def test_long_row_among_short_ones(merges_apart: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into more parts than one step of the merge takes; the workspace serves one batch after the other."""
    force(monkeypatch, device, fill=40, merges_apart=merges_apart)
    long = Case((2, 650, 0, 3), heads=2, kv_heads=1, page=16)
    batch = make_batch(long, device)
    workspace = workspace_for(batch)
    for case in (long, replace(long, lengths=(40, 0, 600, 1))):
        check(make_batch(case, device), shares=False, workspace=workspace)


PREFIX_CASES = [
    Case((40, 33, 75), prefix=32, members=(0, 1, 2)),
    Case((40, 33, 0, 20, 75), prefix=32, members=(4, 0, 1)),
    Case((32, 33, 50), prefix=32, members=(0, 1)),  # the first has no keys of its own
    Case((32, 32), prefix=32, members=(0, 1)),
    Case((40, 33), prefix=0, members=(0, 1)),
    Case((40, 33), prefix=32, members=()),
    Case((0, 80, 0, 70), prefix=64, members=(1, 2, 3), heads=4, kv_heads=2, page=64, dtype=BF16),
    Case((200, 149, 130), prefix=128, members=(0, 2), heads=8, kv_heads=1, page=64, dtype=F16),
    Case((70, 50), prefix=48, members=(0, 1), heads=4, kv_heads=2, dim=80, dtype=BF16),
    Case(tuple(17 + row % 5 for row in range(40)), prefix=16, members=tuple(range(3, 40)), heads=2, kv_heads=1),
]
GPU_PREFIX_CASES = [
    Case(tuple(4096 + 64 + row % 33 for row in range(64)), *LLAMA, BF16, 4096, tuple(range(64))),
    Case(tuple(8192 + row for row in range(32)), *LLAMA, BF16, 8192, tuple(range(1, 32))),
    Case(tuple(1024 + 37 * row for row in range(64)), *LLAMA, BF16, 1024, tuple(range(0, 64, 3))),
    Case(tuple((2048 + row) * (row % 9 != 0) for row in range(300)), *LLAMA, BF16, 2048, tuple(range(2, 300, 2))),
    Case(tuple(700 + row for row in range(1000)), 8, 1, 128, 64, BF16, 640, tuple(range(1000))),
    Case((33000, 32768), *LLAMA, BF16, 32768, (0, 1)),
    Case(tuple(500 + row for row in range(64)), 32, 8, 128, 16, F16, 496, tuple(range(64))),
    Case(tuple(500 + row for row in range(30)), *LLAMA, F32, 448, tuple(range(30))),
    Case(tuple(500 + row for row in range(30)), 9, 3, 64, 32, BF16, 480, tuple(range(30))),
    Case(tuple(500 + row for row in range(30)), 16, 2, 256, 64, BF16, 448, tuple(range(30))),
]


@pytest.mark.parametrize("case", with_gpu(PREFIX_CASES, GPU_PREFIX_CASES))
def test_shared_prefix(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        force(monkeypatch, device)
        monkeypatch.setattr(decode_schedule, "prefix_slots", lambda num_seqs, *_: max(3, num_seqs))
    check(make_batch(case, device), shares=True)


def test_shared_prefix_with_swapped_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, device, swapped=True)
    monkeypatch.setattr(decode_schedule, "prefix_slots", lambda *_: 3)
    check(make_batch(PREFIX_CASES[1], device), shares=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("num_seqs", [1, 5, 64, 256])
def test_graph_follows_its_inputs(num_seqs: int, shares: bool, device: torch.device) -> None:
    """A captured launch serves other lengths, blocks, queries and members than the capture's, and rows of padding."""
    lengths = [700 + 97 * row % 1500 for row in range(num_seqs)]
    cases = [
        Case(tuple(lengths), *LLAMA, BF16, 128, tuple(range(0, num_seqs, 2))),
        Case((0, *lengths[:0:-1]), *LLAMA, BF16, 640, tuple(range(num_seqs // 3, num_seqs))),
    ]
    first, second = (make_batch(case, device) for case in cases)
    workspace = workspace_for(first)
    num_blocks = max(len(first.key_cache), len(second.key_cache))
    caches = torch.full((2, num_blocks, *first.key_cache.shape[1:]), torch.nan, device=device, dtype=BF16)
    width = max(first.block_table.shape[1], second.block_table.shape[1])
    table = torch.zeros(num_seqs + 2, width, dtype=torch.int32, device=device)
    place = replace(
        first, key_cache=caches[0], value_cache=caches[1], block_table=table, q=first.q.clone(),
        table_rows=first.table_rows.clone(), seq_lens=first.seq_lens.clone(),
        prefix=shared.SharedPrefix(*(value.clone() for value in vars(first.prefix).values())),
    )  # fmt: skip
    out = torch.full(place.q.shape, torch.nan, device=device, dtype=BF16)

    def fill(batch: Batch) -> None:
        caches[0, : len(batch.key_cache)], caches[1, : len(batch.key_cache)] = batch.key_cache, batch.value_cache
        table[:, : batch.block_table.shape[1]] = batch.block_table
        for name in ("q", "table_rows", "seq_lens"):
            getattr(place, name).copy_(getattr(batch, name))
        for name in ("num_tokens", "table_row", "members"):
            getattr(place.prefix, name).copy_(getattr(batch.prefix, name))

    def launch() -> None:
        places = (place.q, *place.paged, place.seq_lens, place.scale, out)
        options: dict[str, Any] = {"workspace": workspace, "max_seq_len": place.longest}
        if shares:
            shared.attention_shared_prefix(*places, **options, table_rows=place.table_rows, prefix=place.prefix)
        else:
            decode.attention_decode(*places, **options, table_rows=place.table_rows)

    fill(first)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for batch in (second, first):
        fill(batch)
        out.fill_(torch.nan)
        graph.replay()
        live = batch.seq_lens > 0
        assert_close(out[live], reference(batch)[live], rtol=2e-2, atol=2e-2)
        assert out[~live].isnan().all()


@pytest.mark.parametrize("lengths", [[1], [0], [130], [0, 5, 17, 0, 400], [16] * 20, [0] * 30 + [7] * 40])
@pytest.mark.parametrize(("fill", "percent"), [(1, 1), (5, 67), (40, 200)])
def test_parts_cover_each_key_once(lengths: list[int], fill: int, percent: int, device: torch.device) -> None:
    """Every program finds its part, all parts together are the sequences, and those beyond them find nothing."""
    config = DecodeConfig(16, 4, 3, fill, percent)
    num_seqs = len(lengths)
    num_parts = num_seqs + config.spare(num_seqs)
    found = torch.full((num_parts, 3), -1, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    _find_kernel[(num_parts,)](
        seq_lens, found, num_seqs, fill, percent, TILE=16, BLOCK_SEQS=decode_schedule.block_seqs(num_seqs)
    )
    expected: list[tuple[int, int, int]] = []
    tiles = [-(-length // 16) for length in lengths]
    live = sum(count > 0 for count in tiles)
    size = max(1, -(-sum(tiles) // max(1, fill, live * percent // 100)))
    for seq, count in enumerate(tiles):
        parts = -(-count // size)
        expected += [(seq, len(expected), parts)] * parts if parts == 1 else []
        if parts > 1:
            first = len(expected)
            expected += [(seq, first, parts)] * parts
    assert len(expected) <= num_parts
    rows = [tuple(row) for row in found.tolist()]
    assert rows[: len(expected)] == expected
    assert all(row[0] >= num_seqs for row in rows[len(expected) :])


@runtime.jit(do_not_specialize=["num_seqs", "fill", "percent"])
def _find_kernel(seq_lens_ptr, out_ptr, num_seqs, fill, percent, TILE: tl.constexpr, BLOCK_SEQS: tl.constexpr):
    pid = tl.program_id(0)
    seq, first, parts = decode_schedule.find_part(pid, seq_lens_ptr, None, 0, num_seqs, fill, percent, TILE, BLOCK_SEQS)
    tl.store(out_ptr + 3 * pid, seq)
    tl.store(out_ptr + 3 * pid + 1, first)
    tl.store(out_ptr + 3 * pid + 2, parts)


def test_defaults_fill_the_device_and_cut_only_long_rows_of_large_batches() -> None:
    shape = DecodeShape(8, 4, 128, 2, 64)
    spare = {n: decode_schedule.default_config(n, shape, 132).spare(n) for n in (1, 4, 8, 16, 32, 256, 1024)}
    assert spare == {1: 17, 4: 17, 8: 17, 16: 32, 32: 21, 256: 171, 1024: 686}


def test_table_entry_is_the_first_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = DecodeShape(8, 4, 128, 2, 64)
    of_16 = {"rows": 16, "tile": 64, "num_warps": 4, "num_stages": 5, "fill": 9, "percent": 10, "share": 0.5}
    rest = {"tile": 32, "num_warps": 2, "num_stages": 3, "fill": 1, "percent": 50, "swapped": True}
    monkeypatch.setattr(runtime, "tuned_table", lambda op, device: {shape.key: [of_16, rest]})
    device = torch.device("cpu")
    assert decode_schedule.decode_config(16, shape, device) == DecodeConfig(64, 4, 5, 9, 10)
    assert decode_schedule.decode_config(17, shape, device) == DecodeConfig(32, 2, 3, 1, 50, swapped=True)
    other = replace(shape, page=16)
    assert decode_schedule.decode_config(16, other, device) == decode_schedule.default_config(16, other, 132)


@pytest.mark.parametrize("max_num_seqs", [1, 7, 24, 25, 1024])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (32, 32)])
def test_workspace_has_room_for_every_batch(max_num_seqs: int, heads: int, kv_heads: int) -> None:
    device = torch.device("cpu")
    workspace = DecodeWorkspace.allocate(
        max_num_seqs=max_num_seqs, num_heads=heads, num_kv_heads=kv_heads, head_dim=16, device=device
    )
    for shape in (DecodeShape(kv_heads, heads // kv_heads, 16, itemsize, 16) for itemsize in (2, 4)):
        for num_seqs in range(1, max_num_seqs + 1):
            workspace.check(num_seqs, decode_schedule.num_partial(num_seqs, shape, device), kv_heads)


def test_pays_where_it_was_measured_to() -> None:
    assert shared.pays(64, 4096, 64)
    assert shared.pays(32, 8192, 32)
    assert not shared.pays(1, 100_000, 64)
    assert not shared.pays(64, 64, 64)
    assert not shared.pays(0, 0, 8)
