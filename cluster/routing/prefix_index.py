"""Which replica holds which prefix, as far as one router knows. Block hashes and replica ids; no tokens, no clock.

One dict from a block's hash to a bit mask of replicas. A cache that holds a block holds all blocks before it, since it
evicts a prompt's end before its beginning: along a prompt the masks only shrink, and where they do is found by
bisection, with few lookups for prompts of any length. Fed by the replicas' cache events, and by what the router expects
them to store. Bounded: the hashes that were used longest ago go first, of a prompt its last blocks before its first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from manta.engine.prefix_cache import CacheEvents

MAX_KEPT_SETS = 1024
SWEEP_SIZE = 4096
"""Hashes that one call of `expire` cleans of replicas that are gone."""


Held: TypeAlias = tuple[tuple[str, ...], int]
"""Ids of replicas, and how many of a prompt's first blocks each of them holds."""


class _Replica:
    """One replica's bit in the masks, which changes when all that was known becomes void."""

    __slots__ = ("bit", "expected", "next_sequence", "num_blocks", "replica_id")

    def __init__(self, replica_id: str, bit: int) -> None:
        self.replica_id = replica_id
        self.bit = bit
        self.num_blocks = 0
        self.next_sequence: int | None = 0
        """Of the next report; None after a gap, until everything came again."""
        self.expected: dict[bytes, float] = {}
        """Hashes that no event has confirmed, and until when they count."""


class PrefixIndex:
    """Belongs to one thread. Replicas that were never added match nothing."""

    def __init__(self, *, max_blocks: int) -> None:
        """`max_blocks` bounds the hashes that are known, whatever replicas they are on; at least 1."""
        assert max_blocks >= 1
        self._max_blocks = max_blocks
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # what was used last stands last
        self._replicas: dict[str, _Replica] = {}
        self._by_bit: dict[int, _Replica] = {}
        self._live = 0
        """Bits of the replicas that exist."""
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._retired = 0
        """Bits of replicas that are gone, which masks may still hold."""
        self._sweeping = 0
        """Those of them that the sweep under way removes."""
        self._to_sweep: list[bytes] = []
        self._expectations: list[tuple[float, int, int, Sequence[bytes]]] = []  # heap: until, number, bit, hashes
        self._numbers = itertools.count()
        self._ids_of: dict[int, tuple[str, ...]] = {}
        """The replicas of masks that were met lately."""

    @property
    def num_blocks(self) -> int:
        """Different hashes that are known (of replicas that are gone, too, until `expire` has come to them)."""
        return len(self._masks)

    @property
    def num_entries(self) -> int:
        """Pairs of a hash and a replica that is believed to hold it."""
        return sum(replica.num_blocks for replica in self._replicas.values())

    def num_blocks_of(self, replica_id: str) -> int:
        """Hashes that the replica is believed to hold; 0 for one that is not known."""
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else replica.num_blocks

    def add_replica(self, replica_id: str) -> None:
        """An empty replica, whose first report of events is number 0. One that is known already starts anew."""
        self.remove_replica(replica_id)
        self._enter(replica_id)

    def remove_replica(self, replica_id: str) -> None:
        """It matches nothing from now on. Unknown ids are ignored."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._retire(replica)

    def apply(self, replica_id: str, events: CacheEvents) -> bool:
        """Bring in a report. False while reports before it are missing: ask the replica for everything again.

        What a report says counts either way, and so does what was known before it. One that is older than what is known
        changes nothing, nor does one of an unknown replica. A complete report replaces all that was known of the
        replica but expectations; reports go on with its number.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return True
        if events.complete:
            self._retire(replica)
            expected = replica.expected
            replica = self._enter(replica_id)
            replica.next_sequence = events.sequence
            self._store(replica, events.stored)
            for block_hash, until_s in expected.items():
                self._expect(replica, (block_hash,), until_s)
            return True
        due = replica.next_sequence
        if due is not None and events.sequence < due:
            return True
        self._forget(replica, events.evicted)
        self._store(replica, events.stored)
        is_next = due == events.sequence
        replica.next_sequence = events.sequence + 1 if is_next else None
        return is_next

    def expect(self, replica_id: str, hashes: Sequence[bytes], *, until_s: float) -> None:
        """A request with these hashes was sent there: they count as cached until then, and on if an event says so.

        They also count as used now. Keeps `hashes`, which must not change. Unknown replicas are ignored.
        """
        replica = self._replicas.get(replica_id)
        if replica is not None:
            self._expect(replica, hashes, until_s)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Blocks of the longest cached prefix, by replica; those without any are left out."""
        return {replica_id: num for ids, num in self.match_sets(hashes) for replica_id in ids}

    def match_sets(self, hashes: Sequence[bytes]) -> list[Held]:
        """The same, for sets of replicas. Of a replica that is in several of them the last one says it."""
        found: list[Held] = []
        get, ids_of, live, num_blocks = self._masks.get, self._ids_of.get, self._live, len(hashes)
        if not num_blocks or not get(hashes[0], 0) & live:
            return found
        whole = get(hashes[-1], 0) & live
        # Replicas of `mask` hold the first `low` blocks; those of them that hold the first `high`, too, are in `least`.
        parts = [(0, live, num_blocks, whole)]
        while parts:
            low, mask, high, least = parts.pop()
            while mask != least:
                if high - low == 1:
                    if low:  # all, in one go: those that go on are noted again later
                        ended = mask if mask == live else mask ^ least
                        found.append((ids_of(ended) or self._ids(ended), low))
                    break
                middle = (low + high) // 2
                between = get(hashes[middle - 1], 0) & mask | least
                if between != least:
                    parts.append((middle, between, high, least))
                high, least = middle, between
        if whole:
            found.append((ids_of(whole) or self._ids(whole), num_blocks))
        return found

    def expire(self, now_s: float) -> None:
        """Give up expectations that no event has met in time, and some of what is known of replicas that are gone."""
        while self._expectations and self._expectations[0][0] <= now_s:
            _, _, bit, hashes = heapq.heappop(self._expectations)
            replica = self._by_bit.get(bit)
            if replica is not None and replica.expected:
                expected = replica.expected
                self._forget(replica, [h for h in hashes if h in expected and expected[h] <= now_s])
        self._sweep()

    def check(self) -> None:
        """Assert that counts, bits and bounds agree."""
        assert len(self._masks) <= self._max_blocks
        assert self._live == sum(self._by_bit)
        assert not self._live & self._retired
        assert not self._sweeping & ~self._retired
        for replica in self._replicas.values():
            held = {h for h, mask in self._masks.items() if mask & replica.bit}
            assert replica.num_blocks == len(held)
            assert replica.expected.keys() <= held
        known = self._live | self._retired
        assert all(mask and not mask & ~known for mask in self._masks.values())

    def _enter(self, replica_id: str) -> _Replica:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        replica = self._replicas[replica_id] = self._by_bit[bit] = _Replica(replica_id, bit)
        self._live |= bit
        self._ids_of.clear()
        return replica

    def _retire(self, replica: _Replica) -> None:
        """Void a replica's bit at once; the masks are cleaned of it bit by bit."""
        del self._by_bit[replica.bit]
        self._live ^= replica.bit
        if replica.num_blocks:
            self._retired |= replica.bit
        else:
            self._free_bits.append(replica.bit)

    def _sweep(self) -> None:
        """Clean the next masks of retired bits; a bit that no mask holds any more can be given away again."""
        if not self._to_sweep:
            if not self._retired:
                return
            self._sweeping, self._to_sweep = self._retired, list(self._masks)
        masks, kept = self._masks, ~self._sweeping
        for block_hash in self._to_sweep[-SWEEP_SIZE:]:
            mask = masks.get(block_hash)
            if mask is not None and mask & kept != mask:
                self._set(block_hash, mask & kept)
        del self._to_sweep[-SWEEP_SIZE:]
        if not self._to_sweep:
            swept, self._sweeping = self._sweeping, 0
            self._retired ^= swept
            self._free_bits.extend(_bits(swept))

    def _ids(self, mask: int) -> tuple[str, ...]:
        """Of a mask that was not met lately."""
        if len(self._ids_of) >= MAX_KEPT_SETS:
            self._ids_of.clear()
        ids = self._ids_of[mask] = tuple(self._by_bit[bit].replica_id for bit in _bits(mask))
        return ids

    def _expect(self, replica: _Replica, hashes: Sequence[bytes], until_s: float) -> None:
        masks, bit, expected = self._masks, replica.bit, replica.expected
        get = masks.get
        pending = [block_hash for block_hash in hashes if block_hash in expected] if expected else []
        for block_hash in pending:
            expected[block_hash] = max(until_s, expected[block_hash])
        new = [block_hash for block_hash in hashes if not get(block_hash, 0) & bit]
        for block_hash in new:
            masks[block_hash] = get(block_hash, 0) | bit
            expected[block_hash] = until_s
        replica.num_blocks += len(new)
        if new or pending:
            heapq.heappush(self._expectations, (until_s, next(self._numbers), bit, hashes))
        deque(map(masks.move_to_end, reversed(hashes)), maxlen=0)  # a prefix outlives what follows it
        self._bound()

    def _store(self, replica: _Replica, hashes: Sequence[bytes]) -> None:
        masks, bit, expected = self._masks, replica.bit, replica.expected
        num_new = 0
        for block_hash in reversed(hashes):
            mask = masks.get(block_hash, 0)
            if not mask & bit:
                masks[block_hash] = mask | bit
                num_new += 1
            elif expected:
                expected.pop(block_hash, None)
        replica.num_blocks += num_new
        self._bound()

    def _forget(self, replica: _Replica, hashes: Iterable[bytes]) -> None:
        masks, bit = self._masks, replica.bit
        for block_hash in hashes:
            mask = masks.get(block_hash, 0)
            if mask & bit:
                self._set(block_hash, mask ^ bit)
                replica.num_blocks -= 1
                replica.expected.pop(block_hash, None)

    def _set(self, block_hash: bytes, mask: int) -> None:
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]

    def _bound(self) -> None:
        while len(self._masks) > self._max_blocks:
            block_hash, mask = self._masks.popitem(last=False)
            for bit in _bits(mask & self._live):
                replica = self._by_bit[bit]
                replica.num_blocks -= 1
                replica.expected.pop(block_hash, None)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
