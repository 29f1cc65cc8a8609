"""When fewer replicas may be asked for: after a quiet window, which grows where falling was regretted. Pure; no clock.

A target that has to rise again soon after it fell was lowered too early, as bursts that come back do it: the window
doubles, up to some times its length, and halves again when nothing was regretted for long. For half an hour nothing
falls then on what the error budget could pay: it was tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOST_FACTOR = 5.0
"""The longest window, over the configured one; so long after a fall a rise is a regret, too."""
REMEMBERED_S = 1800.0
"""For so long a regret is known."""


@dataclass(frozen=True)
class Damping:
    """Of one pool; a value. Times in seconds."""

    needs: tuple[tuple[float, int], ...] = ()
    """What was needed when; values fall from first to last, since an older lower one can never be the most again."""
    factor: float = 0.0
    """What regrets made of the window, over the usual one."""
    fell_at_s: float = -math.inf
    """The last fall that nothing was said of yet."""
    regretted_at_s: float = -math.inf
    """When the window last became longer, or shorter."""
    last_regret_s: float = -math.inf

    def need(self, num_replicas: int, now_s: float, *, quiet_s: float, least: float = 1.0) -> Damping:
        """So many are needed now. Without a regret the window is `least` times `quiet_s`."""
        factor, regretted_at_s = self.factor, self.regretted_at_s
        if factor > 0 and now_s - regretted_at_s > 2 * MOST_FACTOR * quiet_s:
            factor, regretted_at_s = factor / 2, now_s
        window_s = max(factor, least) * quiet_s
        needs = [entry for entry in self.needs if entry[0] > now_s - window_s]
        while needs and needs[-1][1] <= num_replicas:
            needs.pop()
        return replace(self, needs=(*needs, (now_s, num_replicas)), factor=factor, regretted_at_s=regretted_at_s)

    def rose(self, now_s: float, *, quiet_s: float, least: float = 1.0) -> Damping:
        """The target rises now: where it fell not long ago the window doubles, and is at least the usual one."""
        if now_s - self.fell_at_s > MOST_FACTOR * quiet_s:
            return self
        factor = min(max(2 * max(self.factor, least), 1.0), MOST_FACTOR)
        return replace(self, factor=factor, fell_at_s=-math.inf, regretted_at_s=now_s, last_regret_s=now_s)

    def is_regretted(self, now_s: float) -> bool:
        """Whether a fall was regretted not long ago."""
        return now_s - self.last_regret_s < REMEMBERED_S

    def fell(self, now_s: float) -> Damping:
        """The target falls now."""
        return replace(self, fell_at_s=now_s)

    @property
    def most(self) -> int:
        """That was needed at any time of the window."""
        return max(num for _, num in self.needs)
