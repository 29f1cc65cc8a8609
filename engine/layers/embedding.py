"""Both ends of a decoder: token ids to vectors, vectors to logits, with one weight or two. Knows no model."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from .linear import Linear


class Embedding:
    """`weight` [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], a fresh tensor."""
        return embedding(token_ids, self.weight)

    def as_head(self) -> Linear:
        """The head of a model with tied embeddings: the same memory until it is packed."""
        return Linear(self.weight)
