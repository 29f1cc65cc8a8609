"""Log-probabilities of chosen tokens and of the most likely ones, from raw logits. Knows rows, no requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .request import TokenLogprobs

_CHUNK_ELEMENTS = 1 << 25
"""Logits that exist at once while a prompt's log-probabilities are computed: 128 MiB in fp32."""


@dataclass(frozen=True)
class Logprobs:
    """One entry a row: the chosen token's, and the `num_top` highest, best first."""

    token_ids: torch.Tensor  # [rows] int64
    chosen: torch.Tensor  # [rows] fp32
    top_ids: torch.Tensor  # [rows, num_top] int64
    top: torch.Tensor  # [rows, num_top] fp32

    def to_host(self) -> Logprobs:
        """Start to copy to pinned memory; whoever reads waits for the stream first."""
        return Logprobs(*(tensor.to("cpu", non_blocking=True) for tensor in vars(self).values()))

    def entries(self, num_top: list[int]) -> list[TokenLogprobs]:
        """As messages, with `num_top[row]` alternatives each. The tensors are on the host."""
        columns = (tensor.tolist() for tensor in (self.token_ids, self.chosen, self.top_ids, self.top))
        rows = zip(*columns, num_top, strict=True)
        return [TokenLogprobs(token, chosen, ids[:n], top[:n]) for token, chosen, ids, top, n in rows]


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Of `token_ids` [rows] under `logits` [rows, vocab] of any dtype; computed in fp32."""
    wide = logits.float()
    log_total = wide.logsumexp(-1, keepdim=True)
    chosen = (wide.gather(1, token_ids[:, None]) - log_total).squeeze(1)
    top, top_ids = wide.topk(min(num_top, wide.shape[1]), dim=-1)
    return Logprobs(token_ids, chosen, top_ids, top - log_total)


def logprobs_in_chunks(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> Logprobs:
    """As `logprobs_of`, from `hidden` [rows, hidden], without ever holding the logits of all rows."""
    size = _chunk_rows(vocab_size)
    chunks = zip(hidden.split(size), token_ids.split(size), strict=True)
    parts = [logprobs_of(head(rows), targets, num_top) for rows, targets in chunks]
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(torch.cat(tensors) for tensors in zip(*(vars(part).values() for part in parts), strict=True)))


def project_in_chunks(hidden: torch.Tensor, *, head: Callable[[torch.Tensor], torch.Tensor], vocab_size: int) -> None:
    """For a rank that shares `head` with one that calls `logprobs_in_chunks`: the same calls, so that the other has
    the logits."""
    for rows in hidden.split(_chunk_rows(vocab_size)):
        head(rows)


def _chunk_rows(vocab_size: int) -> int:
    return max(_CHUNK_ELEMENTS // vocab_size, 1)
