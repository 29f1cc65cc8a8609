"""Signs of life of an engine's process, from a thread and over a socket of their own. Knows no engine and no request.

Frames come from the step loop, so a long step is silent. Beats come beside them: they say that the process lives, how
long its loop is at one step, and how long it may be. They carry nothing else, so their order matters to nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import zmq

BEAT_INTERVAL_S = 1.0
SILENCE_S = 4.0
"""A process of which neither frame nor beat came for so long is dead or frozen."""


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """Seconds that the step loop is at one thing (0 while it waits for work), and the most that this may take."""

    age_s: float
    bound_s: float

    @property
    def is_hang(self) -> bool:
        return self.age_s > self.bound_s


encode_beat = msgspec.msgpack.Encoder().encode
decode_beat = msgspec.msgpack.Decoder(Beat).decode


class Heartbeat:
    """The sender. The loop's thread calls `begin_turn` and `end_turn`; `close` ends the thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        turn_bound_s: float,
        step: Callable[[float], tuple[float, float] | None] | None = None,
        interval_s: float = BEAT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`socket` is a bound PUB, which belongs to the thread from now on.

        `step(now_s)` says, while the loop waits for a step of the device, how long it does and may (seconds); for the
        rest of a turn, and where there is no such thing, `turn_bound_s` is the bound.
        """
        self._socket = socket
        self._turn_bound_s = turn_bound_s
        self._step = step
        self._interval_s = interval_s
        self._clock = clock
        self._turn_began_at_s: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def begin_turn(self) -> None:
        """The loop works from now on."""
        self._turn_began_at_s = self._clock()

    def end_turn(self) -> None:
        """The loop waits for work."""
        self._turn_began_at_s = None

    def beat(self) -> Beat:
        """What is to say now."""
        began_at_s, now_s = self._turn_began_at_s, self._clock()
        if began_at_s is None:
            return Beat(0.0, self._turn_bound_s)
        step = None if self._step is None else self._step(now_s)
        return Beat(*step) if step is not None else Beat(now_s - began_at_s, self._turn_bound_s)

    def close(self) -> None:
        """End the thread and close the socket."""
        self._is_over.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                self._socket.send(encode_beat(self.beat()), zmq.NOBLOCK)
            except zmq.Again:  # nobody reads: whoever does will miss the beats and say so
                continue
