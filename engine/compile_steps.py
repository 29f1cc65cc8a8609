"""Compiles what steps of many sizes need before any of them runs: in parallel, on one layer. CUDA only.

Nothing that a kernel would have written is used as a place: token ids, slots and blocks are zeros from the start.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch

from manta.kernels.compile_ahead import compiling_only
from manta.kernels.sampling import argmax

from .batch import SlotState
from .decode_step import DecodeBuffers, DecodeStep, Draw, StepKind
from .kv_cache import CacheLayout
from .layers.attention import AttentionBatch, DecodeRows, LastRows, PrefillRows
from .models.decoder import Decoder
from .prefill_graphs import PrefillGraphs


@torch.inference_mode()
def compile_steps(
    model: Decoder,
    layout: CacheLayout,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_tokens: int,
    decode_sizes: Sequence[int],
    deterministic: bool,
    device: torch.device,
) -> None:
    """Kernels of decode steps of `decode_sizes` rows, of prefills of as many pairs of tokens, and of full prefills.

    Draws: greedy at all sizes, the others for one row; with a shared prefix from 16 rows on. Kernels that are compiled
    or in Triton's cache cost nothing.
    """
    first = copy.copy(model)
    first.layers = model.layers[:1]
    caches = layout.allocate(1, device)[:1]
    state = SlotState.allocate(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=layout.block_size, device=device
    )
    kinds = [(StepKind(Draw.GREEDY), size) for size in decode_sizes]
    kinds += [(StepKind(draw), 1) for draw in (Draw.PLAIN, Draw.FILTERED)]
    if not deterministic:
        kinds += [(StepKind(Draw.GREEDY, shares_prefix=True), size) for size in decode_sizes if size >= 16]
    # The longest prefill first: its attention takes longest to compile.
    with compiling_only(os.cpu_count() or 1):
        length = min(max_num_tokens, max_model_len)
        _prefill(first, layout, state, -(-max_num_tokens // length), length, device, deterministic=deterministic)
        PrefillGraphs(
            first,
            caches,
            state,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            block_size=layout.block_size,
            capture=None,
            device=device,
        ).run_largest()
        for kind, size in kinds:
            buffers = DecodeBuffers(size, no_slot=max_num_seqs, device=device)
            for tensor in buffers.upload.tensors.values():
                tensor.zero_()
            step = DecodeStep(
                kind,
                buffers,
                model=first,
                caches=caches,
                state=state,
                block_size=layout.block_size,
                decodes_as_prefills=deterministic,
            )
            step.run()
        for size in decode_sizes:
            _prefill(first, layout, state, size, 2, device, deterministic=deterministic)


def sizes_with_own_kernels(max_num_seqs: int) -> list[int]:
    """Numbers of sequences whose decode steps take kernels of their own: powers of two, and the most that may run."""
    return sorted({min(1 << power, max_num_seqs) for power in range(max_num_seqs.bit_length() + 1)})


def _prefill(
    model: Decoder,
    layout: CacheLayout,
    state: SlotState,
    num_seqs: int,
    length: int,
    device: torch.device,
    *,
    deterministic: bool,
) -> None:
    """Prompts of `length` tokens, all in block 0, and a greedy draw for each; all tokens pass the layer, as if others
    followed, and the last of each prompt once more by itself."""

    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    num_tokens = num_seqs * length
    rows = PrefillRows(
        block_table=state.block_table,
        table_rows=zeros(num_seqs, torch.int32),
        seq_lens=zeros(num_seqs, torch.int32) + length,
        query_start=torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device),
        max_query_len=length,
        max_seq_len=length,
    )
    batch = AttentionBatch(zeros(num_tokens, torch.int64), zeros(num_tokens, torch.int64), None, rows)
    caches = layout.allocate(1, device)[:1]
    residual, q = model.begin(zeros(num_tokens, torch.int64), batch, caches)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    decode = DecodeRows(num_seqs, rows.block_table, rows.table_rows, rows.seq_lens, length)
    single = PrefillRows(rows.block_table, rows.table_rows, rows.seq_lens, starts, 1, length)
    places = zeros(num_seqs, torch.int64)
    last = LastRows(places, None, single) if deterministic else LastRows(places, decode, None)
    argmax(model.logits(model.finish(residual, q, batch, caches[-1], last=last)))
    model.finish(residual, q, batch, caches[-1])
