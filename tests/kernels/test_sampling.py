"""Sampling: the reference against its definition written out, the kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.language as tl

from manta.kernels import sampling, sampling_noise, sampling_rounds
from manta.kernels.runtime import jit
from manta.kernels.sampling_noise import scores

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SLACK = 1e-4
"""Two tokens whose noisy scores are this close may change places by rounding."""


@dataclass(frozen=True)
class Rows:
    """Arguments of `sample`, all but the flags."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (
            self.logits, self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions
        )  # fmt: skip


def make_rows(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Rows:
    count, device = logits.shape[0], logits.device
    return Rows(
        logits,
        torch.full((count,), temperature, device=device),
        torch.full((count,), top_k, dtype=torch.int32, device=device),
        torch.full((count,), top_p, device=device),
        torch.full((count,), min_p, device=device),
        torch.randint(0, 2**62, (count,), device=device),
        torch.arange(count, device=device) + 17,
    )


def distribution(rows: Rows, row: int) -> torch.Tensor:
    """Probabilities [vocab] of one row in fp64, straight from the definition, with a full sort."""
    x = rows.logits[row].double()
    order = x.sort(descending=True, stable=True).indices
    temperature, top_k = float(rows.temperature[row]), int(rows.top_k[row])
    if temperature <= 0 or top_k == 1:
        return torch.zeros_like(x).index_fill_(0, order[:1], 1.0)
    probabilities = ((x - x.max()) / temperature).softmax(0)
    if top_k > 0:
        probabilities[order[top_k:]] = 0
        probabilities /= probabilities.sum()
    if rows.top_p[row] < 1:
        before = probabilities[order].cumsum(0) - probabilities[order]
        outside = before >= rows.top_p[row].double()
        outside[0] = False
        probabilities[order[outside]] = 0
    probabilities[probabilities < rows.min_p[row].double() * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def assert_agrees(rows: Rows, ids: torch.Tensor) -> None:
    """Each id has the highest noisy score among the tokens that the definition leaves."""
    assert ids.dtype == torch.int64
    base = sampling_noise.random_base(rows.seeds, rows.positions)
    tokens = torch.arange(rows.logits.shape[1], device=rows.logits.device)
    for row, token in enumerate(ids.tolist()):
        probabilities = distribution(rows, row)
        assert probabilities[token] > 0, f"row {row}: token {token} was filtered out"
        noise = -sampling_noise.exponential_reference(base[row], tokens).double().log()
        scores = probabilities.log() + noise
        assert scores[token] >= scores.max() - SLACK, (row, token, int(scores.argmax()))


def draw(rows: Rows, *, need_filter: bool = True) -> torch.Tensor:
    return sampling.sample(*rows.arguments, all_greedy=False, need_filter=need_filter)


def mixed_rows(count: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Rows of every kind side by side: greedy, each filter alone, all together, none."""
    generator = torch.Generator().manual_seed(count + vocab)
    logits = torch.randn(count, vocab + 8, generator=generator).mul_(2.5).to(device, dtype)[:, :vocab]
    kinds = [
        # temperature, top_k, top_p, min_p
        (0.0, 0, 1.0, 0.0),
        (0.7, 50, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.8, 40, 0.95, 0.02),
        (1.3, 0, 1.0, 0.0),
        (1.0, 1, 0.5, 0.0),
        (0.6, 3, 0.2, 0.0),
        (1.0, 0, 0.01, 0.0),
        (1.5, 700, 0.999, 0.0),
        (1.0, 0, 0.3, 0.5),
        (0.05, 20, 0.9, 0.1),
    ]
    values = torch.tensor([kinds[row % len(kinds)] for row in range(count)], dtype=torch.float64)
    rows = make_rows(logits)
    return Rows(
        rows.logits,
        values[:, 0].float().to(device),
        values[:, 1].int().to(device),
        values[:, 2].float().to(device),
        values[:, 3].float().to(device),
        torch.randint(-(2**62), 2**62, (count,), generator=generator).to(device),
        torch.randint(0, 100_000, (count,), generator=generator).to(device),
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("vocab", [301, 5001])
def test_reference_draws_what_the_definition_says(vocab: int, dtype: torch.dtype) -> None:
    rows = mixed_rows(240, vocab, dtype, torch.device("cpu"))
    assert_agrees(rows, sampling.sample_reference(*rows.arguments))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (6, 0.9, 0.05)]
)
def test_reference_follows_the_distribution(top_k: int, top_p: float, min_p: float) -> None:
    count = 20_000
    logits = torch.tensor([1.0, 0.5, -1.0, 2.0, 0.5, -3.0, 1.5, 0.0]).expand(count, -1).contiguous()
    rows = make_rows(logits, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    rows.seeds[:] = 1234  # one request, many positions
    expected = distribution(rows, 0)
    seen = torch.bincount(sampling.sample_reference(*rows.arguments), minlength=8).double()
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - expected * count)[possible] ** 2 / (expected * count)[possible]).sum()
    # 99.9 % quantile of chi-square with 7 degrees of freedom, an upper bound for fewer.
    assert chi_square < 24.3


@pytest.mark.parametrize("varied", ["seed", "position", "token"])
def test_noise_is_exponential_across_seeds_positions_and_tokens(varied: str) -> None:
    many, one = torch.arange(100_000), torch.tensor([3])
    base = sampling_noise.random_base(many if varied == "seed" else one, many if varied == "position" else one)
    numbers = sampling_noise.exponential_reference(base, many if varied == "token" else one)
    counts = torch.histc((-numbers).exp(), 100, 0, 1)
    assert counts.sum() == 100_000
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 149  # 99.9 % quantile, 99 degrees of freedom


def test_a_row_depends_on_nothing_but_itself() -> None:
    rows = mixed_rows(24, 1001, F32, torch.device("cpu"))
    together = sampling.sample_reference(*rows.arguments)
    alone = [sampling.sample_reference(*(value[row : row + 1] for value in rows.arguments)) for row in range(24)]
    assert together.tolist() == [int(token) for token in alone]


@jit
def _noise_kernel(seeds_ptr, positions_ptr, base_ptr, noise_ptr):
    pid = tl.program_id(0)
    base = sampling_noise.base_of(tl.load(seeds_ptr + pid), tl.load(positions_ptr + pid))
    tl.store(base_ptr + pid, base)
    ids = tl.arange(0, 64)
    tl.store(noise_ptr + pid * 64 + ids, scores(tl.zeros([64], tl.float32), ids, base, 1.0))


def test_noise_is_the_same_in_both_paths(device: torch.device) -> None:
    seeds = torch.cat([torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)]), torch.randint(-(2**62), 2**62, (59,))])
    positions = torch.cat([torch.tensor([0, 2**31, 5, 2**40, 1]), torch.randint(0, 1 << 20, (59,))])
    seeds, positions = seeds.to(device), positions.to(device)
    base, noise = torch.empty(64, dtype=torch.int64, device=device), torch.empty(64, 64, device=device)
    _noise_kernel[(64,)](seeds, positions, base, noise)
    assert torch.equal(base, sampling_noise.random_base(seeds, positions))
    expected = -sampling_noise.exponential_reference(base[:, None], torch.arange(64, device=device)).log()
    torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-5)


SHAPES = [
    (13, 5001),
    (12, 70),
    pytest.param(256, 128_256, marks=pytest.mark.gpu),
    pytest.param(1, 128_256, marks=pytest.mark.gpu),
    pytest.param(48, 49_152, marks=pytest.mark.gpu),
    pytest.param(36, 256_000, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_argmax_takes_the_lowest_id_among_equals(
    count: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = mixed_rows(count, vocab, dtype, device).logits
    top = logits.float().amax(-1, keepdim=True)
    expected = torch.where(logits.float() == top, torch.arange(vocab, device=device), vocab).amin(-1)
    assert torch.equal(sampling.argmax(logits), expected)
    equal = torch.zeros_like(logits)
    assert sampling.argmax(equal).tolist() == [0] * count


def test_argmax_leaves_a_copy_of_each_id_at_the_rows_slot(device: torch.device) -> None:
    logits = torch.randn(3, 3000, device=device)
    slots, by_slot = torch.tensor([4, 0, 2], device=device), torch.full((6,), -1, device=device)
    found = sampling.argmax(logits, sampling.BySlot(slots, by_slot)).tolist()
    assert found == logits.argmax(-1).tolist()
    assert by_slot.tolist() == [found[1], -1, found[2], -1, found[0], -1]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(("count", "vocab"), SHAPES)
def test_sample_of_mixed_rows(count: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = mixed_rows(count, vocab, dtype, device)
    ids = draw(rows)
    assert_agrees(rows, ids)
    expected = sampling.sample_reference(*rows.arguments)
    # Where fp32 and fp64 sums place the border of top-p one token apart, that token may win or be missing.
    assert int((ids != expected).sum()) <= count // 100


@pytest.mark.parametrize(("count", "vocab"), [(4, 5001), pytest.param(256, 128_256, marks=pytest.mark.gpu)])
def test_sample_without_filters(count: int, vocab: int, device: torch.device) -> None:
    rows = make_rows(torch.randn(count, vocab, device=device) * 2, temperature=0.9)
    rows.temperature[0] = 0.0
    assert_agrees(rows, draw(rows, need_filter=False))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 7, 1.0), (1.0, 7, 0.5), (1.0, 0, 0.5), (2.0, 3000, 0.9), (1.0, 0, 0.9999)]
)
@pytest.mark.parametrize("vocab", [4100, pytest.param(128_256, marks=pytest.mark.gpu)])
def test_rows_that_need_the_full_search(
    temperature: float, top_k: int, top_p: float, vocab: int, device: torch.device
) -> None:
    """Flat, all equal, and all but equal logits: more candidates than a chunk can offer."""
    flat = torch.rand(1, vocab, device=device) * 0.1
    equal = torch.full((1, vocab), -3.25, device=device)
    two_levels = torch.where(torch.arange(vocab, device=device) % 3 == 1, 2.0, 1.0)[None]
    rows = make_rows(torch.cat([flat, equal, two_levels]), temperature=temperature, top_k=top_k, top_p=top_p)
    ids = draw(rows)
    if top_k == 7:
        assert int(ids[1]) < 7
        assert int(ids[2]) < 21
    if top_p != 0.9999:  # where rounding decides which of ten thousand equals is the last
        assert_agrees(rows, ids)
        assert torch.equal(ids, sampling.sample_reference(*rows.arguments))


@pytest.mark.parametrize(("count", "vocab"), [(24, 6200), pytest.param(256, 128_256, marks=pytest.mark.gpu)])
def test_top_p_is_a_share_of_the_whole_row(count: int, vocab: int, device: torch.device) -> None:
    """Also where the few largest logits, which the search looks at first, hold only a part of it."""
    rows = make_rows(torch.randn(count, vocab, device=device) * 2.5, top_p=0.4)
    rows.top_p[::2] = 0.05
    assert_agrees(rows, draw(rows))


@pytest.mark.parametrize("vocab", [2100, pytest.param(128_256, marks=pytest.mark.gpu)])
def test_forbidden_tokens_are_never_drawn(vocab: int, device: torch.device) -> None:
    allowed = torch.tensor([3, 77, 2090], device=device)
    logits = torch.full((6, vocab), -torch.inf, device=device)
    logits[:, allowed] = torch.tensor([0.3, 0.1, 0.2], device=device)
    rows = make_rows(logits, top_k=50, top_p=0.95)
    rows.top_k[3:] = 0
    rows.top_p[5] = 1.0
    assert_agrees(rows, draw(rows))
    unfiltered = make_rows(logits)
    assert_agrees(unfiltered, draw(unfiltered, need_filter=False))


def test_greedy_flag_ignores_parameters(device: torch.device) -> None:
    rows = mixed_rows(5, 300, F32, device)
    ids = sampling.sample(*rows.arguments, all_greedy=True, need_filter=False)
    assert torch.equal(ids, rows.logits.argmax(-1))


def test_no_rows(device: torch.device) -> None:
    rows = Rows(*(value[:0] for value in mixed_rows(5, 300, F32, device).arguments))
    assert draw(rows).shape == sampling.argmax(rows.logits).shape == (0,)


@pytest.mark.parametrize("num_rounds", [1, 6])
def test_rounds_settle_rows_as_the_full_search_does(
    num_rounds: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one round about half of these rows are left to the search, with six hardly one."""
    monkeypatch.setattr(sampling_rounds, "NUM_ROUNDS", num_rounds)
    searched = []
    run = sampling_rounds.run_rounds

    def noted(*args: object, **kwargs: object) -> sampling_rounds.Proposals:
        last = run(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        searched.append(int((last.settled < 0).sum()))
        return last

    monkeypatch.setattr(sampling, "run_rounds", noted)
    rows = make_rows(torch.randn(16, 2500, device=device), top_p=0.5)  # flat: hundreds of tokens are kept
    assert_agrees(rows, draw(rows))
    assert (searched[0] == 16) if num_rounds == 1 else (searched[0] < 4)
    rows = make_rows(torch.randn(8, 2500, device=device), top_p=0.9, min_p=0.2)
    assert_agrees(rows, draw(rows))


def test_a_round_writes_nothing_that_it_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a program of a row that another one settles meanwhile goes on with some of its warps only."""
    kernel: Any = sampling_rounds.round_kernel
    launches: list[dict[str, object]] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def launch(*args: object, **kwargs: object) -> object:
                launches.append(dict(zip(kernel.arg_names, args, strict=False)))
                return kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(sampling_rounds, "round_kernel", Noted())
    rows = make_rows(torch.randn(3, 2500, device=device), top_p=0.9)
    assert_agrees(rows, draw(rows))
    assert len(launches) == sampling_rounds.NUM_ROUNDS
    for launch in launches:
        places = {name: arg.data_ptr() for name, arg in launch.items() if isinstance(arg, torch.Tensor)}
        written = {place for name, place in places.items() if name.startswith("new_")}
        assert len(written) == 5
        assert not written & {place for name, place in places.items() if not name.startswith("new_")}


@pytest.mark.gpu
def test_many_draws_of_many_rows_are_the_same_each_time(device: torch.device) -> None:
    rows = make_rows(torch.randn(64, 128_256, device=device), top_p=0.95)
    first = draw(rows)
    assert_agrees(rows, first)
    again = torch.stack([draw(rows) for _ in range(300)])
    assert bool((again == first).all())
