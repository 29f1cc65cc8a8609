"""Draws from rows that top-p or min-p cut, many programs a row: propose the best score so far, check it, narrow down.

What the two filters keep is a prefix of the order of tokens. The token with the highest score (logit over temperature
plus its own fixed noise) is the draw if it lies in the prefix; if not, the prefix lies wholly before it, and the
highest score among those before is the next proposal. A proposal fails with a probability of 1 - p at most, so a few
rounds settle nearly every row; sampling.py searches the others in full. (Rejection without a sort as in FlashInfer, Ye
et al. 2025, https://arxiv.org/abs/2501.01005; with fixed noise it changes no draw.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .runtime import jit
from .sampling_noise import base_of, scores

NUM_ROUNDS = 6
"""Nucleus 0.9 leaves one row in a million to the full search, 0.5 some in a hundred."""


class Proposals(NamedTuple):
    """What a round leaves, [rows, chunks] but for `proposed` and `settled` [rows]."""

    score: torch.Tensor
    """The chunk's highest score among the tokens before the round's proposal, and whose it is."""
    drawn: torch.Tensor
    mass: torch.Tensor
    """Weight of the chunk's tokens before the proposal; infinite when min-p drops it."""
    proposed: torch.Tensor
    settled: torch.Tensor
    """The id that an earlier round settled on, or -1, [rows] int32. A round writes it anew: what it reads stays as it
    is, or warps of one program could part where another program settles their row."""


@jit
def row_settled(mass_ptr, chunk_row, chunks, mask_chunk, p, total):
    """Whether the proposal whose masses these are lies in the row's prefix."""
    before = tl.sum(tl.load(mass_ptr + chunk_row + chunks, mask=mask_chunk, other=0.0), 0)
    return (before == 0.0) | (before < tl.where(p < 1.0, p * total, 3.0e38))


@jit(do_not_specialize=["num_chunks"])
def round_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    score_ptr,
    drawn_ptr,
    mass_ptr,
    proposed_ptr,
    settled_ptr,
    new_score_ptr,
    new_drawn_ptr,
    new_mass_ptr,
    new_proposed_ptr,
    new_settled_ptr,
    logits_stride,
    vocab,
    num_chunks,
    FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One program: one chunk of one row. Every program of a row comes to the same proposal."""
    pid_row = tl.program_id(0)
    pid_chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + pid_row)
    p = tl.load(top_p_ptr + pid_row)
    min_p = tl.load(min_p_ptr + pid_row)
    k = tl.load(top_k_ptr + pid_row)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    mask_chunk = chunks < num_chunks
    chunk_row = pid_row * num_chunks
    maxima = tl.load(chunk_max_ptr + chunk_row + chunks, mask=mask_chunk, other=float("-inf"))
    row_max = tl.max(maxima, 0)
    has_k = (k > 0) & (k < vocab)
    is_cut = (p < 1.0) | (min_p > 0.0)
    takes_part = is_cut & (temperature > 0.0) & (row_max > float("-inf"))  # pyright: ignore[reportOperatorIssue]
    settled = -1
    if not FIRST:
        settled = tl.load(settled_ptr + pid_row)
        takes_part = takes_part & (settled < 0)
    if pid_chunk == 0:
        tl.store(new_settled_ptr + pid_row, settled)
    if has_k | (not takes_part):
        return
    if not FIRST:
        sums = tl.load(chunk_sum_ptr + chunk_row + chunks, mask=mask_chunk, other=0.0)
        total = tl.sum(sums * tl.exp((maxima - row_max) / temperature), 0)
        if row_settled(mass_ptr, chunk_row, chunks, mask_chunk, p, total):
            if pid_chunk == 0:
                tl.store(new_settled_ptr + pid_row, tl.load(proposed_ptr + pid_row))
            return
    best = tl.load(score_ptr + chunk_row + chunks, mask=mask_chunk, other=float("-inf"))
    _, best_chunk = tl.max(best, 0, return_indices=True)
    proposed = tl.load(drawn_ptr + chunk_row + best_chunk)
    row = logits_ptr + pid_row.to(tl.int64) * logits_stride
    border = tl.load(row + proposed).to(tl.float32)
    offs = pid_chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + offs, mask=offs < vocab, other=float("-inf")).to(tl.float32)
    is_before = ((x > border) | ((x == border) & (offs < proposed))) & (offs < vocab)
    mass = tl.sum(tl.where(is_before, tl.exp((x - row_max) / temperature), 0.0), 0)
    place = chunk_row + pid_chunk
    score = float("-inf")
    drawn = 0
    num_before = tl.sum(is_before.to(tl.int32), 0)
    if num_before > 0:  # pyright: ignore[reportOperatorIssue]
        # Most chunks of a peaked row have none before the proposal, and noise is dear.
        base = base_of(tl.load(seeds_ptr + pid_row), tl.load(positions_ptr + pid_row))
        noisy = tl.where(is_before, scores(x, offs, base, temperature), float("-inf"))
        score, index = tl.max(noisy, 0, return_indices=True)
        drawn = pid_chunk * CHUNK + index
    tl.store(new_score_ptr + place, score)
    tl.store(new_drawn_ptr + place, drawn)
    is_dropped = tl.exp((border - row_max) / temperature) < min_p
    tl.store(new_mass_ptr + place, tl.where(is_dropped, float("inf"), mass))
    if pid_chunk == 0:
        tl.store(new_proposed_ptr + pid_row, proposed)


def run_rounds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    chunk_max: torch.Tensor,
    chunk_sum: torch.Tensor,
    score: torch.Tensor,
    drawn: torch.Tensor,
    chunk: int,
) -> Proposals:
    """What the last round leaves.

    Arguments as of sampling.sample; the last ones are what its pass over chunks of `chunk` logits left, [rows, chunks].
    Rows that are greedy, have no filter or have top-k take no part.
    """
    num_rows, num_chunks = chunk_max.shape
    of_rows = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    last = Proposals(score, drawn, score, of_rows, of_rows)  # the first round reads neither of the last three
    for number in range(NUM_ROUNDS):
        new = Proposals(*map(torch.empty_like, last))
        round_kernel[(num_rows, num_chunks)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            chunk_max,
            chunk_sum,
            *last,
            *new,
            logits.stride(0),
            logits.shape[1],
            num_chunks,
            FIRST=number == 0,
            CHUNK=chunk,
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=4,
        )
        last = new
    return last
