"""The first end of a decoder: token ids to vectors, from a whole table or from ranks that share one. Knows no model."""

from __future__ import annotations

import torch

from manta.engine.parallel.groups import TensorGroup
from manta.kernels.embedding import embedding


class Embedding:
    """`weight` [vocab, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], a fresh tensor."""
        return embedding(token_ids, self.weight)


class VocabParallelEmbedding(Embedding):
    """`weight` [part of vocab, hidden] holds the rows of the token ids from `first_id` on; each rank has some."""

    __slots__ = ("_first_id", "_group")

    def __init__(self, weight: torch.Tensor, *, first_id: int, group: TensorGroup) -> None:
        super().__init__(weight)
        self._first_id = first_id
        self._group = group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        places = token_ids - self._first_id
        elsewhere = (places < 0) | (places >= self.weight.shape[0])
        found = embedding(places.masked_fill_(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0.0)
        self._group.all_reduce_(found)
        return found
