"""When slots of a replica become free, by how long requests hold them. Pure; knows counts and times, no requests.

Requests that begin together end together: after a burst no slot becomes free for as long as an answer takes, and then
many do. How many end a second says nothing of that. What is known of a replica is how many requests run and how many
have ended. Taken as if they ended in the order in which they began, that says how long each slot has been held; the
mean of these times is the true one in any order (Little's law), and where answers are alike so is each of them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT_TIMES = 64
"""How long slots were held: of so many that became free last."""
SURE = 0.95
"""Share of the waits that end within the seconds that are sure."""

RATE_INTERVAL_S, RATE_WEIGHT = 1.0, 0.3
"""Over which ends are counted; the weight of each new count."""


class SlotWait(NamedTuple):
    """Seconds until a slot is free."""

    usual_s: float
    """On average."""
    sure_s: float
    """With few exceptions; not less."""


class SlotTimes:
    """Of one replica."""

    def __init__(self) -> None:
        self._begun_at_s: deque[float] = deque()
        """Of the requests that run, the oldest first."""
        self._held_s: deque[float] = deque(maxlen=KEPT_TIMES)
        self._num_ended: int | None = None

    def learn(self, num_running: int, num_ended: int, now_s: float) -> None:
        """So many requests run now, and have ended in all."""
        begun = self._begun_at_s
        if self._num_ended is None or num_ended < self._num_ended:  # the first that is heard, or another engine
            self._num_ended = num_ended
            begun.clear()
        num_new_ends = num_ended - self._num_ended
        begun.extend([now_s] * (num_running + num_new_ends - len(begun)))
        for _ in range(num_new_ends):
            self._held_s.append(now_s - begun.popleft())
        while len(begun) > num_running:  # preempted, the latest first
            begun.pop()
        self._num_ended = num_ended

    def wait(self, num_before: int, now_s: float, *, num_unsure: int = 0) -> SlotWait | None:
        """Of a request that `num_before` others wait before while all slots are held, and perhaps `num_unsure` more;
        None while nobody knows how long they are."""
        if not self._held_s or not self._begun_at_s:
            return None
        usual_s, sure_s = self._wait(num_before, now_s)
        if num_unsure:
            sure_s = self._wait(num_before + num_unsure, now_s).sure_s
        return SlotWait(usual_s, max(usual_s, sure_s))

    def _wait(self, num_before: int, now_s: float) -> SlotWait:
        begun, held_s = self._begun_at_s, self._held_s
        mean_s = sum(held_s) / len(held_s)
        num_rounds, place = divmod(num_before, len(begun))
        age_s, rounds_s = now_s - begun[place], num_rounds * mean_s
        longer_s = sorted(one for one in held_s if one > age_s)
        if not longer_s:  # held for longer than any before: it may become free at any time
            usual_s = (place + 1) * mean_s / len(begun)
            return SlotWait(rounds_s + usual_s, rounds_s + 2 * usual_s)
        left_s = sum(longer_s) / len(longer_s) - age_s
        return SlotWait(rounds_s + left_s, rounds_s + longer_s[int(SURE * len(longer_s))] - age_s)


class EndRate:
    """Requests a second that end, by times when others wait: else it says how many come."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        """None before any such time."""
        self._since: tuple[float, int] | None = None

    def learn(self, num_waiting: int, num_ended: int, now_s: float) -> None:
        """So many wait now, and have ended in all."""
        if not num_waiting:
            self._since = None
            return
        if self._since is None:
            self._since = now_s, num_ended
            return
        since_s, before = self._since
        if now_s - since_s < RATE_INTERVAL_S:
            return
        per_s = (num_ended - before) / (now_s - since_s)
        self.per_s = per_s if self.per_s is None else self.per_s + RATE_WEIGHT * (per_s - self.per_s)
        self._since = now_s, num_ended
