"""An attempt that takes the way over two replicas: the prompt on one, all but the first token on another. Knows the two
channels, not how the replicas were chosen; the KV goes from engine to engine and is none of its business.

    edge -- Expect(ticket) -----------------------------------------> decode
    edge -- Submit(SendKv) ---> prefill -- KV, core to core --------> decode
    edge <-- first token ------ prefill
    edge -- Submit(first token, TakeKv) ----------------------------> decode
    edge <-- second token and so on --------------------------------- decode

The decode replica takes the KV that has come or computes it again: whatever fails after the first token costs time and
nothing else. Before the first token nothing has been shown, and the request begins anew anywhere. A ticket is taken or
released, whatever happens.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable

import msgspec

from manta.engine.kv_transfer.messages import SendKv, TakeKv
from manta.engine.request import EngineRequest, FinishReason, Refusal, RefusalReason, RequestDelta
from manta.engine.stats import EngineInfo
from manta.replicas.channel import ChannelLost, ReplicaLeaves

from .attempts import Attempt, RoutedSequence
from .chooser import Booking
from .explanations import Explained
from .links import Link


class Outcome(enum.StrEnum):
    """How a detour ended, for the metric."""

    HANDED_OVER = "handed_over"
    """The decode replica went on after the first token; its own counters say whether with KV that came."""
    ONE_TOKEN = "one_token"
    """The first token was the last, or no more was wanted."""
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_LOST = "prefill_lost"
    PREFILL_LEFT = "prefill_left"
    DECODE_LOST = "decode_lost"
    """It died, left or refused before its first delta."""
    CANCELLED = "cancelled"


def mismatch(prefill: EngineInfo, decode: EngineInfo) -> str | None:
    """Why KV cannot go from one replica to the other, as a sentence without its end; None when it can."""
    for side, info in (("prefill", prefill), ("decode", decode)):
        if info.kv is None:
            return f"the {side} replica was started without cache.kv_transfer"
    assert prefill.kv is not None
    assert decode.kv is not None
    return prefill.kv.mismatch(decode.kv)


class Detour(Attempt):
    """`link` is the replica that is in charge: the one that computes the prompt, then the one that decodes."""

    def __init__(
        self,
        sequence: RoutedSequence,
        link: Link,
        booking: Booking,
        explained: Explained,
        submission: EngineRequest,
        *,
        prefill: Link,
        release: Callable[[], None],
        release_prefill: Callable[[], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        """`link` decodes, `prefill` computes the prompt; there must be no mismatch between them. The two releases end
        what accounts for it in Serve. `on_end` is told the outcome, once."""
        super().__init__(sequence, prefill, booking, explained, submission, release=release)
        assert link.channel is not None
        self._decode, self._decode_channel = link, link.channel
        self._prefill = prefill
        self._release_prefill: Callable[[], None] | None = release_prefill
        self._on_end: Callable[[Outcome], None] | None = on_end
        self._outcome = Outcome.CANCELLED
        self._ticket: str | None = f"{submission.request_id}/{secrets.token_hex(8)}"
        """Until somebody has taken what comes under it."""
        self._on_first: Callable[[RequestDelta], None] | None = None
        self._is_over = False
        """Whether the request has ended: its first token was the last, or no more is wanted."""

    @property
    def links(self) -> tuple[Link, ...]:
        return (self._prefill, self._decode)

    def submit(self, *, on_first: Callable[[RequestDelta], None]) -> None:
        request, kv = self.submission, self._decode_channel.info.kv
        assert kv is not None
        assert self._ticket is not None
        self._on_first = on_first
        # One that `min_tokens` forbids as the first token is the same whether it says 1 or more.
        params = msgspec.structs.replace(request.params, max_tokens=1, min_tokens=min(request.params.min_tokens, 1))
        self._decode_channel.expect(self._ticket, request.prompt_token_ids, request.cache_salt)
        handoff = SendKv(self._ticket, kv)
        first = msgspec.structs.replace(request, params=params, handoff=handoff)
        self._stream = self.channel.submit(first, self._take_first)

    async def wait(self) -> Refusal | None:
        """As Attempt's, of whichever replica is in charge. A prefill replica that is full or cannot take the request is
        passed by."""
        assert self._stream is not None
        try:
            refusal = await self._stream.wait()
        except ChannelLost:
            self._outcome = Outcome.PREFILL_LOST
            raise
        except ReplicaLeaves:
            self._outcome = Outcome.PREFILL_LEFT
            raise
        if refusal is not None:
            self._outcome = Outcome.PREFILL_REFUSED
            if refusal.reason is RefusalReason.DRAINING:
                return refusal
            self._give_up_ticket()
        elif self._is_over:
            self._outcome = Outcome.ONE_TOKEN
            return None
        else:
            self._outcome = Outcome.DECODE_LOST
            self.sequence.must_go_on = True
        self._go_on()
        return await self._stream.wait()

    def end(self) -> None:
        super().end()
        self._give_up_ticket()
        self._leave_prefill()
        if self._on_end is not None:
            self._on_end(self._outcome)
            self._on_end = None

    def _go_on(self) -> None:
        """At the decode replica: with the KV that was handed over, or with the whole request."""
        self.channel.finish(self.submission.request_id)
        self.booking.prefill_over()
        self.link, self.channel = self._decode, self._decode_channel
        self.submission = self.sequence.state.submission()
        if self._ticket is not None:
            self.submission = msgspec.structs.replace(self.submission, handoff=TakeKv(self._ticket))
        else:
            self._leave_prefill()
        self._stream = self.channel.submit(self.submission, self._take)

    def _take_first(self, delta: RequestDelta) -> bool:
        """Of the prefill replica. Whether its one token is the end is a question of what was asked for."""
        stops = delta.finish_reason is FinishReason.STOP and self.sequence.state.request.params.min_tokens <= 1
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not stops:
            delta.finish_reason = delta.stop_token_id = None
        is_wanted = self._relay(delta)
        self._is_over = delta.finish_reason is not None or not is_wanted
        return is_wanted

    def _take(self, delta: RequestDelta) -> bool:
        """Of the decode replica."""
        if self._ticket is not None:
            self._ticket, self._outcome = None, Outcome.HANDED_OVER
            self.sequence.note.handed_over_at_s = time.monotonic()
            self._leave_prefill()
        return self._relay(delta)

    def _relay(self, delta: RequestDelta) -> bool:
        if self._on_first is not None:
            self._on_first(delta)
            self._on_first = None
        self.sequence.state.add(delta)
        return self.sequence.take(delta)

    def _give_up_ticket(self) -> None:
        if self._ticket is not None:
            self._decode_channel.release(self._ticket)
            self._ticket = None

    def _leave_prefill(self) -> None:
        """It is not needed any more; KV that is on its way has arrived by the other one's first delta."""
        if self._release_prefill is not None:
            self._release_prefill()
            self._release_prefill = None
