"""Blocks of the KV cache: ids, reference counts, and the order in which free ones are reused. Pure bookkeeping.

Knows no hashes and no tokens: whether a free block still holds something worth keeping is said by its owner when the
reference count falls to zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1.

    A block is held (reference count > 0) or free. Free blocks without content are handed out first, then those with
    content, the longest free first; `on_evict(block_id)` tells that a block's content is lost.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] = lambda block_id: None) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those with content included."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_references(self, block_id: int) -> int:
        return self._references[block_id]

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one reference. The caller has asked `can_allocate`."""
        assert self.can_allocate(num_blocks)
        block_ids = []
        for _ in range(num_blocks):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id, _ = self._evictable.popitem(last=False)
                self._on_evict(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def acquire(self, block_id: int) -> None:
        """One more holder of a block that has content."""
        if self._references[block_id] == 0:
            del self._evictable[block_id]
        self._references[block_id] += 1

    def release(self, block_ids: Iterable[int], *, has_content: Callable[[int], bool]) -> None:
        """One holder less of each. Pass a sequence's blocks last first: a prefix outlives what follows it."""
        for block_id in block_ids:
            assert self._references[block_id] > 0
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if has_content(block_id):
                    self._evictable[block_id] = None
                else:
                    self._empty.append(block_id)

    def evict_all(self) -> None:
        """Forget the content of all free blocks."""
        for block_id in self._evictable:
            self._on_evict(block_id)
        self._empty.extend(self._evictable)
        self._evictable.clear()

    def check(self) -> None:
        """Assert that every block is in exactly one state."""
        free = [*self._empty, *self._evictable]
        assert len(free) == len(set(free)), "a block is free twice"
        assert all(self._references[block_id] == 0 for block_id in free), "a held block is free"
        held = sum(1 for count in self._references if count > 0)
        assert held + len(free) == self.num_blocks, "a block is lost"
        assert min(self._references, default=0) >= 0
