"""Whose turn is next among tenants: start-time fair queueing with strict priorities. Pure; knows costs, no clock.

Goyal, Vin and Cheng, "Start-Time Fair Queueing: A Scheduling Algorithm for Integrated Services Packet Switching
Networks", 1997: an entry's start tag is the virtual time or its tenant's last finish tag, whichever is later, and its
finish tag is its cost over the tenant's weight later; the lowest start tag is next and becomes the virtual time.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

_Key = tuple[int, float, int]
"""Priority, start tag, number: the order of service."""


@dataclass(frozen=True, slots=True)
class _Entry:
    key: _Key
    request_id: str
    tenant: str
    cost: float


class _Class:
    """The state of one priority: virtual time, and the finish tags that are ahead of it."""

    __slots__ = ("finish_tags", "virtual_time")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.finish_tags: dict[str, float] = {}

    def start_tag(self, tenant: str) -> float:
        return max(self.virtual_time, self.finish_tags.get(tenant, 0.0))

    def advance(self, virtual_time: float) -> None:
        self.virtual_time = max(self.virtual_time, virtual_time)
        behind = [tenant for tenant, tag in self.finish_tags.items() if tag <= self.virtual_time]
        for tenant in behind:
            del self.finish_tags[tenant]


class FairQueue:
    """Entries of tenants with weights and costs. Lower priorities are served first, whatever the tags."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # by key
        self._by_id: dict[str, _Entry] = {}
        self._classes: dict[int, _Class] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def first(self) -> str | None:
        """Whose turn it is."""
        return self._entries[0].request_id if self._entries else None

    @property
    def last(self) -> str | None:
        """Who would be served after all others."""
        return self._entries[-1].request_id if self._entries else None

    def push(self, request_id: str, *, tenant: str, weight: float, cost: float, priority: int = 0) -> None:
        """`request_id` must not be queued."""
        assert request_id not in self._by_id
        one = self._classes.setdefault(priority, _Class())
        start_tag = one.start_tag(tenant)
        one.finish_tags[tenant] = start_tag + cost / weight
        entry = _Entry((priority, start_tag, next(self._numbers)), request_id, tenant, cost)
        bisect.insort(self._entries, entry, key=_key)
        self._by_id[request_id] = entry

    def pop(self) -> str:
        """Serve the first."""
        entry = self._entries.pop(0)
        del self._by_id[entry.request_id]
        self._classes[entry.key[0]].advance(entry.key[1])
        return entry.request_id

    def remove(self, request_id: str, *, weight: float) -> bool:
        """Take an entry out that is not served; its tenant is not charged for it. False when it is not queued."""
        entry = self._by_id.pop(request_id, None)
        if entry is None:
            return False
        del self._entries[bisect.bisect_left(self._entries, entry.key, key=_key)]
        self.settle(entry.tenant, -entry.cost, weight=weight, priority=entry.key[0])
        return True

    def settle(self, tenant: str, difference: float, *, weight: float, priority: int = 0) -> None:
        """What was served cost so much more than it was queued with (below 0: less): its tenant's next entries come so
        much later."""
        one = self._classes.get(priority)
        if one is not None:
            one.finish_tags[tenant] = one.start_tag(tenant) + difference / weight
            one.advance(one.virtual_time)

    def cost_ahead(self, tenant: str, *, priority: int = 0) -> float:
        """Cost of the entries that would be served before a new one of this tenant."""
        one = self._classes.get(priority)
        key = (priority, one.start_tag(tenant) if one is not None else 0.0, 1 << 62)
        return sum(entry.cost for entry in self._entries[: bisect.bisect_left(self._entries, key, key=_key)])

    def comes_last(self, tenant: str, *, priority: int = 0) -> bool:
        """Whether a new entry of this tenant would be served after all others."""
        one = self._classes.get(priority)
        start_tag = one.start_tag(tenant) if one is not None else 0.0
        return not self._entries or (priority, start_tag) >= self._entries[-1].key[:2]

    def forget_idle(self) -> None:
        """Nothing is queued and nothing is served: all tenants begin anew."""
        assert not self._entries
        self._classes.clear()


def _key(entry: _Entry) -> _Key:
    return entry.key
