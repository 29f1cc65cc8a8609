"""The first end of a decoder: token ids to vectors. Knows no model."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding


class Embedding:
    """`weight` [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], a fresh tensor."""
        return embedding(token_ids, self.weight)
