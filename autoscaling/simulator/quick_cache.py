"""Which prefixes a quick replica holds: the blocks used last, as many as its KV room leaves. Knows no jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class FleetIndex:
    """From a block's hash to the replicas that hold it, as bits of an integer: what routers match prompts against."""

    def __init__(self) -> None:
        self.masks: dict[bytes, int] = {}

    def match(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """(replicas' bits, blocks): who holds how much of a prompt's beginning; who holds most stands last."""
        found: list[tuple[int, int]] = []
        held = -1
        for position, block_hash in enumerate(hashes):
            left = held & self.masks.get(block_hash, 0)
            if left != held:
                if position:
                    found.append((held ^ left, position))
                held = left
                if not held:
                    return found
        if hashes and held > 0:
            found.append((held, len(hashes)))
        return found


class QuickCache:
    """One replica's. A prompt's blocks count as held when it is begun, and as used last when it has ended."""

    def __init__(self, index: FleetIndex, number: int, *, num_blocks: int, block_size: int) -> None:
        """`number` is the replica's bit in the index; a number is given away once."""
        self._index, self._bit = index, 1 << number
        self._num_blocks, self._size = num_blocks, block_size
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._num_shared = 0
        """Blocks of running prompts, which are counted as held tokens too."""

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest prefix that is held."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._held:
                break
            count += 1
        return count

    def began(self, hashes: Sequence[bytes], num_held_tokens: int) -> None:
        """A prompt runs; all that run hold so many tokens."""
        held, masks, bit = self._held, self._index.masks, self._bit
        self._num_shared += len(hashes)
        for block_hash in reversed(hashes):
            if block_hash in held:
                held.move_to_end(block_hash)
            else:
                held[block_hash] = None
                masks[block_hash] = masks.get(block_hash, 0) | bit
        private = max(0, num_held_tokens // self._size - self._num_shared)
        while len(held) > max(self._num_blocks - private, 0):
            self._forget(held.popitem(last=False)[0])

    def ended(self, hashes: Sequence[bytes], num_prompt_tokens: int) -> None:
        """It does not run any more."""
        self._num_shared -= len(hashes)
        for block_hash in reversed(hashes):
            if block_hash in self._held:
                self._held.move_to_end(block_hash)

    def clear(self) -> None:
        """The replica is gone."""
        while self._held:
            self._forget(self._held.popitem()[0])
        self._num_shared = 0

    def _forget(self, block_hash: bytes) -> None:
        mask = self._index.masks[block_hash] & ~self._bit
        if mask:
            self._index.masks[block_hash] = mask
        else:
            del self._index.masks[block_hash]
