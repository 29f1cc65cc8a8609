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

    def wait(self, num_before: int, now_s: float) -> SlotWait | None:
        """Of a request that `num_before` others wait before while all slots are held; None while nobody knows how long
        they are."""
        begun, held_s = self._begun_at_s, self._held_s
        if not held_s or not begun:
            return None
        mean_s = sum(held_s) / len(held_s)
        num_rounds, place = divmod(num_before, len(begun))
        age_s = now_s - begun[place]
        longer_s = sorted(one for one in held_s if one > age_s)
        if longer_s:
            usual_s, sure_s = sum(longer_s) / len(longer_s) - age_s, longer_s[int(SURE * len(longer_s))] - age_s
        else:  # held for longer than any before: it may become free at any time
            usual_s = (place + 1) * mean_s / len(begun)
            sure_s = 2 * usual_s
        return SlotWait(num_rounds * mean_s + usual_s, num_rounds * mean_s + max(usual_s, sure_s))
