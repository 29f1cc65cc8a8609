"""Draws token ids from logits: greedy, temperature, top-k, top-p, min-p, without sorting on the GPU.

Knows no penalties and no requests. The order of tokens is by logit, highest first, and by token id among equal logits:
"the first k", "the smallest set that holds top_p" are prefixes of that order, so ties are always cut at the lowest ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import runtime
from .dependent_launch import has_dependent_launch, let_successor_start, wait_for_predecessor
from .runtime import jit
from .sampling_noise import base_of, exponential_reference, random_base, scores
from .sampling_rounds import row_settled, run_rounds
from .sampling_search import key_of, pick, search_border, tail, value_of

# One chunk is an ordinary case, not worth a variant of its own with the number as a constant.
_jit_chunks = jit(do_not_specialize=["num_chunks"])

_CHUNK = 2048  # logits that one program of the first two passes takes
_PER_CHUNK = 64  # candidates a chunk may offer to the filter search; rows that need more are searched in full
_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See `sample`; it takes the filters of each row as they are."""
    greedy_ids = logits.argmax(-1)
    greedy = (temperature <= 0) | (top_k == 1)
    drawn = (~greedy).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return greedy_ids
    x = logits[drawn].float()
    top_k, top_p, min_p = top_k[drawn], top_p[drawn], min_p[drawn]
    weights = ((x - x.amax(-1, keepdim=True)) / temperature[drawn, None]).exp()
    kept = weights
    if bool(((top_k > 0) | (top_p < 1)).any()):
        kept = torch.where(_first_in_order(x, weights, top_k.long(), top_p.double()), weights, 0.0)
    if bool((min_p > 0).any()):
        kept = torch.where(weights >= min_p[:, None], kept, 0.0)
    base = random_base(seeds[drawn], positions[drawn])
    ids = torch.arange(x.shape[1], device=x.device)
    for index, row in enumerate(drawn.tolist()):
        # Few tokens are left where filters apply: noise is made for those alone.
        left = kept[index].nonzero().squeeze(1) if bool((kept[index] == 0).any()) else ids
        score = x[index, left] / temperature[row] - exponential_reference(base[index], left).log()
        greedy_ids[row] = left[score.argmax()]
    return greedy_ids


def _first_in_order(x: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask [rows, vocab] of the tokens that top_k (0 = off) and then top_p leave."""
    vocab = x.shape[1]
    num_kept_by_k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    total = weights.double().sum(-1)
    # Few tokens usually suffice; a row whose k or p reaches further makes this call look at all.
    few = int(top_k.max()) if bool((top_k > 0).all()) else 1024
    for size in (min(few, vocab), vocab):
        # [rows, size]; weights are a monotone function of x, so both come sorted.
        values, ids = x.topk(size, dim=-1)
        cumulative = weights.gather(1, ids).double().cumsum(-1)
        mass_of_k = cumulative.gather(1, (num_kept_by_k - 1).clamp(max=size - 1)[:, None]).squeeze(1)
        mass_of_k = torch.where(num_kept_by_k <= size, mass_of_k, total)
        reached = cumulative >= (top_p * mass_of_k)[:, None]
        num_kept_by_p = torch.where(top_p < 1, reached.int().argmax(-1) + 1, num_kept_by_k)
        no_filter = (num_kept_by_k == vocab) & (top_p >= 1)
        enough_for_p = reached[:, -1] & (top_p < 1) & ((num_kept_by_k <= size) | (num_kept_by_k == vocab))
        if size == vocab or bool((no_filter | enough_for_p | ((num_kept_by_k <= size) & (top_p >= 1))).all()):
            break
    # Rounding may leave the whole mass just short of p = 1 - tiny: then everything that top-k left is kept.
    num_kept_by_p = torch.where(reached[:, -1], num_kept_by_p, num_kept_by_k)
    num_kept = torch.minimum(num_kept_by_k, num_kept_by_p)
    border = values.gather(1, (num_kept - 1).clamp(0, size - 1)[:, None])
    border = torch.where(num_kept[:, None] >= vocab, -torch.inf, border)
    quota = num_kept - (values > border).sum(-1)
    ties = x == border
    if bool((ties.sum(-1) > quota).any()):
        ties &= ties.cumsum(-1) <= quota[:, None]
    return (x > border) | ties


@jit
def _chunk_kernel(
    logits_ptr,
    temperature_ptr,
    chunk_max_ptr,
    chunk_id_ptr,
    chunk_sum_ptr,
    chunk_score_ptr,
    chunk_drawn_ptr,
    seeds_ptr,
    positions_ptr,
    logits_stride,
    vocab,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest logit of a chunk and its lowest id; with DRAWS also the chunk's sum of exp((x - largest) / temperature),
    its highest score and that one's id."""
    pid_row = tl.program_id(0)
    pid_chunk = tl.program_id(1)
    offs = pid_chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits_ptr + pid_row.to(tl.int64) * logits_stride
    if PDL:
        wait_for_predecessor()
        let_successor_start()
    x = tl.load(row + offs, mask=offs < vocab, other=float("-inf")).to(tl.float32)
    largest, index = tl.max(x, 0, return_indices=True)
    place = pid_row * tl.num_programs(1) + pid_chunk
    tl.store(chunk_max_ptr + place, largest)
    tl.store(chunk_id_ptr + place, pid_chunk * CHUNK + index)
    if DRAWS:
        temperature = tl.load(temperature_ptr + pid_row)
        if temperature > 0.0:
            base = base_of(tl.load(seeds_ptr + pid_row), tl.load(positions_ptr + pid_row))
            score, drawn = tl.max(scores(x, offs, base, temperature), 0, return_indices=True)
            tl.store(chunk_score_ptr + place, score)
            tl.store(chunk_drawn_ptr + place, pid_chunk * CHUNK + drawn)
            # A chunk of nothing but -inf (forbidden tokens) has weight 0, not NaN.
            weights = tl.exp((x - tl.where(largest == float("-inf"), 0.0, largest)) / temperature)
            tl.store(chunk_sum_ptr + place, tl.sum(weights, 0))


@_jit_chunks
def _argmax_kernel(
    chunk_max_ptr, chunk_id_ptr, out_ptr, slots_ptr, by_slot_ptr, num_chunks,
    BLOCK_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid_row = tl.program_id(0)
    offs = tl.arange(0, BLOCK_CHUNKS)
    if PDL:
        wait_for_predecessor()
    maxima = tl.load(chunk_max_ptr + pid_row * num_chunks + offs, mask=offs < num_chunks, other=float("-inf"))
    _, chunk = tl.max(maxima, 0, return_indices=True)
    token_id = tl.load(chunk_id_ptr + pid_row * num_chunks + chunk).to(tl.int64)
    tl.store(out_ptr + pid_row, token_id)
    if by_slot_ptr is not None:
        tl.store(by_slot_ptr + tl.load(slots_ptr + pid_row), token_id)


@_jit_chunks
def _candidate_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    chunk_max_ptr,
    candidate_ptr,
    candidate_id_ptr,
    chunk_count_ptr,
    floor_ptr,
    settled_ptr,
    logits_stride,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    PER_CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Collect a chunk's logits that reach the row's floor, in order of id, filled up with -inf.

    The floor is the k-th largest of the chunks' maxima, so at least k logits reach it (the middle one without k).
    """
    pid_row = tl.program_id(0)
    pid_chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + pid_row)
    if (temperature <= 0.0) | (tl.load(settled_ptr + pid_row) >= 0):
        return
    k = tl.load(top_k_ptr + pid_row)
    wanted = tl.where((k > 0) & (k <= num_chunks), k, (num_chunks + 1) // 2)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    maxima = tl.load(chunk_max_ptr + pid_row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    larger = (maxima[None, :] > maxima[:, None]) | (
        (maxima[None, :] == maxima[:, None]) & (chunks[None, :] < chunks[:, None])
    )
    rank = tl.sum(larger.to(tl.int32), 1)  # [chunks], a permutation
    floor = tl.max(tl.where(rank == wanted - 1, maxima, float("-inf")), 0)

    offs = pid_chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits_ptr + pid_row.to(tl.int64) * logits_stride
    x = tl.load(row + offs, mask=offs < vocab, other=float("-inf"))
    reaches = (x.to(tl.float32) >= floor) & (offs < vocab)
    place = tl.cumsum(reaches.to(tl.int32), 0) - 1
    count = tl.sum(reaches.to(tl.int32), 0)
    base = (pid_row.to(tl.int64) * num_chunks + pid_chunk) * PER_CHUNK
    stored = reaches & (place < PER_CHUNK)
    tl.store(candidate_ptr + base + place, x, mask=stored)
    tl.store(candidate_id_ptr + base + place, offs, mask=stored)
    slots = tl.arange(0, PER_CHUNK)
    filler = tl.full([PER_CHUNK], float("-inf"), tl.float32).to(candidate_ptr.dtype.element_ty)
    tl.store(candidate_ptr + base + slots, filler, mask=slots >= count)
    tl.store(candidate_id_ptr + base + slots, tl.zeros([PER_CHUNK], tl.int32), mask=slots >= count)
    tl.store(chunk_count_ptr + pid_row * num_chunks + pid_chunk, count)
    if pid_chunk == 0:
        tl.store(floor_ptr + pid_row, floor)


@_jit_chunks
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_max_ptr,
    chunk_id_ptr,
    chunk_sum_ptr,
    chunk_score_ptr,
    chunk_drawn_ptr,
    candidate_ptr,
    candidate_id_ptr,
    chunk_count_ptr,
    floor_ptr,
    mass_ptr,
    proposed_ptr,
    settled_ptr,
    out_ptr,
    logits_stride,
    vocab,
    num_chunks,
    NEED_FILTER: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    pid_row = tl.program_id(0)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    mask_chunk = chunks < num_chunks
    chunk_row = pid_row * num_chunks
    maxima = tl.load(chunk_max_ptr + chunk_row + chunks, mask=mask_chunk, other=float("-inf"))
    row_max, best_chunk = tl.max(maxima, 0, return_indices=True)
    temperature = tl.load(temperature_ptr + pid_row)
    k = tl.load(top_k_ptr + pid_row).to(tl.int32)
    if (temperature <= 0.0) | (k == 1) | (row_max == float("-inf")):
        tl.store(out_ptr + pid_row, tl.load(chunk_id_ptr + chunk_row + best_chunk).to(tl.int64))
        return

    row_ptr = logits_ptr + pid_row.to(tl.int64) * logits_stride
    p = tl.load(top_p_ptr + pid_row)
    min_p = tl.load(min_p_ptr + pid_row)
    has_k = (k > 0) & (k < vocab)
    if NEED_FILTER:
        is_filtered = has_k | (p < 1.0) | (min_p > 0.0)
    else:
        is_filtered = pid_row < 0

    if NEED_FILTER:
        settled = tl.load(settled_ptr + pid_row)
        if is_filtered & (not has_k) & (settled < 0):  # the last round's proposal has not been judged yet
            sums = tl.load(chunk_sum_ptr + chunk_row + chunks, mask=mask_chunk, other=0.0)
            total = tl.sum(sums * tl.exp((maxima - row_max) / temperature), 0)
            if row_settled(mass_ptr, chunk_row, chunks, mask_chunk, p, total):
                settled = tl.load(proposed_ptr + pid_row)
        if settled >= 0:
            tl.store(out_ptr + pid_row, settled.to(tl.int64))
            return

    if is_filtered:
        base = base_of(tl.load(seeds_ptr + pid_row), tl.load(positions_ptr + pid_row))
        sums = tl.load(chunk_sum_ptr + chunk_row + chunks, mask=mask_chunk, other=0.0)
        sums = sums * tl.exp((maxima - row_max) / temperature)  # [chunks], weights relative to the row's maximum
        total = tl.sum(sums, 0)
        source = row_ptr
        n = vocab
        uses_candidates = pid_row < 0
        low = k * 0 + _KEY_OF_MINUS_INFINITY
        high = low
        quota = k * 0
        if has_k | (p < 1.0):
            counts = tl.load(chunk_count_ptr + chunk_row + chunks, mask=mask_chunk, other=0)
            count_floor = tl.sum(counts, 0)
            floor = key_of(tl.load(floor_ptr + pid_row))
            fits = tl.max(counts, 0) <= PER_CHUNK
            candidates = candidate_ptr + pid_row.to(tl.int64) * num_chunks * PER_CHUNK
            num_slots = num_chunks * PER_CHUNK
            wanted_count = tl.where(has_k, k, 0)
            wanted_mass = tl.where(has_k, 0.0, p * total)
            mass_floor = total
            if fits:
                _, mass_floor = tail(candidates, num_slots, floor, row_max, temperature, BLOCK)
                uses_candidates = (count_floor >= wanted_count) & (mass_floor >= wanted_mass)
            count_low = vocab
            mass_low = total
            if uses_candidates:
                source = candidates
                n = num_slots
                low = floor
                count_low = count_floor
                mass_low = mass_floor
            top = key_of(row_max) + 1
            if has_k:
                low, high, count_low, count_high, mass_low, mass_high = search_border(
                    source,
                    n,
                    low,
                    top,
                    count_low,
                    k * 0,
                    mass_low,
                    total * 0.0,
                    k,
                    total * 0.0,
                    row_max,
                    temperature,
                    BLOCK,
                )
                quota = k - count_high
                if quota < count_low - count_high:
                    mass_low = mass_high + quota * tl.exp((value_of(low) - row_max) / temperature)
            else:
                high = low
            if p < 1.0:
                low_of_k, quota_of_k = low, quota
                wanted_mass = p * tl.where(has_k, mass_low, total)
                low, high, count_low, count_high, mass_low, mass_high = search_border(
                    source,
                    n,
                    low,
                    top,
                    count_low,
                    k * 0,
                    mass_low,
                    total * 0.0,
                    k * 0,
                    wanted_mass,
                    row_max,
                    temperature,
                    BLOCK,
                )
                available = count_low - count_high
                if has_k & (low == low_of_k):
                    available = tl.minimum(available, quota_of_k)
                needed = tl.ceil((wanted_mass - mass_high) / tl.exp((value_of(low) - row_max) / temperature))
                quota = tl.where(available > 1, tl.minimum(tl.maximum(needed, 1.0), available).to(tl.int32), available)
        ids_ptr = candidate_id_ptr + pid_row.to(tl.int64) * num_chunks * PER_CHUNK
        index = pick(source, ids_ptr, n, uses_candidates, base, low, high, quota, min_p, row_max, temperature, BLOCK)
        if uses_candidates:
            index = tl.load(ids_ptr + index)
        tl.store(out_ptr + pid_row, index.to(tl.int64))
    else:
        best = tl.load(chunk_score_ptr + chunk_row + chunks, mask=mask_chunk, other=float("-inf"))
        _, chunk = tl.max(best, 0, return_indices=True)
        tl.store(out_ptr + pid_row, tl.load(chunk_drawn_ptr + chunk_row + chunk).to(tl.int64))


class BySlot(NamedTuple):
    """Where rows leave a second copy of their ids: row i in `token_ids` [slots] int64 at `slots[i]`, [rows] int64."""

    slots: torch.Tensor
    token_ids: torch.Tensor


def argmax(logits: torch.Tensor, by_slot: BySlot | None = None) -> torch.Tensor:
    """Return the id of the largest logit of each row of `logits` [rows, vocab], the lowest among equals, as int64.

    Of rows that name one slot, padding, any one's id stays there.
    """
    if not runtime.use_triton(logits):
        token_ids = logits.argmax(-1)
        if by_slot is not None:
            by_slot.token_ids.index_copy_(0, by_slot.slots, token_ids)
        return token_ids
    num_rows = logits.shape[0]
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        stats = _chunk_stats(logits)
        num_chunks = stats.largest.shape[1]
        block_chunks = triton.next_power_of_2(num_chunks)
        slots, token_ids = (None, None) if by_slot is None else by_slot
        dependent = has_dependent_launch(logits)
        _argmax_kernel[(num_rows,)](
            stats.largest, stats.ids, out, slots, token_ids, num_chunks,
            BLOCK_CHUNKS=block_chunks, PDL=dependent, num_warps=1, launch_pdl=dependent,
        )  # fmt: skip
    return out


class _ChunkStats(NamedTuple):
    """One entry a row and chunk, [rows, chunks]; the last three only where something is drawn."""

    largest: torch.Tensor
    ids: torch.Tensor
    sums: torch.Tensor | None
    scores: torch.Tensor | None
    drawn: torch.Tensor | None


def _chunk_stats(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> _ChunkStats:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab, _CHUNK)
    largest = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    draws = temperature is not None
    sums, best = (torch.empty_like(largest), torch.empty_like(largest)) if draws else (None, None)
    drawn = torch.empty_like(ids) if draws else None
    dependent = has_dependent_launch(logits)
    _chunk_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        largest,
        ids,
        sums,
        best,
        drawn,
        seeds,
        positions,
        logits.stride(0),
        vocab,
        DRAWS=draws,
        CHUNK=_CHUNK,
        PDL=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return _ChunkStats(largest, ids, sums, best, drawn)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    all_greedy: bool,
    need_filter: bool,
) -> torch.Tensor:
    """Draw one token id per row of `logits` [rows, vocab] (fp32 or the model's dtype), [rows] int64.

    Per row: `temperature` fp32 (0: the largest logit, the lowest id among equals), `top_k` int32 (0: off, 1: as
    temperature 0), then `top_p` fp32 of what top_k left (1: off), then `min_p` fp32 as a share of the largest
    probability (0: off). Among equal logits top_k and top_p keep the lowest ids; min_p keeps or drops all. The draw is
    the largest of logit / temperature plus Gumbel noise, the noise a function of `seeds`, `positions` (int64) and the
    token id: a row's result depends on nothing but the row, and rounding changes it only where two tokens' sums are
    equal within rounding (a draw by cumulative sums would move at every border). Logits may be -inf, not NaN.

    `all_greedy` and `need_filter` (some row has top_k, top_p or min_p) say which kernels run; they must be true to
    the rows.
    """
    if all_greedy:
        return argmax(logits)
    if not runtime.use_triton(logits):
        return sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions)
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    stats = _chunk_stats(logits, temperature, seeds, positions)
    num_chunks = stats.largest.shape[1]
    block_chunks = triton.next_power_of_2(num_chunks)
    # Without filters the draw never reads the candidates.
    num_slots = num_chunks * _PER_CHUNK if need_filter else 1
    candidates = torch.empty((num_rows, num_slots), dtype=logits.dtype, device=logits.device)
    candidate_ids = torch.empty((num_rows, num_slots), dtype=torch.int32, device=logits.device)
    chunk_count = torch.empty_like(stats.ids)
    floor = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last = None
    if need_filter:
        assert stats.sums is not None
        assert stats.scores is not None
        assert stats.drawn is not None
        last = run_rounds(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            chunk_max=stats.largest,
            chunk_sum=stats.sums,
            score=stats.scores,
            drawn=stats.drawn,
            chunk=_CHUNK,
        )
        _candidate_kernel[(num_rows, num_chunks)](
            logits,
            temperature,
            top_k,
            stats.largest,
            candidates,
            candidate_ids,
            chunk_count,
            floor,
            last.settled,
            logits.stride(0),
            vocab,
            num_chunks,
            CHUNK=_CHUNK,
            PER_CHUNK=_PER_CHUNK,
            BLOCK_CHUNKS=block_chunks,
            num_warps=4,
        )
    _draw_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        stats.largest,
        stats.ids,
        stats.sums,
        stats.scores,
        stats.drawn,
        candidates,
        candidate_ids,
        chunk_count,
        floor,
        None if last is None else last.mass,
        None if last is None else last.proposed,
        None if last is None else last.settled,
        out,
        logits.stride(0),
        vocab,
        num_chunks,
        NEED_FILTER=need_filter,
        CHUNK=_CHUNK,
        PER_CHUNK=_PER_CHUNK,
        BLOCK_CHUNKS=block_chunks,
        BLOCK=2048,
        num_warps=8,
    )
    return out
