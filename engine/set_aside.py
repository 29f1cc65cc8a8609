"""Blocks that are held beside those of running sequences: reserved for KV that will come, kept while it is read. Pure.

Knows blocks and tokens as numbers, not who sends or reads. Every block here has a reference of its own in the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .prefix_cache import BlockHasher, PrefixCache


@dataclass(frozen=True)
class Reserved:
    """Blocks for a sequence's tokens, each held once. The first of them may come from the prefix cache."""

    token_ids: list[int]
    block_ids: list[int]
    """For all tokens and the one that follows them."""
    block_hashes: list[bytes]
    """Of the full blocks; empty where nothing is cached by hash."""
    num_cached_tokens: int


class SetAside:
    """One scheduler's; in its thread."""

    def __init__(self, cache: PrefixCache, hasher: BlockHasher | None) -> None:
        """`hasher`: None where no prefix is cached."""
        self._cache = cache
        self._hasher = hasher
        self._references: Counter[int] = Counter()
        self.num_reserved = 0
        """Reservations that are neither handed over nor given back: sequences that will run here."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are held here."""
        return len(self._references)

    def references(self, block_id: int) -> int:
        """How often a block is held here (for tests)."""
        return self._references[block_id]

    def reserve(self, token_ids: list[int], *, block_size: int, salt: str | None, num_spare: int) -> Reserved | None:
        """Blocks for the tokens and one more, those that are cached first; None unless `num_spare` others stay free."""
        block_hashes: list[bytes] = []
        cached: list[int] = []
        if self._hasher is not None:
            self._hasher.extend(block_hashes, token_ids, salt=salt)
            cached = self._cache.lookup(block_hashes)
        pool = self._cache.pool
        num_missing = len(token_ids) // block_size + 1 - len(cached)
        num_revived = sum(1 for block_id in cached if not pool.num_references(block_id))
        if not pool.can_allocate(num_missing + num_revived + num_spare):
            return None
        for block_id in cached:
            pool.acquire(block_id)
        block_ids = cached + pool.allocate(num_missing)
        self._references.update(block_ids)
        self.num_reserved += 1
        return Reserved(token_ids, block_ids, block_hashes, len(cached) * block_size)

    def give_back(self, reserved: Reserved) -> None:
        """Free what was reserved and never used. Nobody may write into it any more."""
        self.num_reserved -= 1
        self.let_go(reserved.block_ids)

    def hand_over(self, reserved: Reserved) -> None:
        """A running sequence has the blocks from now on, with their references."""
        self.num_reserved -= 1
        self._forget(reserved.block_ids)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep a running sequence's blocks after its end."""
        for block_id in block_ids:
            self._cache.pool.acquire(block_id)
        self._references.update(block_ids)

    def let_go(self, block_ids: Sequence[int]) -> None:
        """Undo `hold`; of a sequence that has ended, the blocks are free (and cached where they were published)."""
        self._forget(block_ids)
        self._cache.release(block_ids)

    def _forget(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} was not set aside"
            if not self._references[block_id]:
                del self._references[block_id]
