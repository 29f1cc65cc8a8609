"""Where a rank stands: its number, stage and part. Torch-free; knows no model, no groups, no addresses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """rank = pp_rank * tp_size + tp_rank: the ranks of one pipeline stage follow one another."""

    rank: int
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        assert self.tp_size >= 1, f"a tensor-parallel size is at least 1, not {self.tp_size}"
        assert self.pp_size >= 1, f"a pipeline-parallel size is at least 1, not {self.pp_size}"
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} is not one of {self.world_size}"

    @staticmethod
    def at(*, tp_rank: int, pp_rank: int, tp_size: int, pp_size: int) -> RankPlace:
        """The place of a part of a stage."""
        return RankPlace(pp_rank * tp_size + tp_rank, tp_size, pp_size)

    @property
    def tp_rank(self) -> int:
        """Which part of the stage's layers this rank holds."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Which stage's layers this rank holds."""
        return self.rank // self.tp_size

    @property
    def world_size(self) -> int:
        """All ranks of the gang."""
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether token ids enter here."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether logits come out here."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_driver(self) -> bool:
        """Whether this rank schedules for all."""
        return self.rank == 0

    @property
    def samples(self) -> bool:
        """Whether this rank draws the tokens: one rank of the last stage does."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def stage_ranks(self) -> range:
        """The ranks that hold the same layers as this one, itself among them."""
        first = self.pp_rank * self.tp_size
        return range(first, first + self.tp_size)

    @property
    def sampling_rank(self) -> int:
        """The rank that draws the tokens."""
        return (self.pp_size - 1) * self.tp_size
