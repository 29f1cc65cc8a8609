"""Runs a model at its largest step to see what memory that takes, and once at its smallest. CUDA only.

Knows no configuration and no scheduler: plans are written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import torch

from .batch import SlotState
from .decode_step import DecodeBuffers, DecodeStep, Draw, StepKind, StepShare
from .kv_cache import CacheLayout
from .models.decoder import Decoder
from .plan import NewSequence, Row, StepPlan
from .prefill_graphs import PrefillGraphs
from .request import MAX_LOGPROBS, SamplingParams
from .runner import ModelRunner, RunnerOptions


def measure_peak_bytes(
    model: Decoder,
    layout: CacheLayout,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    device: torch.device,
    make_runner: Callable[..., ModelRunner] = ModelRunner,
) -> int:
    """Bytes that the largest step allocates at its peak, with the features of sampling that copy logits in fp32.

    `max_num_tokens` tokens of as many sequences as may run, each of which samples. The cache is one block, which all
    sequences overwrite: that changes no size. Ranks of a gang measure together.
    """
    num_seqs = min(max_num_seqs, max_num_tokens)
    lengths = [len(part) for part in np.array_split(np.arange(max_num_tokens), num_seqs)]
    options = RunnerOptions(max_num_seqs=num_seqs, max_model_len=lengths[0], block_size=layout.block_size)
    runner = make_runner(model, layout.allocate(1, device), device=device, options=options)
    # Greedy: what a draw needs is little beside those copies, and its kernels for fp32 would have to be compiled.
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, seed=0)
    blocks = [0] * -(-lengths[0] // layout.block_size)
    plan = StepPlan(
        0,
        [],
        [NewSequence(slot, [0] * length, length, blocks, params, []) for slot, length in enumerate(lengths)],
        [Row(slot, 0, length, [], True, False) for slot, length in enumerate(lengths)],
    )
    torch.cuda.synchronize(device)
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(plan).result()
    peak_bytes = torch.cuda.max_memory_allocated(device)
    runner.close()
    return peak_bytes - before_bytes


@torch.inference_mode()
def measure_graph_bytes(
    model: Decoder,
    layout: CacheLayout,
    *,
    max_num_seqs: int,
    max_padded_tokens: int,
    device: torch.device,
    share: StepShare | None = None,
) -> int:
    """Bytes that captured steps hold for good: activations of the largest decode step, its logits and what its draw
    needs, and activations of the largest step with prefills. Ranks of a gang measure together, each with its `share`.
    """
    state = SlotState.allocate(
        max_num_seqs=max_num_seqs, max_model_len=layout.block_size, block_size=layout.block_size, device=device
    )
    caches = layout.allocate(1, device)
    buffers = DecodeBuffers(max_num_seqs, no_slot=max_num_seqs, device=device)
    buffers.clear()
    step = DecodeStep(
        StepKind(Draw.FILTERED),
        buffers,
        model=model,
        caches=caches,
        state=state,
        block_size=layout.block_size,
        decodes_as_prefills=False,
        share=share,
    )

    def run_prefills() -> PrefillGraphs:
        prefills = PrefillGraphs(
            model,
            caches,
            state,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_padded_tokens,
            block_size=layout.block_size,
            capture=None,
            device=device,
        )
        prefills.run_largest()
        return prefills

    left_logits = max_num_seqs * model.shape.vocab_size * model.dtype.itemsize
    return left_logits + sum(_held_bytes(run, device) for run in (step.run, run_prefills))


def _held_bytes(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes


def warm_up(runner: ModelRunner) -> None:
    """Prefill and decode a sequence with every kind of draw: what compiling ahead does not reach is done then.

    All of them use block 0, where nothing is cached yet; the runner's slots are free again afterwards.
    """
    step_ids = count()
    greedy, drawn, filtered = (
        SamplingParams(temperature=temperature, top_p=top_p, seed=0)
        for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))
    )
    for params in (drawn, filtered, greedy):
        for plan in (
            StepPlan(next(step_ids), [], [NewSequence(0, [0, 0], 2, [0], params, [])], [Row(0, 0, 2, [], True, False)]),
            StepPlan(next(step_ids), [], [], [Row(0, 2, 1, [], True, True)]),
            StepPlan(next(step_ids), [0], [], []),
        ):
            runner.launch(plan).result()
