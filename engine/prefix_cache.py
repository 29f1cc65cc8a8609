"""Which blocks hold which prefix: chained block hashes to block ids, with events for those who mirror the index.

A block's hash covers everything before it (parent hash), the tokens in it, and the domain: model, adapter and salt.
Knows block ids and hashes, not requests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from .block_pool import BlockPool

HASH_SIZE = 16
"""Bytes of a block hash."""


class CacheEvents(msgspec.Struct, kw_only=True):
    """Prefix-cache changes since the last report, as 16-byte block hashes: what is cached now and was not, and the
    other way round. `sequence` numbers the report; a gap means that the receiver must ask for everything again
    (`complete` marks such a full list)."""

    sequence: int
    stored: list[bytes] = []
    evicted: list[bytes] = []
    complete: bool = False


class BlockHasher:
    """Hashes token blocks with keyed BLAKE2b (RFC 7693), stable across processes that share `key`.

    `key` keeps tenants of one cluster from computing the hashes of another; `domain` names model and adapter.
    """

    def __init__(self, block_size: int, *, domain: str, key: bytes = b"") -> None:
        self.block_size = block_size
        self._key = key
        self._domain = domain.encode()

    def root(self, salt: str | None) -> bytes:
        """Parent of a sequence's first block."""
        digest = hashlib.blake2b(digest_size=HASH_SIZE, key=self._key, person=b"manta-root")
        digest.update(len(self._domain).to_bytes(8, "little") + self._domain)
        digest.update(b"\0" if salt is None else b"\1" + salt.encode())
        return digest.digest()

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], *, salt: str | None) -> None:
        """Append to `hashes` what is missing for the full blocks of `token_ids`."""
        size = self.block_size
        parent = hashes[-1] if hashes else self.root(salt)
        for index in range(len(hashes), len(token_ids) // size):
            block = array("I", token_ids[index * size : (index + 1) * size]).tobytes()
            parent = hashlib.blake2b(parent + block, digest_size=HASH_SIZE, key=self._key).digest()
            hashes.append(parent)

    def begins_as(self, hashes: Sequence[bytes], token_ids: Sequence[int], *, salt: str | None) -> bool:
        """Whether `hashes` were made for the full blocks of `token_ids` by a hasher like this one: of this block size,
        domain and key. Looks at their number and at the first, so that it costs little."""
        first: list[bytes] = []
        self.extend(first, token_ids[: self.block_size], salt=salt)
        return len(hashes) == len(token_ids) // self.block_size and list(hashes[:1]) == first


class PrefixCache:
    """The index over one pool. A hash names at most one block; content is published once and never changes."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._stored: list[bytes] = []
        self._evicted: list[bytes] = []
        self._sequence = 0

    @property
    def num_cached_blocks(self) -> int:
        return len(self._hash_of)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix; nothing changes, `acquire` them to hold them."""
        block_ids = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable. Does nothing when another block already holds the same prefix."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self._stored.append(block_hash)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each of a sequence's blocks (in sequence order)."""
        self.pool.release(reversed(block_ids), has_content=self._hash_of.__contains__)

    def take_events(self) -> CacheEvents | None:
        """What changed since the last call; None when nothing did."""
        if not self._stored and not self._evicted:
            return None
        stored, evicted = self._stored, self._evicted
        if stored and evicted:  # some hashes may have come and gone: what counts is where they are now
            stored = list(dict.fromkeys(block_hash for block_hash in stored if block_hash in self._block_of))
            evicted = list(dict.fromkeys(block_hash for block_hash in evicted if block_hash not in self._block_of))
        events = CacheEvents(sequence=self._sequence, stored=stored, evicted=evicted)
        self._sequence += 1
        self._stored, self._evicted = [], []
        return events

    def all_events(self) -> CacheEvents:
        """Everything that is cached, for a receiver that joins late or has missed a report."""
        return CacheEvents(sequence=self._sequence, stored=list(self._block_of), complete=True)

    def check(self) -> None:
        """Assert that index and pool agree."""
        self.pool.check()
        assert {self._block_of[h] for h in self._block_of} == set(self._hash_of)
        assert all(self._block_of[h] == block_id for block_id, h in self._hash_of.items())

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self._evicted.append(block_hash)
