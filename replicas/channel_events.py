"""What one edge has yet to learn of the blocks that an engine caches. Knows no socket and not what edges do with it.

A feed keeps the difference between what its edge was told and what is cached, so it never holds more than the cache,
however slow the edge: what is stored and evicted again before it was told is never told. A report is so small that
neither end stalls on it; a complete list of a large cache goes out in many of them, changes meanwhile included.
"""

from __future__ import annotations

from itertools import islice

from manta.engine.prefix_cache import CacheEvents

MAX_HASHES_A_REPORT = 2048
"""About 40 kB and a few tenths of a millisecond at either end."""


class CacheFeed:
    """Reports for one edge, numbered without gaps. It begins, and begins anew after `restart`, with a complete list."""

    def __init__(self, *, max_hashes: int = MAX_HASHES_A_REPORT) -> None:
        self._max_hashes = max_hashes
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._report: CacheEvents | None = None
        """Made and not yet sent."""
        self._sequence = 0
        self._is_complete_next = False
        self.needs_list = True
        """Whether it waits for `begin`; changes are of no interest until then."""

    @property
    def has_news(self) -> bool:
        return self._report is not None or self._is_complete_next or bool(self._stored or self._evicted)

    def restart(self) -> None:
        """Forget what the edge was told."""
        self._stored, self._evicted, self._report = {}, {}, None
        self._is_complete_next, self.needs_list = False, True

    def begin(self, hashes: list[bytes]) -> None:
        """All that is cached now."""
        self._stored = dict.fromkeys(hashes)
        self._is_complete_next, self.needs_list = True, False

    def add(self, events: CacheEvents) -> None:
        """What changed since; the engine's own numbers do not matter here."""
        if self.needs_list:
            return
        stored, evicted = self._stored, self._evicted
        for block_hash in events.stored:
            if block_hash in evicted:
                del evicted[block_hash]
            else:
                stored[block_hash] = None
        for block_hash in events.evicted:
            if block_hash in stored:
                del stored[block_hash]
            else:
                evicted[block_hash] = None

    def report(self) -> CacheEvents | None:
        """The next report, the same again until it was `sent`; None when there is nothing to tell."""
        if self._report is None and self.has_news:
            stored = _take(self._stored, self._max_hashes)
            evicted = _take(self._evicted, self._max_hashes - len(stored))
            complete, self._is_complete_next = self._is_complete_next, False
            self._report = CacheEvents(sequence=self._sequence, stored=stored, evicted=evicted, complete=complete)
        return self._report

    def sent(self) -> None:
        """The report is on its way. As in the cache's own numbering, a complete list has the number of what follows."""
        assert self._report is not None
        self._sequence += not self._report.complete
        self._report = None


def _take(waiting: dict[bytes, None], most: int) -> list[bytes]:
    """Remove and return up to `most`, the oldest first."""
    taken = list(islice(waiting, most))
    for block_hash in taken:
        del waiting[block_hash]
    return taken
