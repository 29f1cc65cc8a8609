"""Decode attention of rows that share their first tokens: the shared part is read once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .attention_decode import DecodeWorkspace, attention_decode


@dataclass(frozen=True)
class SharedPrefix:
    """Which rows share what, on the device, so that one captured graph serves any lengths and memberships."""

    num_tokens: torch.Tensor
    """[1] int32, a multiple of the block size; 0: nothing is shared."""
    table_row: torch.Tensor
    """[1] int32, the row of the block table that names the shared blocks."""
    members: torch.Tensor
    """[seqs] int32: 1 where a row's first tokens are the shared ones."""


def pays(num_members: int, num_prefix_tokens: int, num_rows: int) -> bool:
    """Whether attending to the prefix once is faster than for each row."""
    return False


def attention_shared_prefix(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace | None,
    max_seq_len: int,
    table_rows: torch.Tensor | None,
    prefix: SharedPrefix,
) -> torch.Tensor:
    """As `attention_decode`, whatever `prefix` says."""
    return attention_decode(
        q,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        scale,
        out,
        workspace=workspace,
        max_seq_len=max_seq_len,
        table_rows=table_rows,
    )
