"""Repetition, presence and frequency penalties, from counts that live on the device. Knows rows of a pool, no requests.

The counts are updated with the sampled token where it is sampled, so that running one step ahead changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PenalizedRows:
    """Rows of a batch of logits that are penalized. All [penalized]."""

    logit_rows: torch.Tensor  # int64
    pool_rows: torch.Tensor  # int64
    repetition: torch.Tensor  # fp32
    presence: torch.Tensor  # fp32
    frequency: torch.Tensor  # fp32


class PenaltyPool:
    """One row a sequence that asks for penalties; grows by doubling up to as many as are ever used at once."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        return vocab_size * (torch.int32.itemsize + torch.bool.itemsize)

    def reserve(self, num_rows: int) -> None:
        """Make room for rows 0 to `num_rows` - 1."""
        missing = num_rows - self._in_prompt.shape[0]
        if missing > 0:
            size = (missing, self._vocab_size)
            self._output_counts = torch.cat((self._output_counts, self._output_counts.new_zeros(size)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(size)))

    def enter(self, rows: torch.Tensor, prompt_places: torch.Tensor, output_places: torch.Tensor) -> None:
        """Start `rows` [entering] int64 over; places are row * vocab + token id, one for each known token."""
        self._output_counts.index_fill_(0, rows, 0)
        self._in_prompt.index_fill_(0, rows, False)
        self._in_prompt.view(-1).index_fill_(0, prompt_places, True)
        self._count(output_places)

    def penalize(self, logits: torch.Tensor, rows: PenalizedRows) -> None:
        """Change the rows of `logits` [rows, vocab] fp32 in place.

        Repetition (Keskar et al. 2019, https://arxiv.org/abs/1909.05858) looks at prompt and output: positive logits
        are divided, negative ones multiplied. Presence is subtracted once, frequency once an occurrence, for tokens of
        the output.
        """
        x = logits.index_select(0, rows.logit_rows)  # [penalized, vocab]
        counts = self._output_counts.index_select(0, rows.pool_rows)
        is_in_output = counts > 0
        is_seen = self._in_prompt.index_select(0, rows.pool_rows).logical_or_(is_in_output)
        factor = rows.repetition[:, None]
        x = torch.where(is_seen, torch.where(x > 0, x / factor, x * factor), x)
        x -= rows.frequency[:, None] * counts
        x -= rows.presence[:, None] * is_in_output
        logits.index_copy_(0, rows.logit_rows, x)

    def add(self, rows: PenalizedRows, token_ids: torch.Tensor) -> None:
        """Count the tokens that were sampled, `token_ids` [rows of the batch] int64."""
        self._count(rows.pool_rows * self._vocab_size + token_ids.index_select(0, rows.logit_rows))

    def _count(self, places: torch.Tensor) -> None:
        self._output_counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
