"""The comparison's arithmetic on literal times: a ratio above 1 means that ours is faster."""

from __future__ import annotations

import pytest
import torch

from manta.bench.hf_model import _without_pairs
from manta.bench.reference import Sizes, TokenTimes, figures_of


def test_ratios_point_the_right_way() -> None:
    figures = figures_of(
        {
            "decode": [0.1, 0.05, 0.04],
            "decode_transformers": [0.1, 0.1, 0.1],
            "prefill": [2.0],
            "prefill_transformers": [1.0],
            "concurrent": [0.1],
            "same_tokens": [1.0, 1.0, 0.5],
        },
        Sizes(prefill_len=512, concurrency=8),
    )
    assert figures["decode_tokens_per_s"] == pytest.approx(20)
    assert figures["decode_ratio"] == pytest.approx(2)
    assert figures["prefill_512_ratio"] == pytest.approx(0.5)
    assert figures["concurrent_8_tokens_per_s"] == pytest.approx(80)
    assert figures["concurrent_8_ratio_to_one"] == pytest.approx(4)
    assert (figures["same_tokens_median_percent"], figures["same_tokens_worst_percent"]) == (100, 50)


def test_the_streamer_leaves_the_prompt_out() -> None:
    times = TokenTimes()
    for value in (torch.tensor([[5, 6, 7]]), torch.tensor([8]), torch.tensor([9])):
        times.put(value)
    times.end()
    assert times.token_ids == [8, 9]
    assert times.times_s == sorted(times.times_s)
    assert len(times.times_s) == 2


def test_rotary_pairs_become_halves() -> None:
    rows = torch.arange(8.0).reshape(8, 1)  # two heads of four dimensions, stored as pairs (0, 2), (1, 3)
    assert _without_pairs(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
