"""Times prefill attention beside cuDNN's. Knows the kernel's interface and the frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from manta.kernels import attention_prefill

from .kernel_timing import Line, ModelShape, Peaks, block_tables, line_of, random

LENGTHS = (512, 2048, 8192, 32768)


def bench(peaks: Peaks, device: torch.device, model: ModelShape) -> Iterator[Line]:
    for length in LENGTHS:
        blocks = length // model.page
        caches = random(device, 2, 4 * blocks, model.page, model.kv_heads, model.dim)
        q = random(device, length, model.heads, model.dim)
        start = torch.tensor([0, length], dtype=torch.int32, device=device)
        call = partial(
            attention_prefill.attention_prefill, q, caches[0], caches[1], query_start=start, seq_lens=start[1:],
            scale=model.dim**-0.5, max_query_len=length, max_seq_len=length,
        )  # fmt: skip
        calls = [partial(call, block_table=table) for table in block_tables(device, 1, blocks, 4 * blocks)]
        dense = [x.transpose(0, 1)[None].contiguous() for x in (q, *caches.flatten(1, 2)[:, :length])]
        flop = 2 * length * length * model.heads * model.dim  # two products over half of the square
        others = [partial(causal_by_cudnn, *dense)] * 4
        yield line_of(
            "attention_prefill", f"{length} tokens", calls, flop / peaks.matmul_flop_per_s, "cuDNN SDPA", others
        )


def causal_by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
