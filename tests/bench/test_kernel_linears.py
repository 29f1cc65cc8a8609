"""The search for the linear layers' configurations: what is tried, what wins, what the table says. No kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manta.bench import kernel_linears, kernel_linears_tuning, kernel_timing
from manta.bench.kernel_candidates import SHARED_BYTES, candidates
from manta.bench.kernel_linears import Layer, Operands, layers_of, rank_layers_of
from manta.bench.kernel_linears_tuning import best_piece, entries_of, measure, variant
from manta.bench.kernel_timing import LLAMA_8B, LLAMA_70B_RANK, MODELS, RANKS_OF_TWO, ModelShape, Peaks
from manta.kernels import linear
from manta.kernels.gemm import GemmTiles
from manta.kernels.gemm_skinny import SkinnyTiles
from manta.kernels.gemv import GemvTiles

CPU = torch.device("cpu")
SKINNY, TILED = SkinnyTiles(64, 128, 4, 4, 2), GemmTiles(128, 256, 64, 8, 3)


def test_layers_have_the_models_sizes() -> None:
    def sizes(layers: list[Layer]) -> list[tuple[int, int]]:
        return [(layer.n_size, layer.k_size) for layer in layers]

    assert sizes(layers_of(LLAMA_8B)) == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    assert sizes(layers_of(LLAMA_70B_RANK)) == [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192)]


def test_a_rank_adds_nothing_by_itself_and_norms_nothing_twice() -> None:
    layers = rank_layers_of(RANKS_OF_TWO[0])
    found = [(layer.kind, layer.n_size, layer.k_size, layer.has_norm) for layer in layers]
    assert found == [
        ("plain", 3072, 4096, True),
        ("plain", 4096, 2048, False),
        ("gated", 14336, 4096, True),
        ("plain", 4096, 7168, False),
        ("plain", 64128, 4096, True),
    ]


def test_floors_are_bytes_for_few_rows_and_operations_for_many() -> None:
    layer, peaks = layers_of(LLAMA_8B)[0], Peaks(4e12, 8e14)
    assert layer.floor_s(peaks, 1) == pytest.approx(2 * 6144 * 4096 / 4e12, rel=1e-3)
    assert layer.floor_s(peaks, 8192) == pytest.approx(2 * 8192 * 6144 * 4096 / 8e14)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_candidates_are_few_and_fit(model: Any) -> None:
    variants = set()
    for layer in layers_of(model):
        for rows in kernel_linears_tuning.buckets_of(layer):
            tried = candidates(layer.kind, layer.n_size, layer.k_size, rows, 132)
            assert 3 <= len(tried) <= 24
            assert len(set(tried)) == len(tried)
            for tiles in tried:
                variants.add(variant(layer, rows, tiles))
                assert isinstance(tiles, GemvTiles) == (rows == 1)
                if isinstance(tiles, GemmTiles):
                    operands = 2 * tiles.num_stages * tiles.block_k * (tiles.block_m + tiles.block_n)
                    assert tiles.programs * operands < SHARED_BYTES
                if isinstance(tiles, SkinnyTiles):
                    assert rows <= 128
    assert len(variants) < 520, "compiling them would take minutes"


@pytest.mark.parametrize(
    ("layer", "rows", "winner"),
    [
        (0, 8, SkinnyTiles(64, 128, 4, 4, 2)),
        (1, 8, SkinnyTiles(64, 128, 4, 4, 2)),
        (1, 256, GemmTiles(64, 128, 128, 4, 4)),
        (2, 16, SkinnyTiles(64, 128, 4, 4, 1)),
        (2, 2048, GemmTiles(128, 256, 64, 8, 3)),
        (2, 8192, GemmTiles(256, 128, 64, 8, 3)),
        (3, 1, GemvTiles(2, 1024, 4)),
        (4, 16, SkinnyTiles(128, 128, 4, 3, 1)),
    ],
)
def test_candidates_hold_what_has_won(layer: int, rows: int, winner: linear.Tiles) -> None:
    shape = layers_of(LLAMA_8B)[layer]
    assert winner in candidates(shape.kind, shape.n_size, shape.k_size, rows, 132)


def test_a_table_reads_back_as_what_won() -> None:
    row = GemvTiles(8, 512, 4)
    buckets = [1, 2, 4, 64, 128, 8192]
    winners = [row, SKINNY, SKINNY, None, TILED, TILED]
    entries = entries_of(buckets, winners)
    assert len(entries) == 4
    plan = linear.parse_plan(entries)
    assert [plan.tiles_for(rows) for rows in buckets] == winners
    assert plan.tiles_for(3) == SKINNY
    assert plan.tiles_for(65) == plan.tiles_for(10**6) == TILED


def test_above_the_last_bucket_few_row_kernels_give_way_to_the_library() -> None:
    plan = linear.parse_plan(entries_of([1, 64], [GemvTiles(8, 512, 4), SKINNY]))
    assert plan.tiles_for(64) == SKINNY
    assert plan.tiles_for(65) is None


class Measured:
    """Stands in for the device: times by tiles, and results that are wrong for some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[linear.Tiles | None, float]) -> None:
        self.wrong: set[linear.Tiles] = set()
        monkeypatch.setattr(
            kernel_linears_tuning, "candidates", lambda *_: [tiles for tiles in times if tiles is not None]
        )
        monkeypatch.setattr(kernel_linears_tuning, "time_us", lambda calls: times[calls])
        monkeypatch.setattr(Operands, "calls", lambda _, tiles, rows: tiles)
        monkeypatch.setattr(Operands, "relative_error", lambda _, tiles, rows, expected: float(tiles in self.wrong))

    def winner(self, before: linear.Tiles | None = None, failed: tuple[str, ...] = ()) -> linear.Tiles | None:
        operands = Operands(Layer("o", "add", 32, 64), 4, CPU)
        self.timings: list[dict[str, Any]] = []
        return measure(operands, 4, set(failed), CPU, before, self.timings)


def test_the_fastest_right_candidate_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Measured(monkeypatch, {None: 10.0, SKINNY: 8.0, TILED: 9.0})
    assert device.winner() == SKINNY
    assert [timing.get("us", timing.get("library_us")) for timing in device.timings] == [8.0, 9.0, 10.0]
    device.wrong.add(SKINNY)
    assert device.winner() == TILED
    device.wrong.add(TILED)
    assert device.winner() is None
    device.wrong.clear()
    assert device.winner(failed=(variant(Layer("o", "add", 32, 64), 4, SKINNY),)) == TILED


def test_the_library_stays_where_the_gain_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Measured(monkeypatch, {None: 8.1, SKINNY: 8.0}).winner() is None
    assert Measured(monkeypatch, {None: 8.3, SKINNY: 8.0}).winner() == SKINNY


def test_a_neighbours_configuration_is_kept_where_it_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Measured(monkeypatch, {None: 10.0, SKINNY: 8.0, TILED: 8.05}).winner(before=TILED) == TILED
    assert Measured(monkeypatch, {None: 10.0, SKINNY: 8.0, TILED: 8.2}).winner(before=TILED) == SKINNY


@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
def test_results_are_checked_against_fp32(kind: str) -> None:
    torch.manual_seed(0)
    operands = Operands(Layer("any", kind, 1024, 128), 200, CPU)  # wide: over a few elements the error is chance
    for rows in (1, 200):
        expected = operands.expected(rows)
        assert operands.relative_error(None, rows, expected) < kernel_linears_tuning.MAX_RELATIVE_ERROR
        assert operands.relative_error(None, rows, 1.02 * expected) > kernel_linears_tuning.MAX_RELATIVE_ERROR


def test_every_timed_call_works_on_small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def by_library(layer: Layer, rows: int, device: torch.device) -> None:
        asked.append((layer.name, rows))

    monkeypatch.setattr(kernel_timing, "ROTATE_BYTES", 1)
    monkeypatch.setattr(kernel_timing, "time_us", lambda calls: 2.0 + 0 * len([call() for call in calls]))
    monkeypatch.setattr(kernel_linears, "shipped_tiles", by_library)
    monkeypatch.setattr(kernel_linears, "DETERMINISTIC_TILES", None)
    monkeypatch.setattr(kernel_linears, "ROWS", (1, 3, 600))
    monkeypatch.setattr(kernel_linears, "DETERMINISTIC_ROWS", (3,))
    shape = ModelShape("8b", hidden=64, inter=96, heads=4, kv_heads=2, dim=16, vocab=300)
    lines = list(kernel_linears.bench(Peaks(1e12, 1e14), CPU, shape))
    names = ("qkv", "o", "gate_up", "down", "head")
    assert asked == [(name, rows) for name in names for rows in (1, 3, 600) if (name, rows) != ("head", 600)]
    assert {line.kernel for line in lines} == {
        f"{what}_{name}" for what in ("linear", "deterministic") for name in names
    }
    assert all(line.time_us == 2.0 and line.ratio in (1.0, None) for line in lines)


@pytest.mark.parametrize(
    ("times", "piece"), [((100.0, 99.5, 99.8), None), ((100.0, 97.0, 98.0), 2048), ((100.0, 99.9, 90.0), 4096)]
)
def test_a_piece_has_to_save_a_hundredth(
    times: tuple[float, ...], piece: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_size = dict(zip((8192, 2048, 4096), times, strict=True))
    monkeypatch.setattr(Operands, "pieced_call", lambda _, plan, rows, size: size)
    monkeypatch.setattr(kernel_linears_tuning, "sustained_us", by_size.__getitem__)
    operands = Operands(Layer("down", "add", 32, 16), 4, CPU)
    assert best_piece(operands, [{"kernel": "library"}]) == piece


@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
def test_pieces_make_the_whole_layer(kind: str) -> None:
    torch.manual_seed(0)
    operands = Operands(Layer("some", kind, 32, 16), 10, CPU)
    out: list[torch.Tensor] = []
    apply = linear.apply

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        out.append(apply(*arguments, **options))
        return out[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "apply", noted)
        operands.pieced_call(linear.Plan((), (None,)), 10, 4)()
    assert [len(part) for part in out] == [4, 4, 2]
    torch.testing.assert_close(torch.cat(out).float(), operands.expected(10), rtol=2e-2, atol=2e-2)
