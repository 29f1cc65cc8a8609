"""Judges whether a gang lives and makes progress, from times it is told. Pure: no clock, no sockets, no threads."""

from __future__ import annotations

import math
from collections.abc import Callable

BEAT_S = 1.0
"""Every rank is heard of at least so often, also when it is idle."""
SILENCE_S = 3.0
"""A rank that is not heard of for so long is dead or frozen."""
START_SILENCE_S = 60.0
"""The same while it starts: libraries and drivers that load may hold all of a process's threads up."""

LEAST_STEP_S = 5.0
"""No step is called hung earlier."""
TIMES_PREDICTED = 20.0
"""A step hangs when it takes so many times what is expected of it."""
FIRST_STEPS = 8
"""Steps that are excused, as is the first one of a size (within a factor of two): kernels compile, memory is touched
for the first time."""
FIRST_STEPS_S = 300.0
"""How long one of them may take."""


class Silence:
    """Which peers were not heard of for too long. Only time in which the listener itself ran counts: whoever was
    frozen or starved finds its peers' messages waiting, not its peers dead."""

    def __init__(self, now_s: float) -> None:
        self._looked_at_s = now_s
        self._awake_s = 0.0
        self._heard_at_s: dict[int, float] = {}
        self._is_up: set[int] = set()

    def heard(self, peer: int) -> None:
        """Something came from `peer`."""
        self._heard_at_s[peer] = self._awake_s

    def is_up(self, peer: int) -> None:
        """From now on `peer` has no excuse of starting."""
        self._is_up.add(peer)
        self.heard(peer)

    def forget(self, peer: int) -> None:
        """`peer` said that it leaves."""
        self._heard_at_s.pop(peer, None)

    def look(self, now_s: float) -> tuple[int, float] | None:
        """A peer that is silent for too long and for how many seconds; None when all is well. Call it more often than
        every BEAT_S, after all that has arrived was reported."""
        self._awake_s += min(now_s - self._looked_at_s, BEAT_S)
        self._looked_at_s = now_s
        for peer, heard_at_s in self._heard_at_s.items():
            age_s = self._awake_s - heard_at_s
            if age_s > (SILENCE_S if peer in self._is_up else START_SILENCE_S):
                return peer, age_s
        return None


class StepClock:
    """Notices a step that hangs. `begin` and `end` enclose a time in which the host waits for a step; `overdue` may be
    called by another thread.

    What a step may take is `predict` of its tokens where the device's speed is known, else what the steps before it
    took: the slowest of late, per token.
    """

    def __init__(self, predict: Callable[[int], float] | None = None) -> None:
        """`predict`: seconds that a step of so many tokens takes at most."""
        self._predict = predict
        self._waits_for: tuple[int, int, float] | None = None  # step id, tokens, since when
        self._awake_since_s = -math.inf
        self._sizes_seen: set[int] = set()
        self._num_ended = 0
        self._s_per_token = 0.0
        self._slowest_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the host waits for a step."""
        return self._waits_for is not None

    def begin(self, step_id: int, num_tokens: int, now_s: float) -> None:
        """The host turns to a step and goes on when it is done."""
        self._waits_for = step_id, max(num_tokens, 1), now_s

    def end(self, now_s: float, *, is_done: bool = True) -> None:
        """The host goes on. `is_done`: with the step's result, so that its time is learned from."""
        assert self._waits_for is not None, "begin comes first"
        _, num_tokens, since_s = self._waits_for
        self._waits_for = None
        if not is_done:
            return
        took_s = now_s - since_s
        self._num_ended += 1
        self._sizes_seen.add(num_tokens.bit_length())
        fade = 0.98  # what was slow once is forgotten over some hundred steps
        self._s_per_token = max(took_s / num_tokens, self._s_per_token * fade)
        self._slowest_s = max(took_s, self._slowest_s * fade)

    def allowed_s(self, num_tokens: int) -> float:
        """How long a step of `num_tokens` may take before it hangs."""
        if self._predict is not None:
            expected_s = self._predict(num_tokens)
        else:
            # A small step has costs of its own; a large one costs no more by the token than small ones did.
            expected_s = max(self._slowest_s, self._s_per_token * num_tokens)
        is_first = self._num_ended < FIRST_STEPS or num_tokens.bit_length() not in self._sizes_seen
        least_s = FIRST_STEPS_S if is_first else LEAST_STEP_S
        return max(least_s, TIMES_PREDICTED * expected_s)

    def waiting(self, now_s: float) -> tuple[float, float] | None:
        """How long the step that the host waits for takes so far, and how long it may; None while it waits for none."""
        waits_for = self._waits_for
        return None if waits_for is None else (now_s - waits_for[2], self.allowed_s(waits_for[1]))

    def was_frozen(self, now_s: float) -> None:
        """The host itself did not run for a while, until now: that time is no step's."""
        self._awake_since_s = now_s

    def overdue(self, now_s: float) -> str | None:
        """A sentence when the step that the host waits for hangs."""
        waits_for = self._waits_for
        if waits_for is None:
            return None
        step_id, num_tokens, since_s = waits_for
        allowed_s = self.allowed_s(num_tokens)
        took_s = now_s - max(since_s, self._awake_since_s)
        if took_s <= allowed_s:
            return None
        return f"Step {step_id} of {num_tokens} tokens hangs: {took_s:.1f} s, where {allowed_s:.1f} s may pass."
